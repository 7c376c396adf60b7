// The short way through a scaler's calls: raw C functions for regular gradients on the CPU.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ampfast {

// Adds the functions to the module; the stub _C.pyi describes them.
void bind_short_way(pybind11::module_& m);

}  // namespace ampfast
