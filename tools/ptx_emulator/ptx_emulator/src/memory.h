// Memory that a launch may access.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "races.h"

namespace ptx {

// A range of CPU memory.
struct Range {
  uint64_t address;
  int64_t bytes;
  int64_t may_write;
};

// Request of machine.py.
struct Launch {
  int64_t grid[3];
  int64_t block[3];
  int64_t dynamic_shared_bytes;
  const char* parameters;
  int64_t parameter_bytes;
  const Range* ranges;
  int64_t range_count;
  uint64_t seed;
  int64_t checks_races;
  // Bytes of global memory accessed.
  int64_t read;
  int64_t written;

  int64_t programs() const { return grid[0] * grid[1] * grid[2]; }
  int64_t threads() const { return block[0] * block[1] * block[2]; }  // of a program
};

class Memory {
 public:
  explicit Memory(Launch& launch) : launch_(launch) {
    ranges_.assign(launch.ranges, launch.ranges + launch.range_count);
    std::sort(ranges_.begin(), ranges_.end(),
              [](const Range& a, const Range& b) { return a.address < b.address; });
    if (launch.checks_races != 0) {
      races_.emplace(launch.programs(), launch.threads());
    }
  }

  // Address of an access by a thread, counted over all programs; `stored` is the value to write.
  // Throws if it is not allowed.
  char* access(Space space, uint64_t address, int64_t bytes, Access access, int64_t thread,
               std::vector<char>& shared, const char* stored) {
    if (address % static_cast<uint64_t>(bytes) != 0) {
      throw Error{"accesses a misaligned address"};
    }
    if (space == Space::kParameters) {
      require_within(address, bytes, launch_.parameter_bytes);
      return const_cast<char*>(launch_.parameters) + address;
    }
    const bool is_shared = space == Space::kShared;
    if (is_shared) {
      require_within(address, bytes, static_cast<int64_t>(shared.size()));
    } else {
      require_given(address, bytes, access != Access::kRead);
      (access == Access::kWrite ? launch_.written : launch_.read) += bytes;
    }
    char* place = is_shared ? shared.data() + address : reinterpret_cast<char*>(address);
    if (races_) {
      const bool changes = stored == nullptr || std::memcmp(place, stored, bytes) != 0;
      races_->note(thread, is_shared ? thread / launch_.threads() : -1, address, bytes, access,
                   changes);
    }
    return place;
  }

  // Race detector; null unless requested.
  std::optional<Races>& races() { return races_; }

 private:
  static void require_within(uint64_t address, int64_t bytes, int64_t size) {
    const auto end = static_cast<uint64_t>(size);
    if (address > end || static_cast<uint64_t>(bytes) > end - address) {
      throw Error{"accesses memory beyond the end of its state space"};
    }
  }

  void require_given(uint64_t address, int64_t bytes, bool writes) const {
    auto range = std::upper_bound(ranges_.begin(), ranges_.end(), address,
                                  [](uint64_t a, const Range& b) { return a < b.address; });
    const auto is_inside = [&](const Range& r) {
      return address + bytes <= r.address + r.bytes && (!writes || r.may_write != 0);
    };
    if (range == ranges_.begin() || !is_inside(*--range)) {
      throw Error{std::string(writes ? "writes" : "reads") +
                  " memory that the launch was not given"};
    }
  }

  Launch& launch_;
  std::vector<Range> ranges_;
  std::optional<Races> races_;
};

}  // namespace ptx
