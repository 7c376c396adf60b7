// Passes over tables of gradients on a device, by launches of Triton's or of the CUDA kernels.
#pragma once

#include "bindings.h"

namespace ampfast {

// Runs a pass over a list by what a launcher launches; returns its found_inf, which is a new one
// that is assigned unless the pass has one, which accumulates. If an update is to be part of it,
// its ending says whether it was: without gradients nothing is launched.
at::Tensor run_on(PyObject* launcher, const GradList& list, Pass pass);

// Launches the clip coefficient.
void clip_on(PyObject* launcher, const std::shared_ptr<ClipObject>& clip);

}  // namespace ampfast
