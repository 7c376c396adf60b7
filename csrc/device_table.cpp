#include "device_table.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <unordered_map>

namespace ampfast {

namespace {

// Tables kept for reuse: this many of those that were used last, or as many as take so much memory
// on devices, whichever is more. Optimizers that step in turn each have one, and for every stream
// another.
constexpr size_t kLeastTables = 32;
constexpr int64_t kTableBytes = int64_t{1} << 23;

// Words of pinned memory kept ready for captured tables, since nothing can be allocated under
// capture: at least this, and room for several of the largest table so far.
constexpr int64_t kLeastReserve = int64_t{1} << 17;
constexpr int64_t kTablesInReserve = 16;

Uploads& counted() {
  static Uploads uploads{0, 0};
  return uploads;
}

at::Tensor empty_words(int64_t words, at::TensorOptions options) {
  return at::empty({words}, options.dtype(at::kLong));
}

// Pinned memory for captured tables. What was taken from it is never given back: a graph may be
// replayed at any time.
class Reserve {
 public:
  void ensure(int64_t words) {
    const int64_t wanted = std::max(kLeastReserve, kTablesInReserve * words);
    if (!memory_.defined() || memory_.numel() - used_ < wanted) {
      if (used_ > 0) {
        spent_.push_back(memory_);
      }
      memory_ = empty_words(2 * wanted, at::TensorOptions().pinned_memory(true));
      used_ = 0;
    }
  }

  at::Tensor take(int64_t words) {
    TORCH_CHECK(memory_.defined() && memory_.numel() - used_ >= words,
                "a CUDA graph cannot capture this: the memory for its gradient lists must exist "
                "before; run one iteration without capturing first, and capture fewer steps in "
                "one graph if that is not enough");
    used_ += words;
    return memory_.narrow(0, used_ - words, words);
  }

 private:
  std::vector<at::Tensor> spent_;
  at::Tensor memory_;
  int64_t used_ = 0;
};

Reserve& reserve() {
  static Reserve& reserve = *new Reserve;
  return reserve;
}

int64_t address_of(const Span& span) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(span.address));
}

int64_t window_count(const Span& span, int64_t element_size) {
  const int64_t bytes = address_of(span) % kAddressAlignment + span.numel * element_size;
  return (bytes + kWindowBytes - 1) / kWindowBytes;
}

// Differs, almost surely, where the tables do; what is kept is found by it, since comparing whole
// lists that differ at their ends takes long.
uint64_t fingerprint_of(const GradList& grads, int64_t max_programs, c10::StreamId stream) {
  uint64_t hash = mixed(grads.lists().size(), static_cast<uint64_t>(grads.device().index()));
  hash = mixed(mixed(hash, static_cast<uint64_t>(max_programs)), static_cast<uint64_t>(stream));
  for (const DtypeList& list : grads.lists()) {
    hash = mixed(hash, static_cast<uint64_t>(list.dtype));
    for (const Span& span : list.spans) {
      hash = mixed(hash, static_cast<uint64_t>(address_of(span)));
      hash = mixed(hash, static_cast<uint64_t>(span.numel));
      hash = mixed(hash, static_cast<uint64_t>(span.parameter));
    }
  }
  return hash;
}

// Tables that may be used again.
class Recent {
 public:
  std::shared_ptr<DeviceTable> find(uint64_t fingerprint) {
    const auto place = places_.find(fingerprint);
    if (place == places_.end()) {
      return nullptr;
    }
    tables_.splice(tables_.begin(), tables_, place->second);
    return tables_.front();
  }

  void add(const std::shared_ptr<DeviceTable>& table) {
    const auto place = places_.find(table->fingerprint());
    if (place != places_.end()) {
      remove(place->second);
    }
    tables_.push_front(table);
    places_[table->fingerprint()] = tables_.begin();
    bytes_ += table->bytes();
    while (tables_.size() > kLeastTables && bytes_ > kTableBytes) {
      remove(std::prev(tables_.end()));
    }
  }

  void clear() {
    places_.clear();
    tables_.clear();
    bytes_ = 0;
  }

 private:
  using Tables = std::list<std::shared_ptr<DeviceTable>>;

  void remove(Tables::iterator table) {
    bytes_ -= (*table)->bytes();
    places_.erase((*table)->fingerprint());
    tables_.erase(table);
  }

  Tables tables_;  // the one that was used last comes first
  std::unordered_map<uint64_t, Tables::iterator> places_;
  int64_t bytes_ = 0;
};

// Neither this nor the reserve is ever destroyed: at the end of the process the device may be gone
// before them.
Recent& recent() {
  static Recent& recent = *new Recent;
  return recent;
}

}  // namespace

