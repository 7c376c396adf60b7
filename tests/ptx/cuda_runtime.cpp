// CUDA runtime for compiled CUDA code whose kernels run on the CPU: registers kernel names and
// passes launches to the current launcher. The Python module has the bindings of the CUDA kernels.
#include <cuda_runtime_api.h>

#include <map>
#include <string>

#include "../../csrc/bindings.h"

namespace {

using Launcher = const char* (*)(const char* kernel, unsigned int programs, unsigned int threads,
                                 void** arguments);

Launcher launcher = nullptr;
std::string last_error;
dim3 programs;
dim3 threads;

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  names()[function] = name;
}

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t, struct CUstream_st*) {
  programs = grid;
  threads = block;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = programs;
  *block = threads;
  *shared = 0;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  const char* error = launcher(names().at(function).c_str(), grid.x, block.x, arguments);
  last_error = error == nullptr ? "" : error;
  return error == nullptr ? cudaSuccess : cudaErrorLaunchFailure;
}

// Launch API of newer compilers.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaGetLastError() { return last_error.empty() ? cudaSuccess : cudaErrorLaunchFailure; }

const char* cudaGetErrorString(cudaError_t) { return last_error.c_str(); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* function) {
  return names().count(function) == 1 ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  ampfast::cuda::bind(m);
  m.def("set_launcher", [](uintptr_t given) { launcher = reinterpret_cast<Launcher>(given); });
}
