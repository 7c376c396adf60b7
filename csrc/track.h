// Layout of per-parameter tracking: rows of 64-bit integers, by the number of the parameter, which
// the kernels of all backends write.
#pragma once

#include <cstdint>

namespace ampfast {

// A row of overflow counters. Steps are counted from 1, so that 0 says never.
enum MarkWord : int64_t {
  kLastNonFinite,   // the last step in which a used value was infinite or NaN
  kLastNan,         // the last step in which one was NaN
  kTimesNonFinite,  // in how many steps that was so
  kTimesNan,
  kSquares,  // the bits of a float64, to which passes with sums add the sum of squares
  kMarkWords,
};

// Overflow counters, and the completed steps of a pass; null without any.
struct Marks {
  int64_t* words = nullptr;
  const int64_t* now = nullptr;
};

}  // namespace ampfast
