#include "device_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <list>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ampfast {

namespace {

// Tables kept for reuse: this many of those that were used last, or as many as take so much memory
// on devices, whichever is more. Optimizers that step in turn each have one, and for every stream
// another.
constexpr size_t kLeastTables = 32;
constexpr int64_t kTableBytes = int64_t{1} << 23;

at::Tensor empty_words(int64_t words, at::TensorOptions options) {
  return at::empty({words}, options.dtype(at::kLong));
}

int64_t address_of(const Span& span) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.address));
}

int64_t bytes_of(const DtypeList& list) { return list.elements * list.element_size(); }

int64_t enough_chunks = kEnoughChunks;

// Depends on the list alone, and so does the order in which a norm is summed.
int64_t chunk_bytes(const DtypeList& list) {
  const int64_t share = (bytes_of(list) / enough_chunks + kWindowBytes) & -kWindowBytes;
  return std::min(share, kMostChunkBytes);
}

// Finds a table among those that are kept, since comparing whole lists that differ at their ends
// takes long. Lists that share one would upload their tables in turn, so it must mix well.
uint64_t fingerprint_of(const GradList& grads, c10::StreamId stream) {
  uint64_t hash = static_cast<uint64_t>(grads.device().index());
  const auto mix = [&hash](auto value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  };
  mix(stream);
  for (const DtypeList& list : grads.lists()) {
    mix(list.dtype);
    for (const Span& span : list.spans) {
      mix(address_of(span));
      mix(span.numel);
      mix(span.parameter);
      mix(reinterpret_cast<uintptr_t>(span.wide));
    }
  }
  return hash;
}

// Tables that may be used again, by fingerprint. Adding one to many takes no longer than to few:
// where gradients move at every step, each step does.
class Recent {
 public:
  std::shared_ptr<DeviceTable> find(uint64_t fingerprint) {
    const auto place = places_.find(fingerprint);
    if (place == places_.end()) {
      return nullptr;
    }
    by_use_.splice(by_use_.begin(), by_use_, place->second);
    return by_use_.front().table;
  }

  void add(uint64_t fingerprint, const std::shared_ptr<DeviceTable>& table) {
    // Freed at the end: that may run Python, which may ask for tables.
    std::list<Entry> dropped;
    const auto place = places_.find(fingerprint);
    if (place != places_.end()) {
      drop(place->second, dropped);
    }
    by_use_.push_front({fingerprint, table});
    places_[fingerprint] = by_use_.begin();
    bytes_ += table->bytes();
    while (places_.size() > kLeastTables && bytes_ > kTableBytes) {
      drop(std::prev(by_use_.end()), dropped);
    }
  }

  void clear() {
    bytes_ = 0;
    places_.clear();
    const auto dropped = std::exchange(by_use_, {});
  }

 private:
  struct Entry {
    uint64_t fingerprint;
    std::shared_ptr<DeviceTable> table;
  };

  void drop(std::list<Entry>::iterator entry, std::list<Entry>& dropped) {
    bytes_ -= entry->table->bytes();
    places_.erase(entry->fingerprint);
    dropped.splice(dropped.begin(), by_use_, entry);
  }

  std::list<Entry> by_use_;  // the last used comes first
  std::unordered_map<uint64_t, std::list<Entry>::iterator> places_;
  int64_t bytes_ = 0;
};

// Never destroyed: at the end of the process the device may be gone before it.
Recent& recent() {
  static Recent& recent = *new Recent;
  return recent;
}

}  // namespace

DeviceTable::DeviceTable(const GradList& grads, c10::StreamId stream)
    : device_(grads.device()), lists_(grads.lists()), stream_(stream), words_(kHeaderWords) {
  for (const DtypeList& list : lists_) {
    add(list);
  }
  words_[kPartials] = static_cast<int64_t>(words_.size());
  for (Segment& segment : segments_) {
    segment.partials += words_[kPartials];
  }
}

void DeviceTable::add(const DtypeList& list) {
  const int64_t most = chunk_bytes(list);
  const int64_t size = list.element_size();
  Segment segment{
      list.dtype, static_cast<int64_t>(words_.size()), 0, words_[kChunks], list.is_paired, true};
  for (const Span& span : list.spans) {
    int64_t address = address_of(span);
    const int64_t end = address + span.numel * size;
    while (address < end) {
      const int64_t next = std::min((address & -kAddressAlignment) + most, end);
      words_.push_back(address);
      words_.push_back((span.parameter << kParameterShift) | (next - address));
      if (list.is_paired) {
        const float* wide = span.wide + (address - address_of(span)) / size;
        words_.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(wide)));
        const int64_t head = (-address & (kAddressAlignment - 1)) / size;
        segment.is_aligned &= reinterpret_cast<uintptr_t>(wide + head) % kAddressAlignment == 0;
      }
      address = next;
      ++segment.chunks;
    }
  }
  words_[kChunks] += segment.chunks;
  segments_.push_back(segment);
}

bool DeviceTable::holds(const GradList& grads, c10::StreamId stream) const {
  return device_ == grads.device() && stream_ == stream && lists_ == grads.lists();
}

void DeviceTable::upload() {
  const int64_t words = static_cast<int64_t>(words_.size());
  // torch's allocator does not hand pinned memory out again before the copy from it is over, nor
  // ever what a graph copies from, since each replay reads it again.
  const at::Tensor source =
      empty_words(words, at::TensorOptions().pinned_memory(!device_.is_cpu()));
  std::memcpy(source.mutable_data_ptr(), words_.data(), words_.size() * sizeof(int64_t));
  buffer_ = empty_words(words + words_[kChunks], at::TensorOptions().device(device_));
  buffer_.narrow(0, 0, words).copy_(source, /*non_blocking=*/true);
  words_ = {};
  ++uploads();
}

std::shared_ptr<const DeviceTable> table_of(const GradList& grads, bool capturing) {
  const c10::impl::VirtualGuardImpl guard(grads.device().type());
  const c10::StreamId stream = guard.getStream(grads.device()).id();
  const uint64_t fingerprint = fingerprint_of(grads, stream);
  if (!capturing) {
    const auto known = recent().find(fingerprint);
    if (known != nullptr && known->holds(grads, stream)) {
      return known;
    }
  }
  auto table = std::make_shared<DeviceTable>(grads, stream);
  table->upload();
  if (!capturing) {
    recent().add(fingerprint, table);
  }
  return table;
}

int64_t& uploads() {
  static int64_t count = 0;
  return count;
}

void clear_tables() { recent().clear(); }

void set_enough_chunks(int64_t count) {
  TORCH_CHECK(count > 0, "the number of chunks must be positive, got ", count);
  enough_chunks = count;
  clear_tables();
}

}  // namespace ampfast
