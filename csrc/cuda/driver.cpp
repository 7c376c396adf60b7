#include "driver.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

#include <stdexcept>
#include <string>
#include <type_traits>

namespace ampfast::cuda {

namespace {

#if defined(_WIN32)
constexpr int RTLD_NOW = 0;
void* dlopen(const char*, int) { return nullptr; }
void* dlsym(void*, const char*) { return nullptr; }
const char* dlerror() { return "it is looked for on Linux alone"; }
#endif

Driver loaded() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error(std::string("ampfast: no driver of CUDA: ") + dlerror());
  }
  Driver driver{};
  const auto find = [&](auto*& function, const char* name, bool is_needed = true) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && is_needed) {
      throw std::runtime_error(std::string("ampfast: CUDA's driver has no ") + name);
    }
  };
#define AMPFAST_FIND(NAME) find(driver.NAME, #NAME)
  AMPFAST_FIND(cuInit);
  AMPFAST_FIND(cuGetErrorName);
  AMPFAST_FIND(cuGetErrorString);
  AMPFAST_FIND(cuDeviceGet);
  AMPFAST_FIND(cuDeviceGetAttribute);
  AMPFAST_FIND(cuDevicePrimaryCtxRetain);
  AMPFAST_FIND(cuCtxGetCurrent);
  AMPFAST_FIND(cuCtxSetCurrent);
  AMPFAST_FIND(cuModuleLoadData);
  AMPFAST_FIND(cuModuleGetFunction);
  AMPFAST_FIND(cuOccupancyMaxActiveBlocksPerMultiprocessor);
  AMPFAST_FIND(cuLaunchKernel);
#undef AMPFAST_FIND
  find(driver.cuFuncGetParamInfo, "cuFuncGetParamInfo", false);
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
