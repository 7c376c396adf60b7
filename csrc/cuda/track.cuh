// Per-parameter tracking in the CUDA kernels: marks of overflows, and gradient health.
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

// Orders what this thread knows before it, and what others told with it behind it.
__device__ inline int64_t add_in_order(int64_t* place, int64_t value) {
  int64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(__cvta_generic_to_global(place)), "l"(value)
               : "memory");
  return before;
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

// Range of the values of one tensor that a thread has seen. Magnitudes less one, as unsigned
// numbers, put zero behind all others: a single comparison tells whether one is below a bound and
// not zero.
template <class Format>
struct Health {
  using Word = typename Format::Word;
  static constexpr Word kNone = ~Word{0};

  typename Format::Peak largest = 0;
  Word smallest = kNone;  // less one
  int nonzero = 0;
  int vanishing = 0;
  int subnormal = 0;
  int overflowing = 0;

  __device__ void vector(uint4 vector, const char* /*place*/) {
    constexpr int kWords = kVectorBytes / sizeof(Word);
    Word words[kWords];
    std::memcpy(words, &vector, kVectorBytes);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      take<Format::kPerWord>(words[k]);
    }
  }

  __device__ void edge(Word word, const char* /*place*/) { take<1>(word); }

  __device__ void end_window() {}

  template <int kCount>
  __device__ void take(Word word) {
    constexpr HalfRange kRange = Format::kRange;
    Word bits[Format::kPerWord];
    Format::magnitudes(word, bits);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Word less_one = bits[i] - 1;
      largest = larger(largest, static_cast<typename Format::Peak>(bits[i]));
      smallest = less_one < smallest ? less_one : smallest;
      nonzero += bits[i] != 0;
      if constexpr (kRange.smallest_subnormal > 1) {  // else nothing is
        vanishing += less_one < static_cast<Word>(kRange.smallest_subnormal - 1);
      }
      subnormal += less_one < static_cast<Word>(kRange.smallest_normal - 1);
      overflowing += bits[i] > static_cast<Word>(kRange.largest);
    }
  }

  // Adds what all threads of a warp counted to the row of a parameter, and starts anew.
  __device__ void add_to(int64_t* row) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, distance));
      const Word other = __shfl_xor_sync(kAllLanes, smallest, distance);
      smallest = other < smallest ? other : smallest;
      nonzero += __shfl_xor_sync(kAllLanes, nonzero, distance);
      vanishing += __shfl_xor_sync(kAllLanes, vanishing, distance);
      subnormal += __shfl_xor_sync(kAllLanes, subnormal, distance);
      overflowing += __shfl_xor_sync(kAllLanes, overflowing, distance);
    }
    if (threadIdx.x % kWarp == 0) {
      add(row + kNonzero, nonzero);
      add(row + kVanishing, vanishing);
      add(row + kSubnormal, subnormal);
      add(row + kOverflowing, overflowing);
      raise(row + kLargest, as_double(largest));
      if (smallest != kNone) {
        const auto least = static_cast<typename Format::Peak>(smallest + 1);
        raise(row + kSmallest, kComplement - as_double(least));
      }
    }
    *this = {};
  }

 private:
  // The float64 bits of a magnitude.
  __device__ static int64_t as_double(typename Format::Peak bits) {
    return magnitude(static_cast<double>(used_peak<Format>(bits, Factor::kNone, 1)));
  }
};

}  // namespace ampfast::cuda
