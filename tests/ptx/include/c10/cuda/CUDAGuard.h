// Stands in for torch's header where kernels run on the CPU.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(Device /*device*/) {}
};

}  // namespace c10::cuda
