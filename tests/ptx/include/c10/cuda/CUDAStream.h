// Stands in for torch's header where kernels run on the CPU.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  void* stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex /*device*/) { return {}; }

}  // namespace c10::cuda
