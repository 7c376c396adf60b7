// CPU kernels over a whole gradient list.
#pragma once

#include "../element.h"
#include "../gradients.h"

namespace ampfast::cpu {

// A table of tracking, a row for each parameter.
struct Rows {
  int64_t* words;
  int64_t parameters;
  int64_t step = 0;  // of marks: the number of this step, counted from 1
};

// The largest magnitude of the list, NaN if there is one, as `use` and `factor` will use it. Reads
// only. With rows of kMarkWords, marks the parameters of values that are not finite then.
double check(const GradList& grads, Use use, float factor, const Rows* marks = nullptr);

// Multiplies in place, or writes the float32 values of a pair. Returns the largest product, rounded
// to the dtype written, as above; `marks`, too. With a coefficient the rounded products are
// multiplied by it, which decides nothing.
double unscale(const GradList& grads, float inv_scale, const Rows* marks = nullptr,
               double coefficient = 1);

struct Norms {
  double sum_of_squares;
  double absolute_maximum;
};

// Of the unscaled values. The sum is in float64, over chunks in order: the same bits every run,
// however many threads there are.
Norms norms(const GradList& grads, float inv_scale, const Rows* marks = nullptr);

// Adds the range of each gradient's values to its parameter's row of kHealthWords.
void measure(const GradList& grads, const Rows& health);

// Rounds the float32 values of pairs to their 16-bit tensors.
void narrow(const GradList& pairs);

// Sets the least work for a thread, in bytes, and returns what it was: a switch for tests.
int64_t set_grain(int64_t bytes);

}  // namespace ampfast::cpu
