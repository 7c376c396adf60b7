// One update of the scale, what is kept of every step besides scale and growth tracker, and where
// that stands. Shared by the CPU and CUDA kernels; the Triton kernels do the same.
#pragma once

#include "element.h"

namespace ampfast {

// A scaler's state on the device of its scale, whose unit is the 64-bit word. Scales and norms are
// the bits of a float32. All zeros is a new scaler with torch's policy.
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
  // What the last update replaced: the counters, the scale and the growth tracker.
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

struct Update {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  int64_t* state = nullptr;     // null: nothing is kept, and the policy is torch's
  const float* norm = nullptr;  // of the gradients; null: none was taken
  double growth_factor = 1;
  double backoff_factor = 1;
  int64_t growth_interval = 0;
};

AMPFAST_ELEMENT int64_t word_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

AMPFAST_ELEMENT float float_in(int64_t word) {
  const uint32_t bits = static_cast<uint32_t>(word);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

AMPFAST_ELEMENT void apply(const Update& update, bool found_inf) {
  const ScaleAndTracker before{*update.scale, *update.growth_tracker};
  ScaleAndTracker next = next_scale(before, found_inf, update.growth_factor, update.backoff_factor,
                                    update.growth_interval);
  if (int64_t* state = update.state) {
    for (int64_t i = 0; i < kCounters; ++i) {
      state[kBefore + i] = state[i];
    }
    state[kScaleBefore] = word_of(before.scale);
    state[kTrackerBefore] = before.growth_tracker;

    const bool grows = !found_inf && ends_interval(before.growth_tracker, update.growth_interval);
    state[kTolerated] = found_inf                                    ? state[kTolerated] + 1
                        : grows || state[kRefillsOnFiniteSteps] != 0 ? 0
                                                                     : state[kTolerated];
    if (found_inf && state[kTolerated] <= state[kMostTolerated]) {
      next.scale = before.scale;
    }
    const float min_scale = float_in(state[kMinScale]);
    const float max_scale = float_in(state[kMaxScale]);
    // A scale that was set beyond them is not moved the wrong way.
    if (next.scale > before.scale && max_scale > 0 && next.scale > max_scale) {
      next.scale = before.scale > max_scale ? before.scale : max_scale;
    }
    if (next.scale < before.scale && min_scale > 0 && next.scale < min_scale) {
      next.scale = before.scale < min_scale ? before.scale : min_scale;
    }

    int64_t* entry = state + kRing + state[kSteps] % kRingSteps * kRingWords;
    entry[kRingScale] = word_of(before.scale);
    entry[kRingStatus] = (found_inf ? 1 : 0) + (update.norm != nullptr ? 2 : 0);
    entry[kRingNorm] = update.norm != nullptr ? word_of(*update.norm) : 0;

    const bool at_minimum = min_scale > 0 && before.scale <= min_scale;
    state[kSteps] += 1;
    state[kSkipped] += found_inf ? 1 : 0;
    state[kGrowths] += next.scale > before.scale ? 1 : 0;
    state[kBackoffs] += next.scale < before.scale ? 1 : 0;
    state[kConsecutiveSkips] = found_inf ? state[kConsecutiveSkips] + 1 : 0;
    state[kSkipsAtMinimum] = found_inf && at_minimum ? state[kSkipsAtMinimum] + 1 : 0;
    state[kLastSkipped] = found_inf ? state[kSteps] : state[kLastSkipped];
  }
  *update.scale = next.scale;
  *update.growth_tracker = next.growth_tracker;
}

// Restores what the last update replaced; its place in the ring is written again by the next.
AMPFAST_ELEMENT void undo(const Update& update) {
  int64_t* state = update.state;
  for (int64_t i = 0; i < kCounters; ++i) {
    state[i] = state[kBefore + i];
  }
  *update.scale = float_in(state[kScaleBefore]);
  *update.growth_tracker = static_cast<int32_t>(state[kTrackerBefore]);
}

}  // namespace ampfast
