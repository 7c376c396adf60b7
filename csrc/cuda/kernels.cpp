// Launches of the CUDA kernels through CUDA's driver, which is looked for at run time, so that the
// core is built without CUDA.
#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

#include "multi_tensor.h"

namespace ampfast::cuda {

// Of CUDA's headers: results and attributes are numbers, all handles but a device's are pointers.
constexpr int kSuccess = 0;
constexpr int kMultiprocessorCount = 16;

int cuInit(unsigned int flags);
int cuGetErrorName(int result, const char** name);
int cuGetErrorString(int result, const char** text);
int cuDeviceGet(int* device, int ordinal);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxGetCurrent(void** context);
int cuCtxSetCurrent(void* context);
int cuModuleLoadData(void** module, const void* image);
int cuModuleGetFunction(void** function, void* module, const char* name);
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads,
                                                size_t shared_bytes);
int cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                   unsigned int shared_bytes, void* stream, void** arguments, void** extra);

namespace {

// A function of the driver, which is asked for once. Throws where there is none, and says why.
void* found(const char* name) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error(std::string("ampfast: no driver of CUDA: ") + dlerror());
  }
  void* function = dlsym(library, name);
  if (function == nullptr) {
    throw std::runtime_error(std::string("ampfast: CUDA's driver has no ") + name);
  }
  return function;
}

#define AMPFAST_FOUND(FUNCTION)                                                           \
  [] {                                                                                    \
    static const auto function = reinterpret_cast<decltype(&FUNCTION)>(found(#FUNCTION)); \
    return function;                                                                      \
  }()
#define AMPFAST_CALL(FUNCTION, ...) require(AMPFAST_FOUND(FUNCTION)(__VA_ARGS__), #FUNCTION)

// Throws with name and text of a result of `call` that is not kSuccess.
void require(int result, const char* call) {
  if (result == kSuccess) {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  AMPFAST_FOUND(cuGetErrorName)(result, &name);
  AMPFAST_FOUND(cuGetErrorString)(result, &text);
  throw std::runtime_error(std::string("ampfast: ") + call + ": " +
                           (name != nullptr ? name : std::to_string(result)) + ": " +
                           (text != nullptr ? text : "unknown to the driver"));
}

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
  const auto get = [&](const std::string& name, int threads) {
    Kernel kernel{context};
    AMPFAST_CALL(cuModuleGetFunction, &kernel.function, module, name.c_str());
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
      kernels.over_tables[table][kind] = get("ampfast_" + name, kThreads);
    }
  }
  kernels.update_scale = get("ampfast_update_scale", 1);
  kernels.clip_coefficient = get("ampfast_clip_coefficient", 1);
  loaded()[device] = kernels;
}

void launch(Kind kind, const Launch& launch, const Place& place) {
  const int table = static_cast<int>(launch.dtype);
  const Kernel& kernel = loaded().at(place.device).over_tables[table][kind];
  const int64_t most = most_programs > 0 ? most_programs : kernel.resident;
  queue(kernel, std::min<int64_t>(launch.chunks, most), kThreads, launch, place);
}

void update_scale(const UpdateAlone& alone, const Place& place) {
  queue(loaded().at(place.device).update_scale, 1, 1, alone, place);
}

void clip_coefficient(const Clip& clip, const Place& place) {
  queue(loaded().at(place.device).clip_coefficient, 1, 1, clip, place);
}

}  // namespace ampfast::cuda
