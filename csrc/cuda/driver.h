// Functions of CUDA's driver for the kernels. The core looks for the driver at run time, so that it
// is built without CUDA.
#pragma once

#include <cstddef>

namespace ampfast::cuda {

// Of CUDA's headers: results and attributes are numbers, all handles but a device's are pointers.
constexpr int kSuccess = 0;
constexpr int kMultiprocessorCount = 16;

struct Driver {
  int (*cuInit)(unsigned int flags);
  int (*cuGetErrorName)(int result, const char** name);
  int (*cuGetErrorString)(int result, const char** text);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuCtxGetCurrent)(void** context);
  int (*cuCtxSetCurrent)(void* context);
  int (*cuModuleLoadData)(void** module, const void* image);
  int (*cuModuleGetFunction)(void** function, void* module, const char* name);
  int (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, void* function, int threads,
                                                     size_t shared_bytes);
  int (*cuLaunchKernel)(void* function, unsigned int grid_x, unsigned int grid_y,
                        unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                        unsigned int block_z, unsigned int shared_bytes, void* stream,
                        void** arguments, void** extra);
  // Null in a driver before CUDA 12.4.
  int (*cuFuncGetParamInfo)(void* function, size_t index, size_t* offset, size_t* size);
};

// Throws std::runtime_error where there is none, and says why.
const Driver& driver();

// Throws std::runtime_error with name and text of a result of `call` that is not kSuccess.
void require(int result, const char* call);

}  // namespace ampfast::cuda
