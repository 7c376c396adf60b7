// Layout of a table of gradients on a device, whose unit is the 64-bit word. The
// kernels of all backends read it.
#pragma once

#include <cstdint>

namespace ampfast {

// The unit of work. A tensor's windows are counted from its address rounded down to
// kAddressAlignment, so all but its first and last are accessed with vectors at any address.
constexpr int64_t kWindowBytes = 8192;
constexpr int64_t kAddressAlignment = 16;

// The table begins with this; the first two are zero between launches.
enum HeaderWord : int64_t {
  kFinished,  // how many programs are done
  kPeak,      // float64 bits of the largest magnitude that the optimizer would use
  kPartials,  // the word at which the programs' sums of squares begin
  kPrograms,  // of all segments
  kHeaderWords = 8,
};

// Then comes a segment for each dtype, which begins with this.
enum SegmentWord : int64_t {
  kTensors,
  kWindows,
  kSegmentPrograms,
  kFirstProgram,  // among those of all segments
  kParameters,    // the word at which the parameters' numbers begin
  kSegmentWords = 8,
};
// Behind it: addresses[tensors + 1], lengths[tensors + 1] in elements, whose last are padding,
// starts[programs] as pairs of a tensor and a window within it, and parameters[tensors], the number
// of each tensor's parameter among all of the optimizer.

}  // namespace ampfast
