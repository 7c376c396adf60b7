// The arithmetic of one gradient element, shared by the CPU and CUDA kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define AMPFAST_ELEMENT __host__ __device__ inline
#else
#define AMPFAST_ELEMENT inline
#endif

namespace ampfast {

template <class To, class From>
AMPFAST_ELEMENT To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

// The types of gradients that the kernels know; the loops of cpu/loops.h are in this order.
enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16 };
constexpr int kDtypeCount = 4;

// The factor by which gradients are unscaled: the reciprocal in float64, rounded to float32.
AMPFAST_ELEMENT float inverse_scale(float scale) {
  return static_cast<float>(1.0 / static_cast<double>(scale));
}

// How an optimizer applies a factor to a gradient, which decides whether a step is skipped;
// `backends.core` has it, too.
enum class Factor {
  kNone,             // the gradient is taken as it is
  kTimes,            // it is multiplied by the factor: what unscaling writes
  kTimesReciprocal,  // it is multiplied by `inverse_scale` of the factor
  kDivide,           // it is divided by the factor: what fused optimizers do with their grad_scale
};

// A gradient as it is used, where the reciprocal of a factor was taken beforehand. `Opmath` is
// float for 16- and 32-bit gradients and double for 64-bit ones.
template <class Opmath>
AMPFAST_ELEMENT Opmath used_value(Opmath value, Factor how, float factor) {
  switch (how) {
    case Factor::kNone:
      return value;
    case Factor::kDivide:
      return value / static_cast<Opmath>(factor);
    default:
      return value * static_cast<Opmath>(factor);
  }
}

// Factors of gradients for their sum of squares, and of this sum afterwards.
struct Multiplier {
  float of_values;
  double of_squares;
};

// A factor that divides becomes its reciprocal: a division takes as long as several products. The
// reciprocal of a scale below 2^-128 would be infinite.
AMPFAST_ELEMENT Multiplier multiplier_of(Factor how, float factor) {
  const bool inverts = how == Factor::kDivide || how == Factor::kTimesReciprocal;
  const float inverse = inverts ? inverse_scale(factor) : factor;
  if (how != Factor::kDivide || !std::isinf(inverse)) {
    return {inverse, 1};
  }
  const double rest = 1 / (factor * 0x1p127);
  return {0x1p127f, rest * rest};
}

// Bits of the magnitude: as integers they are ordered as the magnitudes are, with NaN above
// infinity.
AMPFAST_ELEMENT int16_t magnitude16(uint16_t bits) { return static_cast<int16_t>(bits & 0x7fff); }

AMPFAST_ELEMENT int32_t magnitude(float value) { return bits_as<int32_t>(value) & 0x7fffffff; }

AMPFAST_ELEMENT int64_t magnitude(double value) {
  return bits_as<int64_t>(value) & 0x7fffffffffffffff;
}

// Not std::max: a copy of it compiled for one instruction set could end up in the code of another.
template <class T>
AMPFAST_ELEMENT T larger(T a, T b) {
  return a < b ? b : a;
}

// The larger of two; a NaN wins, and stays.
template <class T>
AMPFAST_ELEMENT T larger_or_nan(T a, T b) {
  return a != a || b <= a ? a : b;
}

}  // namespace ampfast
