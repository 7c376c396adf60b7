// Bindings of the CUDA kernels by themselves.
#include "../../csrc/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { ampfast::cuda::bind(m); }
