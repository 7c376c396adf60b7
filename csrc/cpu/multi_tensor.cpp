// CPU kernels over a whole gradient list: shares chunks among threads, decides on the largest
// value.
#include "multi_tensor.h"

#include <ATen/Parallel.h>

#include <numeric>

#include "instruction_set.h"

namespace ampfast::cpu {

namespace {

// The least chunks for a thread: waking one pays no sooner.
constexpr int64_t kGrain = 16;

// torch takes tensors one after another. Where they share memory the order shows, and threads would
// race.
bool shares_memory(const DtypeList& list) {
  Reused<std::pair<const char*, const char*>> ranges;
  for (const Span& span : list.spans) {
    ranges.emplace_back(span.address, span.address + span.numel * list.element_size());
  }
  std::sort(ranges.begin(), ranges.end());
  const auto overlaps = [](const auto& a, const auto& b) { return a.second > b.first; };
  return std::adjacent_find(ranges.begin(), ranges.end(), overlaps) != ranges.end();
}

// Calls `body(address, numel, chunk)` for every chunk, from several threads if that pays.
template <class Body>
void for_each_chunk(const DtypeList& list, bool writes, const Body& body) {
  const auto take = [&](int64_t chunk, int64_t end) {
    const auto is_before = [](int64_t number, const Span& span) {
      return number < span.first_chunk;
    };
    auto span = std::upper_bound(list.spans.begin(), list.spans.end(), chunk, is_before) - 1;
    for (; chunk < end; ++span) {
      int64_t offset = (chunk - span->first_chunk) * kChunk;
      for (; offset < span->numel && chunk < end; offset += kChunk) {
        const int64_t numel = std::min(kChunk, span->numel - offset);
        body(span->address + offset * list.element_size(), numel, chunk++);
      }
    }
  };
  if (list.elements < 2 * kGrain * kChunk || (writes && shares_memory(list))) {
    take(0, list.chunks);
  } else {
    at::parallel_for(0, list.chunks, kGrain, take);
  }
}

// The largest magnitude as it is used: rounded to the dtype that is written, as fused optimizers
// see it otherwise. Rounding is monotone, so the largest magnitude tells of all.
double used_peak(const DtypeList& list, double peak, Factor how, float factor) {
  if (peak == 0 && how != Factor::kNone) {
    // An infinite factor makes zeros NaN and others infinite: a tensor counts as infinite,
    // whichever of them it has.
    const float used = used_value(0.0f, how, factor);
    return std::isnan(used) && !std::isnan(factor) ? INFINITY : used;
  }
  if (list.dtype == at::kDouble) {
    return used_value(peak, how, factor);
  }
  const float used = used_value(static_cast<float>(peak), how, factor);
  if (how == Factor::kTimes && list.dtype != at::kFloat) {
    return list.dtype == at::kHalf ? static_cast<float>(at::Half(used))
                                   : static_cast<float>(at::BFloat16(used));
  }
  return used;
}

// Once in a step, however often it is marked.
void mark(int64_t step, int64_t& last, int64_t& times) {
  times += last != step;
  last = step;
}

// Marks the parameters of which a value is not finite as it is used, given the peaks of chunks, and
// adds the sums of chunks, where there are any, to the squares of their parameters.
void track(const DtypeList& list, const Reused<double>& peaks, const Reused<double>& partials,
           const Work& work, Factor how) {
  const int64_t step = *work.marks.now + 1;  // counted from 1
  for (const Span& span : list.spans) {
    int64_t* row = work.marks.words + span.parameter * kMarkWords;
    double peak = 0, squares = bits_as<double>(row[kSquares]);
    for (int64_t i = 0; i < chunk_count(span.numel); ++i) {
      peak = larger_or_nan(peak, peaks[span.first_chunk + i]);
      squares += work.sums != nullptr ? partials[span.first_chunk + i] : 0;
    }
    row[kSquares] = bits_as<int64_t>(squares);
    const double used = used_peak(list, peak, how, work.factor);
    if (!std::isfinite(used)) {
      mark(step, row[kLastNonFinite], row[kTimesNonFinite]);
    }
    if (std::isnan(used)) {
      mark(step, row[kLastNan], row[kTimesNan]);
    }
  }
}

}  // namespace

double run(const GradList& grads, const Work& work) {
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
    Reused<double> peaks, partials;
    peaks.resize(list.chunks);
    partials.resize(work.sums != nullptr ? list.chunks : 0);
    for_each_chunk(list, changes, [&](char* address, int64_t numel, int64_t chunk) {
      if (work.sums != nullptr) {
        partials[chunk] =
            by.of_squares * loops.squares(address, numel, by.of_values, &peaks[chunk]);
      }
      if (changes) {
        peaks[chunk] = loops.unscale(address, numel, work.factor, coefficient);
      } else if (work.sums == nullptr) {
        peaks[chunk] = loops.peak(address, numel);
      }
    });
    if (work.marks.now != nullptr) {
      track(list, peaks, partials, work, how);
    }
    const double largest = std::accumulate(peaks.begin(), peaks.end(), 0.0, larger_or_nan<double>);
    peak = larger_or_nan(peak, std::fabs(used_peak(list, largest, how, work.factor)));
    sum_of_squares = std::accumulate(partials.begin(), partials.end(), sum_of_squares);
  }
  if (work.sums != nullptr) {
    work.sums[0] = sum_of_squares;
    work.sums[1] = peak;
  }
  return peak;
}

}  // namespace ampfast::cpu
