#include "driver.h"

#include <dlfcn.h>

#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace ampfast::cuda {

namespace {

Driver loaded() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error(std::string("ampfast: no driver of CUDA: ") + dlerror());
  }
  // The members of Driver, in order.
  constexpr const char* kNames[] = {"cuInit",
                                    "cuGetErrorName",
                                    "cuGetErrorString",
                                    "cuDeviceGet",
                                    "cuDeviceGetAttribute",
                                    "cuDevicePrimaryCtxRetain",
                                    "cuCtxGetCurrent",
                                    "cuCtxSetCurrent",
                                    "cuModuleLoadData",
                                    "cuModuleGetFunction",
                                    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                                    "cuLaunchKernel",
                                    "cuFuncGetParamInfo"};
  void* functions[std::size(kNames)];
  static_assert(sizeof(functions) == sizeof(Driver), "a name for each function");
  for (size_t i = 0; i < std::size(kNames); ++i) {
    functions[i] = dlsym(library, kNames[i]);
    if (functions[i] == nullptr && i + 1 < std::size(kNames)) {
      throw std::runtime_error(std::string("ampfast: CUDA's driver has no ") + kNames[i]);
    }
  }
  Driver driver;
  std::memcpy(&driver, functions, sizeof(driver));
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver driver = loaded();
  return driver;
}

void require(int result, const char* call) {
  if (result == kSuccess) {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  throw std::runtime_error(std::string("ampfast: ") + call + ": " +
                           (name != nullptr ? name : std::to_string(result)) + ": " +
                           (text != nullptr ? text : "unknown to the driver"));
}

}  // namespace ampfast::cuda