DeviceTable::DeviceTable(const GradList& grads, int64_t max_programs, c10::StreamId stream)
    : fingerprint_(fingerprint_of(grads, max_programs, stream)),
      device_(grads.device()),
      max_programs_(max_programs),
      stream_(stream),
      words_(kHeaderWords) {
  for (const DtypeList& list : grads.lists()) {
    add(list);
  }
  words_[kPartials] = static_cast<int64_t>(words_.size());
}

void DeviceTable::add(const DtypeList& list) {
  const int64_t count = static_cast<int64_t>(list.spans.size());
  const int64_t size = list.element_size();
  int64_t windows = 0;
  for (const Span& span : list.spans) {
    windows += window_count(span, size);
  }
  const int64_t programs = std::min(windows, max_programs_);
  const int64_t word = static_cast<int64_t>(words_.size());
  const int64_t parameters_word = word + kSegmentWords + 2 * (count + 1) + 2 * programs;
  words_.resize(parameters_word + count);

  int64_t* segment = words_.data() + word;
  segment[kTensors] = count;
  segment[kWindows] = windows;
  segment[kSegmentPrograms] = programs;
  segment[kFirstProgram] = words_[kPrograms];
  segment[kParameters] = parameters_word;
  int64_t* addresses = segment + kSegmentWords;
  int64_t* lengths = addresses + count + 1;
  int64_t* starts = lengths + count + 1;
  int64_t* parameters = words_.data() + parameters_word;
  int64_t before = 0;
  int64_t program = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Span& span = list.spans[i];
    addresses[i] = address_of(span);
    lengths[i] = span.numel;
    parameters[i] = span.parameter;
    const int64_t after = before + window_count(span, size);
    for (; program < programs && program * windows / programs < after; ++program) {
      starts[2 * program] = i;
      starts[2 * program + 1] = program * windows / programs - before;
    }
    before = after;
  }
  words_[kPrograms] += programs;
  segments_.push_back({list.dtype, word, count, windows, programs});
}

bool DeviceTable::holds(const GradList& grads, int64_t max_programs, c10::StreamId stream) const {
  if (grads.device() != device_ || max_programs != max_programs_ || stream != stream_ ||
      grads.lists().size() != segments_.size()) {
    return false;
  }
  for (size_t i = 0; i < segments_.size(); ++i) {
    const DtypeList& list = grads.lists()[i];
    const Segment& segment = segments_[i];
    if (list.dtype != segment.dtype || static_cast<int64_t>(list.spans.size()) != segment.tensors) {
      return false;
    }
    const int64_t* address = words_.data() + segment.word + kSegmentWords;
    const int64_t* length = address + segment.tensors + 1;
    const int64_t* parameter = words_.data() + words_[segment.word + kParameters];
    for (const Span& span : list.spans) {
      if (address_of(span) != *address++ || span.numel != *length++ ||
          span.parameter != *parameter++) {
        return false;
      }
    }
  }
  return true;
}

void DeviceTable::upload(bool captured) {
  const int64_t words = static_cast<int64_t>(words_.size());
  const bool is_cpu = device_.is_cpu();
  at::Tensor source;
  if (captured) {
    source = reserve().take(words);
  } else {
    // torch's allocator does not hand pinned memory out again before the copy from it is over.
    source = empty_words(words, at::TensorOptions().pinned_memory(!is_cpu));
  }
  const size_t bytes = words_.size() * sizeof(int64_t);
  std::memcpy(source.mutable_data_ptr(), words_.data(), bytes);
  buffer_ = empty_words(words + words_[kPrograms], at::TensorOptions().device(device_));
  buffer_.narrow(0, 0, words).copy_(source, /*non_blocking=*/true);
  counted().count += 1;
  counted().bytes += static_cast<int64_t>(bytes);
}

std::shared_ptr<const DeviceTable> table_of(const GradList& grads, int64_t max_programs,
                                            bool capturing) {
  const c10::impl::VirtualGuardImpl guard(grads.device().type());
  const c10::StreamId stream = guard.getStream(grads.device()).id();
  if (!capturing) {
    const auto known = recent().find(fingerprint_of(grads, max_programs, stream));
    if (known != nullptr && known->holds(grads, max_programs, stream)) {
      known->prepare_capture();
      return known;
    }
  }
  auto table = std::make_shared<DeviceTable>(grads, max_programs, stream);
  table->upload(capturing);
  if (!capturing) {
    table->prepare_capture();
    recent().add(table);
  }
  return table;
}

void DeviceTable::prepare_capture() const {
  if (!device_.is_cpu()) {
    reserve().ensure(static_cast<int64_t>(words_.size()));
  }
}

Uploads uploads() { return counted(); }

void clear_tables() { recent().clear(); }

}  // namespace ampfast
