// CPU kernels over a whole gradient list: shares chunks among threads, decides on the largest
// value.
#include "multi_tensor.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "half.h"
#include "instruction_set.h"

namespace ampfast::cpu {

namespace {

// What a chunk costs besides its elements, in elements; balances many tiny tensors.
constexpr int64_t kChunkCost = 64;

// The least work for a thread, in bytes. Where every core is busy, as in training with data
// loaders, waking a thread can take a time slice, which is longer than a small list takes
// altogether.
std::atomic<int64_t> grain{3 * 1024 * 1024};

struct Position {
  size_t span;
  int64_t chunk;
};

int64_t weight(const Span& span) { return span.numel + chunk_count(span.numel) * kChunkCost; }

// Where each task of `count` starts, so that all have about the same work.
std::vector<Position> shares(const DtypeList& list, int64_t total, int64_t count) {
  std::vector<Position> starts;
  int64_t before = 0;
  for (size_t i = 0; i < list.spans.size(); ++i) {
    const int64_t after = before + weight(list.spans[i]);
    while (static_cast<int64_t>(starts.size()) < count) {
      const int64_t target = total / count * static_cast<int64_t>(starts.size());
      if (target >= after) {
        break;
      }
      starts.push_back({i, (target - before) / (kChunk + kChunkCost)});
    }
    before = after;
  }
  return starts;
}

// In a forked child the threads of OpenMP are gone, and waiting for them would not end.
std::atomic<bool> forked{false};
#ifndef _WIN32
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// torch takes tensors one after another. Where they share memory the order shows, and threads would
// race.
bool shares_memory(const DtypeList& list) {
  const auto by_address = [](const Span& a, const Span& b) { return a.address < b.address; };
  std::vector<Span> sorted;
  const std::vector<Span>* spans = &list.spans;
  if (!std::is_sorted(spans->begin(), spans->end(), by_address)) {
    sorted = list.spans;
    std::sort(sorted.begin(), sorted.end(), by_address);
    spans = &sorted;
  }
  const auto overlaps = [&list](const Span& a, const Span& b) {
    return a.address + a.numel * list.element_size() > b.address;
  };
  return std::adjacent_find(spans->begin(), spans->end(), overlaps) != spans->end();
}

// Calls `body(address, numel, chunk)` for every chunk, from several threads if that pays.
template <class Body>
void for_each_chunk(const DtypeList& list, bool writes, const Body& body) {
  const int64_t size = list.element_size();
  int64_t total = 0;
  for (const Span& span : list.spans) {
    total += weight(span);
  }
  int64_t tasks = std::min<int64_t>(at::get_num_threads(), total * size / grain);
  if (at::in_parallel_region() || forked || tasks < 2 || (writes && shares_memory(list))) {
    tasks = 1;
  }
  const std::vector<Position> starts = shares(list, total, tasks);
  at::parallel_for(0, tasks, 1, [&](int64_t first, int64_t last) {
    const Position end = last < tasks ? starts[last] : Position{list.spans.size(), 0};
    Position at = starts[first];
    for (; at.span < list.spans.size() && at.span <= end.span; ++at.span, at.chunk = 0) {
      const Span& span = list.spans[at.span];
      const int64_t stop = at.span < end.span ? chunk_count(span.numel) : end.chunk;
      for (; at.chunk < stop; ++at.chunk) {
        const int64_t offset = at.chunk * kChunk;
        body(span.address + offset * size, std::min(kChunk, span.numel - offset),
             span.first_chunk + at.chunk);
      }
    }
  });
}

// The largest of what the threads found. Rarely written: most chunks do not raise it.
class Peak {
 public:
  void raise(int64_t bits) {
    int64_t seen = bits_.load(std::memory_order_relaxed);
    while (seen < bits && !bits_.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  }
  int64_t bits() const { return bits_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> bits_{0};
};

double double_of(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <class T>
float used_peak16(T value, Use use, float factor) {
  const float used = used_value(widen(value), use, factor);
  return use == Use::kMultiply ? widen(narrow(used, T{})) : used;
}

// What the magnitude `bits` becomes: rounded to its dtype where that is written, as fused
// optimizers see it otherwise. Rounding is monotone, so the largest magnitude tells of all.
double used_peak(Dtype dtype, int64_t bits, Use use, float factor) {
  switch (dtype) {
    case Dtype::kFloat64:
      return used_value(double_of(bits), use, factor);
    case Dtype::kFloat32:
      return used_value(float_of(static_cast<uint32_t>(bits)), use, factor);
    case Dtype::kFloat16:
      return used_peak16(Half{static_cast<uint16_t>(bits)}, use, factor);
    default:
      return used_peak16(BFloat16{static_cast<uint16_t>(bits)}, use, factor);
  }
}

// Tells whether what was found is not finite once it is used, and writes the notes on it.
bool conclude(Dtype dtype, const Peak& peak, Use use, float factor, const Notes& notes) {
  const bool found = !std::isfinite(used_peak(dtype, peak.bits(), use, factor));
  notes.write([&](int64_t bits) { return used_peak(dtype, bits, Use::kNothing, 1); },
              [&](int64_t bits) { return used_peak(dtype, bits, use, factor); }, found);
  return found;
}

}  // namespace

int64_t set_grain(int64_t bytes) { return grain.exchange(bytes); }

bool check(const GradList& grads, Use use, float factor, const Track* track) {
  bool found = false;
  for (const DtypeList& list : grads.lists()) {
    const Dtype dtype = dtype_of(list.dtype);
    const Loops& loops = loops_for(dtype);
    Peak peak;
    Notes notes(track, list, loops);
    for_each_chunk(list, false, [&](const char* address, int64_t numel, int64_t chunk) {
      notes.look(chunk, address, numel);
      const int64_t bits = loops.peak_bits(address, numel);
      notes.peak(chunk, bits);
      peak.raise(bits);
    });
    found |= conclude(dtype, peak, use, factor, notes);
  }
  return found;
}

bool unscale(const GradList& grads, float inv_scale, const Track* track, double coefficient) {
  const bool clips = coefficient != 1;
  if (inv_scale == 1 && !clips) {
    return check(grads, Use::kNothing, 1, track);  // as torch: not even a subnormal is flushed
  }
  bool found = false;
  for (const DtypeList& list : grads.lists()) {
    const Dtype dtype = dtype_of(list.dtype);
    const Loops& loops = loops_for(dtype);
    Peak peak;
    Notes notes(track, list, loops);
    for_each_chunk(list, true, [&](char* address, int64_t numel, int64_t chunk) {
      notes.look(chunk, address, numel);
      const int64_t bits = clips ? loops.unscale_and_clip(address, numel, inv_scale, coefficient)
                                 : loops.unscale(address, numel, inv_scale);
      notes.peak(chunk, bits);
      peak.raise(bits);
    });
    found |= conclude(dtype, peak, Use::kMultiply, inv_scale, notes);
  }
  return found;
}

Norms norms(const GradList& grads, float inv_scale, const Track* track) {
  Norms total{0, 0};
  for (const DtypeList& list : grads.lists()) {
    const Dtype dtype = dtype_of(list.dtype);
    const Loops& loops = loops_for(dtype);
    Peak peak;
    Notes notes(track, list, loops);
    std::vector<double> partial(list.chunks);
    for_each_chunk(list, false, [&](const char* address, int64_t numel, int64_t chunk) {
      notes.look(chunk, address, numel);
      int64_t bits = 0;
      partial[chunk] = loops.squares(address, numel, inv_scale, &bits);
      notes.peak(chunk, bits);
      peak.raise(bits);
    });
    conclude(dtype, peak, Use::kMultiply, inv_scale, notes);
    for (const double squares : partial) {
      total.sum_of_squares += squares;
    }
    const double largest = std::fabs(used_peak(dtype, peak.bits(), Use::kMultiply, inv_scale));
    total.absolute_maximum = larger_or_nan(total.absolute_maximum, largest);
  }
  return total;
}

}  // namespace ampfast::cpu
