// CPU kernels over a whole gradient list: shares chunks among threads, decides on the largest
// value.
#include "multi_tensor.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <numeric>

#ifndef _WIN32
#include <pthread.h>
#endif

#include "../track.h"
#include "instruction_set.h"

namespace ampfast::cpu {

namespace {

// The least work for a thread, in bytes: waking one pays no sooner.
std::atomic<int64_t> grain{1024 * 1024};

// Pieces of a list for each thread: one that wakes late, as where every core is busy, delays the
// others by no more than one.
constexpr int64_t kPieces = 32;

// The least elements that torch's ops give to a thread.
constexpr int64_t kTorchGrain = 32 * 1024;

// Between small tensors processors foresee no address.
constexpr int64_t kSpansAhead = 8;

// A forked child has no threads of OpenMP, and waiting for them would not end.
std::atomic<bool> forked{false};
#ifndef _WIN32
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

// torch takes tensors one after another. Where they share memory the order shows, and threads would
// race.
bool shares_memory(const DtypeList& list) {
  Reused<std::pair<const char*, const char*>> ranges;
  for (const Span& span : list.spans) {
    ranges.emplace_back(span.address, span.address + span.numel * list.element_size());
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) {
    std::sort(ranges.begin(), ranges.end());
  }
  const auto overlaps = [](const auto& a, const auto& b) { return a.second > b.first; };
  return std::adjacent_find(ranges.begin(), ranges.end(), overlaps) != ranges.end();
}

Reused<Span>::const_iterator span_of(const DtypeList& list, int64_t chunk) {
  const auto is_before = [](int64_t number, const Span& span) { return number < span.first_chunk; };
  return std::upper_bound(list.spans.begin(), list.spans.end(), chunk, is_before) - 1;
}

// The thread whose cache may hold a chunk: torch's ops, which wrote it, give each an equal part of
// a tensor.
int64_t writer_of(const DtypeList& list, int64_t chunk) {
  const Span& span = *span_of(list, chunk);
  const int64_t parts =
      std::min<int64_t>(at::get_num_threads(), at::divup(span.numel, kTorchGrain));
  return (chunk - span.first_chunk) * kChunk / at::divup(span.numel, parts);
}

// Calls `body(address, numel, chunk)` for every chunk, from several threads if that pays.
template <class Body>
void for_each_chunk(const DtypeList& list, bool writes, const Body& body) {
  const int64_t size = list.element_size();
  const auto take = [&](int64_t chunk, int64_t end) {
    auto span = span_of(list, chunk);
    for (; chunk < end; ++span) {
      if (list.spans.end() - span > kSpansAhead) {
        prefetch(span[kSpansAhead].address, 1);
      }
      int64_t offset = (chunk - span->first_chunk) * kChunk;
      for (; offset < span->numel && chunk < end; offset += kChunk) {
        const int64_t numel = std::min(kChunk, span->numel - offset);
        body(span->address + offset * size, numel, chunk++);
      }
    }
  };
  const int64_t shares = list.elements * size / grain;
  if (shares < 2 || at::in_parallel_region() || forked || (writes && shares_memory(list))) {
    take(0, list.chunks);
    return;
  }
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), shares);
  const int64_t piece = at::divup(list.chunks, threads * kPieces);
  const int64_t pieces = at::divup(list.chunks, piece);
  std::vector<std::atomic<bool>> taken(pieces);
  const auto take_once = [&](int64_t i) {
    if (!taken[i].exchange(true)) {
      take(i * piece, std::min((i + 1) * piece, list.chunks));
    }
  };
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t /*last*/) {
    for (int64_t i = 0; i < pieces; ++i) {
      if (writer_of(list, i * piece) == thread) {
        take_once(i);
      }
    }
    for (int64_t i = pieces; i-- > 0;) {
      take_once(i);
    }
  });
}

// A value of 16 bits as it is used.
template <class Half>
float used_half(int64_t bits, Factor how, float factor) {
  const Half half(static_cast<uint16_t>(bits), Half::from_bits());
  const float value = used_value(static_cast<float>(half), how, factor);
  return how == Factor::kTimes ? static_cast<float>(Half(value)) : value;
}

// The magnitude `bits` as it is used: rounded to the dtype that is written, as fused optimizers see
// it otherwise. Rounding is monotone, so the largest magnitude tells of all.
double used_peak(const DtypeList& list, int64_t bits, Factor how, float factor) {
  if (bits == 0 && how != Factor::kNone) {
    // An infinite factor makes zeros NaN and others infinite: a tensor counts as infinite,
    // whichever of them it has.
    const float used = used_value(0.0f, how, factor);
    return std::isnan(used) && !std::isnan(factor) ? INFINITY : used;
  }
  const Dtype dtype = dtype_of(list.dtype);
  if (dtype == Dtype::kFloat64) {
    return used_value(bits_as<double>(bits), how, factor);
  }
  if (dtype == Dtype::kFloat32) {
    return used_value(bits_as<float>(static_cast<uint32_t>(bits)), how, factor);
  }
  static_assert(kDtypeCount == 4);
  return dtype == Dtype::kFloat16 ? used_half<at::Half>(bits, how, factor)
                                  : used_half<at::BFloat16>(bits, how, factor);
}

