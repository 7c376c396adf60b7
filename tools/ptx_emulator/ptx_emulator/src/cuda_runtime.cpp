// CUDA runtime for compiled CUDA code whose kernels run on the CPU: registers kernel names and
// passes launches to the current launcher.
#include <cuda_runtime_api.h>

#include <map>
#include <string>
#include <utility>

namespace {

// `sizes` are the grid's and the block's. Returns null, or why the launch failed.
using Launcher = const char* (*)(const char* kernel, const unsigned int* sizes, size_t shared_bytes,
                                 void** arguments);

Launcher launcher = nullptr;  // without one launches do nothing
std::string message;          // of the last failed launch
cudaError_t last_error = cudaSuccess;

cudaError_t failed(cudaError_t error) { return last_error = error; }

struct Configuration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};
Configuration configuration;

std::map<const void*, std::string>& names() {
  static std::map<const void*, std::string> names;
  return names;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void ptx_emulator_set_launcher(Launcher given) {
  launcher = given;
}

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  names()[function] = name;
}

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                         struct CUstream_st* stream) {
  configuration = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                       void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t) {
  if (launcher == nullptr) {
    return cudaSuccess;
  }
  const unsigned int sizes[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z};
  const char* error = launcher(names().at(function).c_str(), sizes, shared_bytes, arguments);
  if (error == nullptr) {
    return cudaSuccess;
  }
  message = error;
  return failed(cudaErrorLaunchFailure);
}

// Launch API of newer compilers.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

const char* cudaGetErrorString(cudaError_t) { return message.c_str(); }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  *attributes = {};
  return names().count(function) == 1 ? cudaSuccess : failed(cudaErrorInvalidDeviceFunction);
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// There is no machine code whose registers could be counted.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* programs, const void* function, int,
                                                          size_t) {
  *programs = 1;
  return names().count(function) == 1 ? cudaSuccess : cudaErrorInvalidDeviceFunction;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 1;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      return cudaSuccess;
    default:
      message = "the emulator does not know this attribute of a device";
      return cudaErrorNotSupported;
  }
}
}
