// Atomics of the CUDA kernels, and overflow counters by parameter.
#pragma once

#include "gatherer.cuh"

namespace ampfast::cuda {

__device__ inline int64_t raise(int64_t* place, int64_t value) {
  return static_cast<int64_t>(atomicMax(reinterpret_cast<unsigned long long*>(place),
                                        static_cast<unsigned long long>(value)));
}

__device__ inline void add(int64_t* place, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(value));
}

// Publishes what this thread wrote before, and acquires what others published in the same way.
__device__ inline int64_t add_in_order(int64_t* place, int64_t value) {
#if defined(__CUDACC__)
  int64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(place)), "l"(value)
               : "memory");
  return before;
#else  // of tests, which compile the kernels for a CPU
  return __atomic_fetch_add(place, value, __ATOMIC_ACQ_REL);
#endif
}

// Counts `step` for a parameter; the first thread that raises the last step counts, so it is
// counted once.
__device__ inline void mark(int64_t* row, int64_t step, bool is_nan) {
  if (raise(row + kLastNonFinite, step) < step) {
    add(row + kTimesNonFinite, 1);
  }
  if (is_nan && raise(row + kLastNan, step) < step) {
    add(row + kTimesNan, 1);
  }
}

}  // namespace ampfast::cuda
