// CUDA's driver for host code whose kernels run on the CPU, or not at all: calls succeed, and are
// counted. Launches are handed to the current launcher.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidImage = 200;
constexpr int kNotFound = 500;
constexpr int kLaunchFailed = 719;
constexpr int kNotSupported = 801;

// `sizes` are the grid's and the block's. Returns null, or why the launch failed.
using Launcher = const char* (*)(const char* kernel, const unsigned int* sizes, size_t shared_bytes,
                                 void** arguments, void* stream);

Launcher launcher = nullptr;      // without one launches do nothing
std::set<std::string> functions;  // whose handles are their names
bool knows_all = false;           // whether there are no functions but those that were added
std::string message;              // of the last failed launch
char anything[64];
thread_local void* current_context = nullptr;

struct Calls {
  int64_t count = 0;
  int result = 0;  // of the next call
};

Calls& calls_of(const char* name) {
  static auto& calls = *new std::map<std::string, Calls>;
  return calls[name];
}

int succeed(void** handle) {
  *handle = anything;
  return 0;
}

}  // namespace

// Counts a call, which fails if that was asked for.
#define COUNT()                             \
  static Calls& calls = calls_of(__func__); \
  ++calls.count;                            \
  if (const int result = calls.result) {    \
    calls.result = 0;                       \
    return result;                          \
  }

#define IDLE(name) \
  int name() {     \
    COUNT()        \
    return 0;      \
  }

#pragma GCC visibility push(default)
extern "C" {

void ptx_emulator_set_launcher(Launcher given) { launcher = given; }

// Adds a kernel; from then on there are none that were not added.
void ptx_emulator_add_kernel(const char* name) {
  functions.insert(name);
  knows_all = true;
}

int64_t ptx_emulator_calls(const char* name) { return calls_of(name).count; }

void ptx_emulator_fail(const char* name, int result) { calls_of(name).result = result; }

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

int cuCtxGetCurrent(void** context) {
  COUNT()
  *context = current_context;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  COUNT()
  current_context = context;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  COUNT()
  return succeed(context);
}

// A fatbin, a cubin or PTX.
int cuModuleLoadData(void** module, const void* image) {
  COUNT()
  const bool is_known = std::memcmp(image, "\x50\xed\x55\xba", 4) == 0 ||
                        std::memcmp(image,
                                    "\x7f"
                                    "ELF",
                                    4) == 0 ||
                        std::memcmp(image, "//", 2) == 0;
  return is_known ? succeed(module) : kInvalidImage;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  COUNT()
  if (knows_all && functions.count(name) == 0) {
    return kNotFound;
  }
  *function = const_cast<std::string*>(&*functions.insert(name).first);
  return 0;
}
int cuLaunchKernel(void* function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                   unsigned int block_x, unsigned int block_y, unsigned int block_z,
                   unsigned int shared_bytes, void* stream, void** arguments, void**) {
  COUNT()
  if (launcher == nullptr) {
    return 0;
  }
  const unsigned int sizes[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
  const auto& name = *static_cast<const std::string*>(function);
  const char* error = launcher(name.c_str(), sizes, shared_bytes, arguments, stream);
  if (error == nullptr) {
    return 0;
  }
  message = error;
  return kLaunchFailed;
}

int cuCtxGetDevice(int* device) {
  COUNT()
  return *device = 0;
}
int cuDeviceGet(int* device, int number) {
  COUNT()
  *device = number;
  return 0;
}
int cuDeviceGetCount(int* count) {
  COUNT()
  *count = 1;
  return 0;
}
int cuDriverGetVersion(int* version) {
  COUNT()
  *version = 13000;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  COUNT()
  // One multiprocessor; of all else much, among others bytes of shared memory.
  *value = attribute == 16 ? 1 : 1 << 17;
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void*) {
  COUNT()
  *value = attribute == 0 ? 1024 : 0;  // threads of a program at most
  return 0;
}
// There is no machine code whose registers could be counted.
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) {
  COUNT()
  *blocks = 1;
  return 0;
}
int cuCtxGetLimit(size_t* value, int) {
  COUNT()
  *value = 1 << 20;
  return 0;
}

int cuGetErrorName(int error, const char** name) {
  static const std::map<int, const char*> names = {{kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
                                                   {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
                                                   {kNotFound, "CUDA_ERROR_NOT_FOUND"},
                                                   {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED"},
                                                   {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED"}};
  const auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return *name == nullptr ? kInvalidValue : 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == kLaunchFailed ? message.c_str() : "as the stand-in was told";
  return 0;
}

int cuPointerGetAttribute(void* value, int, uint64_t address) {
  COUNT()
  *static_cast<uint64_t*>(value) = address;
  return 0;
}
int cuPointerGetAttributes(unsigned int count, const int*, void** values, uint64_t address) {
  COUNT()
  for (unsigned int i = 0; i < count; ++i) {
    *static_cast<uint64_t*>(values[i]) = address;
  }
  return 0;
}
}
#pragma GCC visibility pop
