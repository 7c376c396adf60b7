// CPU kernels over a whole gradient list.
#pragma once

#include "../element.h"
#include "../gradients.h"
#include "../track.h"

namespace ampfast::cpu {

// One pass over a list, whose factor is on the host; `how` is no reciprocal.
struct Work {
  bool write = false;  // multiplies in place; else reads
  Factor how = Factor::kNone;
  float factor = 1;
  // The rounded products are multiplied by it. This pass decides nothing, and reads nothing
  // that it does not change.
  std::optional<double> coefficient;
  // Gets the sum of squares of the values times the factor, or divided by it, and the largest
  // magnitude as it is used, rounded to the dtype that is written; NaN if there is one.
  double* sums = nullptr;
  Marks marks;  // of the parameters of values not finite as used
};

// Returns the largest magnitude as it is used; NaN if there is one. The sum of squares is in
// float64, over chunks in order: the same bits every run, however many threads there are.
double run(const GradList& grads, const Work& work);

}  // namespace ampfast::cpu
