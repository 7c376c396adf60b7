// Passes over tables of gradients on a device, by launches of Triton's or of the CUDA kernels.
#pragma once

#include "bindings.h"

namespace ampfast {

// A named tuple with other fields, made without a Python frame.
py::object with_fields(PyObject* tuple, std::initializer_list<std::pair<int, PyObject*>> fields);

// Runs a pass over a list by what a launcher launches; returns its found_inf. If an update is to
// be part of it, its ending says whether it was: without gradients nothing is launched.
at::Tensor run_on(PyObject* launcher, const GradList& list, PyObject* pass);

// Launches the clip coefficient.
void clip_on(PyObject* launcher, PyObject* clip);

void bind_device_kernels(py::module_& m);

}  // namespace ampfast
