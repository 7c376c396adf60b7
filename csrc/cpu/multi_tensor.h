// CPU kernels over a whole gradient list.
#pragma once

#include "../element.h"
#include "../gradients.h"
#include "notes.h"

namespace ampfast::cpu {

// Tells whether a value of the list is not finite, as `use` and `factor` will use it. Reads only.
// With a `track`, notes there what it sees of each parameter.
bool check(const GradList& grads, Use use, float factor, const Track* track = nullptr);

// Multiplies in place and tells whether a product is not finite, rounded to its dtype. `track` as
// above. With a coefficient the rounded products are multiplied by it, which decides nothing.
bool unscale(const GradList& grads, float inv_scale, const Track* track = nullptr,
             double coefficient = 1);

struct Norms {
  double sum_of_squares;
  double absolute_maximum;
};

// Of the unscaled values. The sum is in float64, over chunks in order: the same bits every run,
// however many threads there are.
Norms norms(const GradList& grads, float inv_scale, const Track* track = nullptr);

// Sets the least work for a thread, in bytes, and returns what it was: a switch for tests.
int64_t set_grain(int64_t bytes);

}  // namespace ampfast::cpu