// Rarely writes: most chunks do not raise it.
void raise(std::atomic<int64_t>& peak, int64_t bits) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (seen < bits && !peak.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

void require_rows(const GradList& grads, const Rows& rows) {
  for (const DtypeList& list : grads.lists()) {
    for (const Span& span : list.spans) {
      TORCH_CHECK(span.parameter < rows.parameters, "tracking is of ", rows.parameters,
                  " parameters, and a gradient is that of number ", span.parameter);
    }
  }
}

// Once in a step, however often it is marked.
void mark(int64_t step, int64_t& last, int64_t& times) {
  times += last != step;
  last = step;
}

// Marks the parameters of which a value is not finite as it is used, given the peaks of chunks.
void mark_non_finite(const DtypeList& list, const std::vector<int64_t>& peaks, Factor how,
                     float factor, const Rows& marks) {
  for (const Span& span : list.spans) {
    const auto first = peaks.begin() + span.first_chunk;
    const int64_t bits = *std::max_element(first, first + chunk_count(span.numel));
    const double used = used_peak(list, bits, how, factor);
    int64_t* row = marks.words + span.parameter * kMarkWords;
    if (!std::isfinite(used)) {
      mark(marks.step, row[kLastNonFinite], row[kTimesNonFinite]);
    }
    if (std::isnan(used)) {
      mark(marks.step, row[kLastNan], row[kTimesNan]);
    }
  }
}

// Adds the sums of chunks to the squares of their parameters.
void add_squares(const DtypeList& list, const Reused<double>& partials, const Rows& marks) {
  for (const Span& span : list.spans) {
    int64_t& word = marks.words[span.parameter * kMarkWords + kSquares];
    const auto first = partials.begin() + span.first_chunk;
    const auto end = first + chunk_count(span.numel);
    word = bits_as<int64_t>(std::accumulate(first, end, bits_as<double>(word)));
  }
}

}  // namespace

int64_t set_grain(int64_t bytes) { return grain.exchange(std::max<int64_t>(bytes, 1)); }

bool run(const GradList& grads, const Work& work) {
  if (work.marks) {
    require_rows(grads, *work.marks);
  }
  const bool squares = work.sums != nullptr;
  const Multiplier by = multiplier_of(work.how, work.factor);
  const double coefficient = work.coefficient.value_or(1);
  // As torch: where nothing changes, not even a subnormal is flushed.
  const bool changes = work.write && (work.factor != 1 || coefficient != 1);
  const Factor how = work.write && !changes ? Factor::kNone : work.how;
  double sum_of_squares = 0, peak = 0;
  for (const DtypeList& list : grads.lists()) {
    if (work.coefficient && !changes) {
      continue;
    }
    const Loops& loops = loops_for(dtype_of(list.dtype));
    Reused<double> partials;
    partials.resize(squares ? list.chunks : 0);
    std::vector<int64_t> peaks(work.marks ? list.chunks : 0);
    std::atomic<int64_t> highest{0};
    for_each_chunk(list, changes, [&](char* address, int64_t numel, int64_t chunk) {
      int64_t bits = 0;
      if (squares) {
        partials[chunk] = by.of_squares * loops.squares(address, numel, by.of_values, &bits);
      }
      if (changes) {
        bits = loops.unscale(address, numel, work.factor, coefficient);
      } else if (!squares) {
        bits = loops.peak_bits(address, numel);
      }
      raise(highest, bits);
      if (work.marks) {
        peaks[chunk] = bits;
      }
    });
    const double largest = std::fabs(used_peak(list, highest, how, work.factor));
    if (work.marks && !std::isfinite(largest)) {
      mark_non_finite(list, peaks, how, work.factor, *work.marks);
    }
    if (work.marks && squares) {
      add_squares(list, partials, *work.marks);
    }
    peak = larger_or_nan(peak, largest);
    for (const double partial : partials) {
      sum_of_squares += partial;
    }
  }
  if (work.sums != nullptr) {
    work.sums[0] = sum_of_squares;
    work.sums[1] = peak;
  }
  if (work.peak != nullptr) {
    *work.peak = peak;
  }
  return !std::isfinite(peak);
}

}  // namespace ampfast::cpu
