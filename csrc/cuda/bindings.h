// The Python face of the CUDA kernels; only part of builds that have them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ampfast::cuda {

void bind(pybind11::module_& m);

}  // namespace ampfast::cuda
