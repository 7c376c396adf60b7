// Stands in for torch's header where the PTX emulator runs the kernels.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  void* stream() const { return nullptr; }
  Device device() const { return kCPU; }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex /*device*/ = -1) { return {}; }

}  // namespace c10::cuda
