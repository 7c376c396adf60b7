// Bindings of the CUDA kernels by themselves.
#include <cuda_runtime_api.h>

#include "../../csrc/bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  ampfast::cuda::bind(m);
  m.def("cuda_fail_elsewhere", [] {
    cudaFuncAttributes attributes;
    cudaFuncGetAttributes(&attributes, nullptr);
  });
  m.def("cuda_last_error", [] { return static_cast<int>(cudaGetLastError()); });
}
