// Launches of the CUDA kernels through the driver.
#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "driver.h"
#include "multi_tensor.h"

#define AMPFAST_CALL(FUNCTION, ...) require(driver().FUNCTION(__VA_ARGS__), #FUNCTION)

namespace ampfast::cuda {

namespace {

// The order is that of Kind, and below that of Dtype.
constexpr const char* kKindNames[kKinds] = {"check",        "check_norm", "unscale",
                                            "unscale_norm", "clip",       "read"};
constexpr const char* kTableNames[] = {"float32", "float64", "float16", "bfloat16"};
constexpr int kTables = std::size(kTableNames);

struct Kernel {
  void* context = nullptr;  // the primary one of its device, which torch uses
  void* function = nullptr;
  int64_t resident = 0;  // programs that the device holds at once
};

// The kernels of a device.
struct Kernels {
  Kernel over_tables[kTables][kKinds];
  Kernel update_scale;
  Kernel clip_coefficient;
};

// Never destroyed: at the end of the process the driver may be destroyed before it.
std::map<int, Kernels>& loaded() {
  static auto& loaded = *new std::map<int, Kernels>;
  return loaded;
}

int64_t most_programs = 0;

// Makes a context current if none is. That of another device is not: torch has changed to this one.
void enter(void* context) {
  void* current = nullptr;
  AMPFAST_CALL(cuCtxGetCurrent, &current);
  if (current == nullptr) {
    AMPFAST_CALL(cuCtxSetCurrent, context);
  }
}

// Throws if a kernel takes another argument than this core passes, if the driver says so.
void require_layout(void* function, const std::string& name, size_t bytes) {
  size_t offset = 0;
  size_t size = 0;
  if (driver().cuFuncGetParamInfo != nullptr &&
      driver().cuFuncGetParamInfo(function, 0, &offset, &size) == kSuccess && size != bytes) {
    throw std::runtime_error(
        "ampfast: the CUDA kernels are of another build than the core: " + name + " takes " +
        std::to_string(size) + " bytes, not " + std::to_string(bytes));
  }
}

const Kernels& kernels_on(int device) {
  const auto found = loaded().find(device);
  if (found == loaded().end()) {
    throw std::runtime_error("ampfast: the CUDA kernels are not loaded on device " +
                             std::to_string(device));
  }
  return found->second;
}

template <class Argument>
void queue(const Kernel& kernel, int64_t programs, int threads, const Argument& argument,
           const Place& place) {
  enter(kernel.context);
  void* arguments[] = {const_cast<Argument*>(&argument)};
  AMPFAST_CALL(cuLaunchKernel, kernel.function, static_cast<unsigned int>(programs), 1, 1,
               static_cast<unsigned int>(threads), 1, 1, 0, place.stream, arguments, nullptr);
}

}  // namespace

void limit_programs(int64_t programs) { most_programs = programs; }

void load_kernels(int device, const char* image) {
  if (loaded().count(device) != 0) {
    return;
  }
  AMPFAST_CALL(cuInit, 0);
  int handle = 0;
  int multiprocessors = 0;
  AMPFAST_CALL(cuDeviceGet, &handle, device);
  AMPFAST_CALL(cuDeviceGetAttribute, &multiprocessors, kMultiprocessorCount, handle);
  void* context = nullptr;
  AMPFAST_CALL(cuDevicePrimaryCtxRetain, &context, handle);
  enter(context);
  void* module = nullptr;
  AMPFAST_CALL(cuModuleLoadData, &module, image);
  const auto get = [&](const std::string& name, size_t bytes, int threads) {
    Kernel kernel{context};
    AMPFAST_CALL(cuModuleGetFunction, &kernel.function, module, name.c_str());
    require_layout(kernel.function, name, bytes);
    int of_each = 0;
    AMPFAST_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, &of_each, kernel.function, threads,
                 0);
    kernel.resident = int64_t{multiprocessors} * of_each;
    return kernel;
  };
  Kernels kernels;
  for (int table = 0; table < kTables; ++table) {
    for (int kind = 0; kind < kKinds; ++kind) {
      const std::string name = std::string(kKindNames[kind]) + "_" + kTableNames[table];
      kernels.over_tables[table][kind] = get("ampfast_" + name, sizeof(Launch), kThreads);
    }
  }
  kernels.update_scale = get("ampfast_update_scale", sizeof(UpdateAlone), 1);
  kernels.clip_coefficient = get("ampfast_clip_coefficient", sizeof(Clip), 1);
  loaded()[device] = kernels;
}

void launch(Kind kind, const Launch& launch, const Place& place) {
  const int table = static_cast<int>(launch.dtype);
  const Kernel& kernel = kernels_on(place.device).over_tables[table][kind];
  const int64_t most = most_programs > 0 ? most_programs : kernel.resident;
  queue(kernel, std::min<int64_t>(launch.chunks, most), kThreads, launch, place);
}

void update_scale(const UpdateAlone& alone, const Place& place) {
  queue(kernels_on(place.device).update_scale, 1, 1, alone, place);
}

void clip_coefficient(const Clip& clip, const Place& place) {
  queue(kernels_on(place.device).clip_coefficient, 1, 1, clip, place);
}

}  // namespace ampfast::cuda
