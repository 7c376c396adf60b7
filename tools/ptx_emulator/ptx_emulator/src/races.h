// Detects unordered accesses by PTX's memory model: barriers order the threads of a program, and
// atomics that release and acquire, alone or with fences, order programs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "instruction.h"

namespace ptx {

enum class Access { kRead, kWrite, kAtomic };

class Races {
 public:
  Races(int64_t programs, int64_t threads)
      : threads_(threads), views_(programs * threads, View(programs * threads)) {
    for (size_t thread = 0; thread < views_.size(); ++thread) {
      views_[thread].seen[thread] = 1;
    }
  }

  // Orders all earlier accesses of a program's threads before all later ones.
  void barrier(int64_t program) {
    const auto first = views_.begin() + program * threads_;
    Clock all = first->seen;
    for (auto view = first; view != first + threads_; ++view) {
      join(all, view->seen);
    }
    for (auto view = first; view != first + threads_; ++view) {
      view->seen = all;
      advance(view - views_.begin());
    }
  }

  void fence(int64_t thread) {
    View& view = views_[thread];
    join(view.seen, view.observed);
    view.published = view.seen;
    advance(thread);
  }

  // Acquires and releases of an atomic at `address`.
  void synchronize(int64_t thread, uint64_t address, bool is_ordered) {
    View& view = views_[thread];
    Clock& there = released_.try_emplace(address, Clock(views_.size())).first->second;
    join(is_ordered ? view.seen : view.observed, there);
    join(there, is_ordered ? view.seen : view.published);
    advance(thread);
  }

  // Records an access and throws if another one is not ordered with it. `program` is the owner of
  // shared memory, or -1. Rewriting the same value is harmless.
  void note(int64_t thread, int64_t program, uint64_t address, int64_t bytes, Access access,
            bool changes) {
    const Clock& seen = views_[thread].seen;
    for (uint64_t at = address / 2; at <= (address + bytes - 1) / 2; ++at) {
      Cell& cell = cells_[(static_cast<uint64_t>(program + 1) << 48) ^ at];
      if (!changes && cell.writer >= 0) {
        continue;
      }
      if (cell.writer >= 0 && cell.written > seen[cell.writer]) {
        throw Error{"races with a write of thread " + std::to_string(cell.writer)};
      }
      if (access != Access::kAtomic) {
        require_ordered(cell.atomics, seen, "an atomic");
      }
      if (access == Access::kRead) {
        cell.readers[thread] = seen[thread];
        continue;
      }
      require_ordered(cell.readers, seen, "a read");
      if (access == Access::kAtomic) {
        cell.atomics[thread] = seen[thread];
        continue;
      }
      cell = {thread, seen[thread], {}, {}};
    }
  }

 private:
  using Clock = std::vector<uint32_t>;

  // Vector clock of a thread.
  struct View {
    explicit View(size_t all) : seen(all), published(all), observed(all) {}
    Clock seen;
    Clock published;  // by its last fence
    Clock observed;   // by atomics since then, to be seen after the next fence
  };

  // Clocks of the threads at their last accesses.
  using When = std::unordered_map<int64_t, uint32_t>;

  // Two bytes; accesses before a write are ordered with it.
  struct Cell {
    int64_t writer = -1;
    uint32_t written = 0;
    When atomics;
    When readers;
  };

  static void require_ordered(const When& accesses, const Clock& seen, const std::string& what) {
    for (const auto& [thread, when] : accesses) {
      if (when > seen[thread]) {
        throw Error{"races with " + what + " of thread " + std::to_string(thread)};
      }
    }
  }

  static void join(Clock& into, const Clock& other) {
    std::transform(into.begin(), into.end(), other.begin(), into.begin(),
                   [](uint32_t a, uint32_t b) { return std::max(a, b); });
  }

  void advance(int64_t thread) { ++views_[thread].seen[thread]; }

  int64_t threads_;
  std::vector<View> views_;
  std::unordered_map<uint64_t, Clock> released_;
  std::unordered_map<uint64_t, Cell> cells_;
};

}  // namespace ptx
