// CUDA in C++ for a CPU: a program's threads are fibers that one thread of the host runs, in random
// order; programs run on several such threads at once. What orders memory accesses on a GPU does so
// here, and nothing else, so that ThreadSanitizer sees races.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
// Of a program, which one thread runs.
#define __shared__ static thread_local
#define __builtin_assume(...)
#define threadIdx (host_cuda::here().thread)
#define blockIdx (host_cuda::here().program)
#define gridDim (host_cuda::here().programs)

struct uint4 {
  unsigned int x, y, z, w;
};
struct float2 {
  float x, y;
};

namespace host_cuda {

struct Index {
  unsigned int x;
};
struct Here {
  Index thread, program, programs;
};
const Here& here();

// Calls a kernel with its argument, in every thread of its programs; returns whether all came to
// their end.
using Call = void (*)(void* kernel, void* argument);
bool run(Call call, void* kernel, void* argument, unsigned int programs, unsigned int threads);

// Waits for all threads of the program.
void barrier();

// The value of another lane of the warp, all of whose lanes call it.
uint64_t shuffled(uint64_t value, unsigned int lane);

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Of `count` lower bits rounds to nearest even.
inline uint32_t rounded(uint32_t bits, int count) {
  const uint32_t half = 1u << (count - 1);
  return (bits + half - 1 + (bits >> count & 1)) >> count;
}

inline float from_half(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = half >> 10 & 31;
  const uint32_t fraction = half & 0x3ff;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return float_of(sign | bits_of(value));
  }
  return float_of(sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | fraction << 13);
}

inline uint16_t to_half(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (std::isnan(value)) {
    return 0x7fff;
  }
  if (size < 0x1p-14f) {  // in units of the smallest, to nearest even
    return sign | static_cast<uint32_t>(std::nearbyint(size * 0x1p24f));
  }
  const uint32_t bits = rounded(bits_of(size) - (112u << 23), 13);
  return sign | (bits < 0x7c00 ? bits : 0x7c00);
}

inline float from_bfloat(uint16_t bits) { return float_of(uint32_t{bits} << 16); }

inline uint16_t to_bfloat(float value) {
  return std::isnan(value) ? 0x7fff : rounded(bits_of(value), 16);
}

template <class T>
T exchanged(T value, unsigned int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffled(bits, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace host_cuda

struct __half2 {
  uint16_t x, y;
};
struct __nv_bfloat162 {
  uint16_t x, y;
};

inline float2 __half22float2(__half2 pair) {
  return {host_cuda::from_half(pair.x), host_cuda::from_half(pair.y)};
}
inline __half2 __floats2half2_rn(float a, float b) {
  return {host_cuda::to_half(a), host_cuda::to_half(b)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 pair) {
  return {host_cuda::from_bfloat(pair.x), host_cuda::from_bfloat(pair.y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {host_cuda::to_bfloat(a), host_cuda::to_bfloat(b)};
}

inline void __syncthreads() { host_cuda::barrier(); }

template <class T>
T __shfl_sync(unsigned int, T value, int lane) {
  return host_cuda::exchanged(value, static_cast<unsigned int>(lane));
}
template <class T>
T __shfl_xor_sync(unsigned int, T value, int mask) {
  return host_cuda::exchanged(value, threadIdx.x % 32 ^ static_cast<unsigned int>(mask));
}

template <class T>
T __ldcg(const T* place) {
  return *place;
}
inline bool __isGlobal(const void*) { return true; }

inline double atomicAdd(double* place, double value) {
  double before = 0, after = 0;
  __atomic_load(place, &before, __ATOMIC_RELAXED);
  do {
    after = before + value;
  } while (!__atomic_compare_exchange(place, &before, &after, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* place, unsigned long long value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicMax(unsigned long long* place, unsigned long long value) {
  unsigned long long before = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (before < value && !__atomic_compare_exchange_n(place, &before, value, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
