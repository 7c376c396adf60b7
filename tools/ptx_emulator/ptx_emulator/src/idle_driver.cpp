// CUDA driver whose calls succeed and do nothing, for the time that Triton's launcher takes.
#include <cstddef>
#include <cstdint>

namespace {

char anything[64];

int succeed(void** handle) {
  *handle = anything;
  return 0;
}

}  // namespace

#define IDLE(name) \
  int name() { return 0; }

#pragma GCC visibility push(default)
extern "C" {

IDLE(cuCtxSetCurrent)
IDLE(cuCtxSetLimit)
IDLE(cuFuncSetAttribute)
IDLE(cuFuncSetCacheConfig)
IDLE(cuInit)
IDLE(cuLaunchKernelEx)
IDLE(cuModuleUnload)
IDLE(cuOccupancyMaxActiveClusters)
IDLE(cuStreamIsCapturing)
IDLE(cuTensorMapEncodeIm2col)
IDLE(cuTensorMapEncodeTiled)

int cuCtxGetCurrent(void** context) { return succeed(context); }
int cuDevicePrimaryCtxRetain(void** context, int) { return succeed(context); }
int cuModuleLoadData(void** module, const void*) { return succeed(module); }
int cuModuleGetFunction(void** function, void*, const char*) { return succeed(function); }

int cuCtxGetDevice(int* device) { return *device = 0; }
int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetAttribute(int* value, int, int) {
  *value = 1 << 17;  // as many bytes of shared memory, among others
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  *value = attribute == 0 ? 1024 : 0;  // threads of a program at most
  return 0;
}
int cuCtxGetLimit(size_t* value, int) {
  *value = 1 << 20;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "none";
  return 0;
}

int cuPointerGetAttribute(void* value, int, uint64_t address) {
  *static_cast<uint64_t*>(value) = address;
  return 0;
}
int cuPointerGetAttributes(unsigned int count, const int*, void** values, uint64_t address) {
  for (unsigned int i = 0; i < count; ++i) {
    *static_cast<uint64_t*>(values[i]) = address;
  }
  return 0;
}
}
#pragma GCC visibility pop
