// The loops over one block for each instruction set in this binary, chosen at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../element.h"

namespace ampfast::cpu {

struct Loops {
  // The largest magnitude, as bits.
  int64_t (*peak_bits)(const void* data, int64_t numel);
  // Multiplies in place by the inverse scale and, rounded to the dtype, by the coefficient. Returns
  // the largest magnitude that was there before, as bits.
  int64_t (*unscale)(void* data, int64_t numel, float inv_scale, double coefficient);
  // The sum of squares of the unscaled values; raises `peak` to the largest magnitude, as bits.
  double (*squares)(const void* data, int64_t numel, float inv_scale, int64_t* peak);
};

const Loops& loops_for(Dtype dtype);

// "avx512", "avx2" and "baseline", or "neon": what runs, what could, and a switch for tests.
// Unknown names, also in AMPFAST_CPU_CAPABILITY, which is read first, throw std::invalid_argument.
std::string capability();
std::vector<std::string> capabilities();
void set_capability(const std::string& name);

}  // namespace ampfast::cpu
