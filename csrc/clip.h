// What a clipping multiplies gradients by, from norms that passes left. Shared by the CPU and CUDA
// kernels; the Triton kernels do the same.
#pragma once

#include "element.h"

namespace ampfast {

struct Clip {
  const double* norms = nullptr;  // a row for each pass: its sum of squares, its largest magnitude
  int64_t rows = 0;
  double max_norm = 0;
  bool largest = false;         // takes the largest magnitude for the norm, else the 2-norm
  float* norm = nullptr;        // what the norm is written to, or
  double* wide_norm = nullptr;  // this
  double* coefficient = nullptr;
  // Where both are given, the scale over the coefficient is written.
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
  // torch's formula, in float64.
  const double quotient = clip.max_norm / (total + 1e-6);
  const double coefficient = quotient > 1 ? 1 : quotient;
  *clip.coefficient = coefficient;
  if (clip.scale != nullptr && clip.divisor != nullptr) {
    *clip.divisor = static_cast<float>(*clip.scale / coefficient);
  }
}

}  // namespace ampfast
