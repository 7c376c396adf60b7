// The state of a scaler, the update of its scale, and the coefficient of a clipping. Shared by the
// CPU and CUDA kernels; the Triton kernels repeat the arithmetic.
#pragma once

#include "element.h"

namespace ampfast {

// Layout of a scaler's state, int64 words on the device of its scale. Scales and norms are the bits
// of a float32. All zeros is a new scaler with torch's policy.
enum StateWord : int64_t {
  // Counters; a step is one update.
  kSteps,
  kSkipped,
  kGrowths,
  kBackoffs,
  kConsecutiveSkips,
  kSkipsAtMinimum,  // in a row, with a scale that was at its minimum already
  kTolerated,       // overflows since the hysteresis was refilled
  kLastSkipped,     // the number of the last skipped step, counted from 1; 0: none
  kCounters,
  // Counters, scale and growth tracker before the last update.
  kBefore = kCounters,
  kScaleBefore = kBefore + kCounters,
  kTrackerBefore,
  // The policy.
  kMinScale,              // 0: none
  kMaxScale,              // 0: none
  kMostTolerated,         // overflows without a backoff
  kRefillsOnFiniteSteps,  // 1: after every finite step, as apex; 0: when the scale grows
  kRing = 32,
};

// Behind it, the last steps: step i at i % kRingSteps.
constexpr int64_t kRingSteps = 1024;
enum RingWord : int64_t {
  kRingScale,   // with which the step was taken
  kRingStatus,  // 1 if it was skipped, plus 2 if there is a norm
  kRingNorm,
  kRingWords,
};
constexpr int64_t kStateWords = kRing + kRingSteps * kRingWords;

// One update of the scale; all pointers are to memory of one device.
struct Update {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  int64_t* state = nullptr;     // null: nothing is kept, and the policy is torch's
  const float* norm = nullptr;  // of the gradients; null: none was taken
  double growth_factor = 1;
  double backoff_factor = 1;
  int64_t growth_interval = 0;
};

AMPFAST_ELEMENT int64_t word_of(float value) { return bits_as<uint32_t>(value); }

AMPFAST_ELEMENT float float_in(int64_t word) { return bits_as<float>(static_cast<uint32_t>(word)); }

// torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows too; then the
// policy of the state, and what it keeps.
AMPFAST_ELEMENT void apply(const Update& update, bool found_inf) {
  const float before = *update.scale;
  const int64_t tracker = *update.growth_tracker;
  const bool grows =
      !found_inf && update.growth_interval >= 1 && tracker + 1 >= update.growth_interval;
  float next = before;
  if (found_inf) {
    next = static_cast<float>(before * update.backoff_factor);
  } else if (grows) {
    const float grown = static_cast<float>(before * update.growth_factor);
    next = std::isfinite(grown) ? grown : before;
  }
  if (int64_t* state = update.state) {
    for (int64_t i = 0; i < kCounters; ++i) {
      state[kBefore + i] = state[i];
    }
    state[kScaleBefore] = word_of(before);
    state[kTrackerBefore] = tracker;

    if (found_inf) {
      state[kTolerated] += 1;
    } else if (grows || state[kRefillsOnFiniteSteps] != 0) {
      state[kTolerated] = 0;
    }
    if (found_inf && state[kTolerated] <= state[kMostTolerated]) {
      next = before;
    }
    const float min_scale = float_in(state[kMinScale]);
    const float max_scale = float_in(state[kMaxScale]);
    // A scale that was set beyond them is not moved the wrong way.
    if (next > before && max_scale > 0 && next > max_scale) {
      next = before > max_scale ? before : max_scale;
    }
    if (next < before && min_scale > 0 && next < min_scale) {
      next = before < min_scale ? before : min_scale;
    }

    int64_t* entry = state + kRing + state[kSteps] % kRingSteps * kRingWords;
    entry[kRingScale] = word_of(before);
    entry[kRingStatus] = (found_inf ? 1 : 0) + (update.norm != nullptr ? 2 : 0);
    entry[kRingNorm] = update.norm != nullptr ? word_of(*update.norm) : 0;

    const bool at_minimum = min_scale > 0 && before <= min_scale;
    state[kSteps] += 1;
    state[kSkipped] += found_inf ? 1 : 0;
    state[kGrowths] += next > before ? 1 : 0;
    state[kBackoffs] += next < before ? 1 : 0;
    state[kConsecutiveSkips] = found_inf ? state[kConsecutiveSkips] + 1 : 0;
    state[kSkipsAtMinimum] = found_inf && at_minimum ? state[kSkipsAtMinimum] + 1 : 0;
    state[kLastSkipped] = found_inf ? state[kSteps] : state[kLastSkipped];
  }
  *update.scale = next;
  *update.growth_tracker = found_inf || grows ? 0 : static_cast<int32_t>(tracker + 1);
}

// The coefficient of a clipping, from norms that passes left.
struct Clip {
  const double* norms = nullptr;  // a row for each pass: its sum of squares, its largest magnitude
  int64_t rows = 0;
  double max_norm = 0;
  bool largest = false;         // takes the largest magnitude for the norm, else the 2-norm
  float* norm = nullptr;        // the norm, in float32 or
  double* wide_norm = nullptr;  // in float64; one of the two is given
  double* coefficient = nullptr;
  // Scale over coefficient, where both are given.
  const float* scale = nullptr;
  float* divisor = nullptr;
};

AMPFAST_ELEMENT void apply(const Clip& clip) {
  double squares = 0;
  double peak = 0;
  for (int64_t row = 0; row < clip.rows; ++row) {
    squares += clip.norms[2 * row];
    peak = larger_or_nan(peak, clip.norms[2 * row + 1]);
  }
  double total = clip.largest ? peak : std::sqrt(squares);
  if (clip.wide_norm != nullptr) {
    *clip.wide_norm = total;
  } else {
    const float rounded = static_cast<float>(total);
    *clip.norm = rounded;
    total = rounded;
  }
  // torch's formula, in float64. An infinite limit clips nothing: inf / inf would be NaN.
  const double quotient = clip.max_norm / (total + 1e-6);
  const double coefficient = quotient > 1 || std::isinf(clip.max_norm) ? 1 : quotient;
  *clip.coefficient = coefficient;
  if (clip.scale != nullptr && clip.divisor != nullptr) {
    *clip.divisor = static_cast<float>(*clip.scale / coefficient);
  }
}

}  // namespace ampfast
