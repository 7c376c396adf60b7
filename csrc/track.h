// Layout of per-parameter tracking: rows of 64-bit integers, by the number of the parameter, which
// the kernels of all backends write.
#pragma once

#include <cstdint>

namespace ampfast {

// A row of marks. Steps are counted from 1, so that 0 says never.
enum MarkWord : int64_t {
  kLastNonFinite,   // the last step in which a used value was infinite or NaN
  kLastNan,         // the last step in which one was NaN
  kTimesNonFinite,  // in how many steps that was so
  kTimesNan,
  kMarkWords,
};

// A row of gradient health, of the values before they are unscaled. All zero before the pass.
enum HealthWord : int64_t {
  kElements,
  kNonzero,
  kVanishing,    // not zero, but below float16's smallest subnormal
  kSubnormal,    // not zero, but below float16's smallest normal
  kOverflowing,  // above float16's largest; infinities and NaN, too
  kLargest,      // float64 bits of the largest magnitude
  kSmallest,     // the complement of those of the smallest that is not zero, for a maximum; 0: none
  kHealthWords,
};

// Bits of magnitudes in the format of a gradient, and what bounds float16's range there.
struct HalfRange {
  int64_t smallest_subnormal;  // 2^-24
  int64_t smallest_normal;     // 2^-14
  int64_t largest;             // 65504, or what is next below it
};

constexpr HalfRange kRangeInFloat32{0x33800000, 0x38800000, 0x477fe000};
constexpr HalfRange kRangeInFloat64{0x3e70000000000000, 0x3f10000000000000, 0x40effc0000000000};
constexpr HalfRange kRangeInFloat16{0x0001, 0x0400, 0x7bff};
constexpr HalfRange kRangeInBFloat16{0x3380, 0x3880, 0x477f};

constexpr int64_t kComplement = 0x7fffffffffffffff;

}  // namespace ampfast
