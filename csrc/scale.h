// The state of a scaler, the update of its scale, and the coefficient of a clipping. Shared by the
// CPU and CUDA kernels; the Triton kernels repeat the arithmetic.
#pragma once

#include "element.h"

namespace ampfast {

// Layout of a scaler's state, int64 words on the device of its scale. Scales and norms are the bits
// of a float32. All zeros is a new scaler with torch's rule.
enum StateWord : int64_t {
  // Counters; a step is one update.
  kSteps,
  kSkipped,
  kGrowths,
  kBackoffs,
  kConsecutiveSkips,
  kTolerated,      // overflows since growth was due; in checkpoints, a tracker that counts down
  kSpikes,         // steps skipped for their norm alone
  kCounted,        // how many an update changes, by torch's ops in this order (aten.py: `_update`)
  kCounters = 16,  // a power of two, for Triton
  // Counters, scale and growth tracker before the last update.
  kBefore = kCounters,
  kScaleBefore = kBefore + kCounters,
  kTrackerBefore,
  // The limits.
  kMinScale,       // 0: none
  kMaxScale,       // 0: none
  kMostTolerated,  // overflows without a backoff
  kRing = 40,
};

// The ring of the last steps follows it: step i is at i % kRingSteps.
constexpr int64_t kRingSteps = 1024;  // a power of 2, so that no count leads out of it
enum RingWord : int64_t {
  kRingScale,   // with which the step was taken
  kRingStatus,  // 1 if it was skipped, plus 2 if there is a norm, plus 4 if it was a spike
  kRingNorm,
  kRingWords,
};
constexpr int64_t kStateWords = kRing + kRingSteps * kRingWords;

// The found_inf of a spike: finite gradients whose norm is too large. Like the 1 of an overflow it
// is not 0, so that the step is skipped, but next to a 1 it is lost in any sum or maximum.
constexpr float kSpike = 0x1p-100f;

// The bound of flags of spikes, also after a reduction over ranks.
constexpr float kSpikeBound = 0x1p-50f;

// One flag for two: that of an overflow if one of them is.
AMPFAST_ELEMENT float joint(float a, float b) { return larger_or_nan(std::fabs(a), std::fabs(b)); }

// One update of the scale; all pointers are to memory of one device.
struct Update {
  float* scale = nullptr;
  int32_t* growth_tracker = nullptr;
  int64_t* state = nullptr;     // null: nothing is kept, and the rule is torch's
  const float* norm = nullptr;  // of the gradients; null: none was taken
  double growth_factor = 1;
  double backoff_factor = 1;
  int64_t growth_interval = 0;
};

AMPFAST_ELEMENT int64_t word_of(float value) { return bits_as<uint32_t>(value); }

AMPFAST_ELEMENT float float_in(int64_t word) { return bits_as<float>(static_cast<uint32_t>(word)); }

// torch's `_amp_update_scale_`, except that a tracker beyond a lowered interval grows too; then the
// limits of the state, and what it keeps. A spike, which only a state knows, leaves the scale and
// its tracker alone.
AMPFAST_ELEMENT void update_scale(const Update& update, float flag) {
  const bool skipped = flag != 0;
  const bool spiked = skipped && update.state != nullptr && std::fabs(flag) < kSpikeBound;
  const bool found_inf = skipped && !spiked;
  const float before = *update.scale;
  const int64_t tracker = *update.growth_tracker;
  const bool grows =
      !skipped && update.growth_interval >= 1 && tracker + 1 >= update.growth_interval;
  float next = before;
  if (found_inf) {
    next = static_cast<float>(before * update.backoff_factor);
  } else if (grows) {
    const float grown = static_cast<float>(before * update.growth_factor);
    next = std::isfinite(grown) ? grown : before;
  }
  if (int64_t* state = update.state) {
#ifdef __CUDACC__
#pragma unroll 4  // more loads at once would take registers from the pass that ends in this
#endif
    for (int64_t i = 0; i < kCounters; ++i) {
      state[kBefore + i] = state[i];
    }
    state[kScaleBefore] = word_of(before);
    state[kTrackerBefore] = tracker;

    if (found_inf) {
      state[kTolerated] += 1;
    } else if (grows) {
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

    int64_t* entry = state + kRing + (state[kSteps] & (kRingSteps - 1)) * kRingWords;
    entry[kRingScale] = word_of(before);
    entry[kRingStatus] = (skipped ? 1 : 0) + (update.norm != nullptr ? 2 : 0) + (spiked ? 4 : 0);
    entry[kRingNorm] = update.norm != nullptr ? word_of(*update.norm) : 0;

    state[kSteps] += 1;
    // Branches, since counters that are loaded together would take registers from the pass, too.
    if (skipped) {
      state[kSkipped] += 1;
      state[kConsecutiveSkips] += 1;
    } else {
      state[kConsecutiveSkips] = 0;
    }
    if (spiked) {
      state[kSpikes] += 1;
    }
    state[kGrowths] += next > before ? 1 : 0;
    state[kBackoffs] += next < before ? 1 : 0;
  }
  if (!spiked) {
    *update.scale = next;
    *update.growth_tracker = found_inf || grows ? 0 : static_cast<int32_t>(tracker + 1);
  }
}

// Layout of the norms of the last steps that were taken, float64 words.
enum NormWord : int64_t {
  kNormCount,     // of norms, since the window began
  kNormSpikes,    // in a row
  kNormPatience,  // the most of them
  kNormRestarts,  // of the window
  kNormRing,      // of as many norms as the window has
};

struct AcceptedNorms {
  double* words = nullptr;
  int64_t window = 0;
};

// The least standard deviation of norms, relative to their mean. Batches of a training differ by
// more; a window of more equal norms, such as of one batch again and again, does not tell how much.
constexpr double kLeastDeviation = 0.01;

// Added to the norm in the clip coefficient, as in torch.
constexpr double kClipEpsilon = 1e-6;

// The coefficient of a clipping, from sums that passes left.
struct Clip {
  const double* sums = nullptr;  // a row for each pass: its sum of squares, its largest magnitude
  int64_t rows = 0;
  double max_norm = 0;
  bool largest = false;           // takes the largest magnitude for the norm, else the 2-norm
  float* norm = nullptr;          // the norm, in float32 or
  double* wide_norm = nullptr;    // in float64; one of the two is given
  double* coefficient = nullptr;  // or null
  // Scale over coefficient, where both are given.
  const float* scale = nullptr;
  float* divisor = nullptr;
  // The flag of the gradients, which becomes that of a spike if it is 0 and the norm is one; null:
  // no spikes. The limit is a norm or, with accepted norms, deviations above their mean.
  float* found_inf = nullptr;
  double skip_above = 0;
  AcceptedNorms accepted_norms;
};

// The norm, rounded to the dtype in which it is written.
AMPFAST_ELEMENT double norm_of(const Clip& clip) {
  double squares = 0;
  double peak = 0;
  for (int64_t row = 0; row < clip.rows; ++row) {
    squares += clip.sums[2 * row];
    peak = larger_or_nan(peak, clip.sums[2 * row + 1]);
  }
  const double total = clip.largest ? peak : std::sqrt(squares);
  return clip.wide_norm != nullptr ? total : static_cast<float>(total);
}

// Whether a norm is too large; one that is not joins the norms. While they do not fill the window
// none is. Norms of 0 and infinite ones tell nothing of what is usual: they neither join nor count.
// After as many spikes in a row as there is patience for, the norm is the new usual. Sums go from
// the oldest norm on, so that they are the same where a checkpoint was loaded.
AMPFAST_ELEMENT bool is_spike(const Clip& clip, double norm) {
  double* words = clip.accepted_norms.words;
  if (words == nullptr) {
    return !(norm <= clip.skip_above);
  }
  double* ring = words + kNormRing;
  const int64_t window = clip.accepted_norms.window;
  const bool is_usable = norm > 0 && std::isfinite(norm);
  auto count = static_cast<int64_t>(words[kNormCount]);
  if (count >= window) {
    const int64_t oldest = count % window;
    double sum = 0;
    for (int64_t i = oldest; i < oldest + window; ++i) {
      sum += ring[i < window ? i : i - window];
    }
    const double mean = sum / static_cast<double>(window);
    double squares = 0;
    for (int64_t i = oldest; i < oldest + window; ++i) {
      const double distance = ring[i < window ? i : i - window] - mean;
      squares += distance * distance;
    }
    const double deviation = std::sqrt(squares / static_cast<double>(window - 1));
    const double least = kLeastDeviation * mean;
    if (!(norm <= mean + clip.skip_above * (deviation > least ? deviation : least))) {
      if (!is_usable || words[kNormSpikes] < words[kNormPatience]) {
        words[kNormSpikes] += is_usable ? 1 : 0;
        return true;
      }
      count = 0;
      words[kNormRestarts] += 1;
    }
  }
  if (is_usable) {
    ring[count % window] = norm;
    words[kNormCount] = static_cast<double>(count + 1);
    words[kNormSpikes] = 0;
  }
  return false;
}

AMPFAST_ELEMENT void clip_coefficient(const Clip& clip) {
  const double norm = norm_of(clip);
  if (clip.wide_norm != nullptr) {
    *clip.wide_norm = norm;
  } else {
    *clip.norm = static_cast<float>(norm);
  }
  // torch's. An infinite limit clips nothing: inf / inf would be NaN.
  const double quotient = clip.max_norm / (norm + kClipEpsilon);
  const double coefficient = quotient > 1 || std::isinf(clip.max_norm) ? 1 : quotient;
  if (clip.coefficient != nullptr) {
    *clip.coefficient = coefficient;
  }
  if (clip.scale != nullptr && clip.divisor != nullptr) {
    *clip.divisor = static_cast<float>(*clip.scale / coefficient);
  }
  // Rounded, so that ranks whose own gradients are of other dtypes take the same decision.
  if (clip.found_inf != nullptr && *clip.found_inf == 0 &&
      is_spike(clip, static_cast<float>(norm))) {
    *clip.found_inf = kSpike;
  }
}

}  // namespace ampfast
