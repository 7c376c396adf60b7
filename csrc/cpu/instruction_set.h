// The loops over one block for each instruction set in this binary, chosen at run time.
#pragma once

#include <cstdint>
#include <string>

#include "../element.h"

namespace ampfast::cpu {

struct Loops {
  // The largest magnitude; NaN if there is one.
  double (*peak)(const void* data, int64_t numel);
  // Multiplies in place by the inverse scale and, rounded to the dtype, by the coefficient. Returns
  // the largest magnitude that was there before.
  double (*unscale)(void* data, int64_t numel, float inv_scale, double coefficient);
  // The sum of squares of the unscaled values; `peak` gets the largest magnitude.
  double (*squares)(const void* data, int64_t numel, float inv_scale, double* peak);
};

const Loops& loops_for(Dtype dtype);

// The best instruction set that this machine can run: "avx2" or "baseline".
std::string capability();

// Runs the loops that any machine can run; a switch for tests.
void use_baseline(bool uses);

}  // namespace ampfast::cpu
