// Elements of each dtype in the CUDA kernels: read, multiplied and written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../element.h"
#include "multi_tensor.h"

namespace ampfast::cuda {

// Formats of gradients, read in words of one or two elements.

template <class T, class Bits>
struct Single {
  using Opmath = T;
  using Element = Bits;
  using Word = Bits;
  using Peak = decltype(magnitude(T{}));
  static constexpr int kPerWord = 1;
  AMPFAST_ELEMENT static void widen(Word word, T* values) { values[0] = bits_as<T>(word); }
  AMPFAST_ELEMENT static Word narrow(const T* values) { return bits_as<Word>(values[0]); }
  AMPFAST_ELEMENT static Peak peak(Word word) { return magnitude(bits_as<T>(word)); }
};

struct Float32 : Single<float, uint32_t> {};

struct Float64 : Single<double, uint64_t> {};

struct Pair16 {
  using Opmath = float;
  using Element = uint16_t;
  using Word = uint32_t;
  using Peak = int32_t;
  static constexpr int kPerWord = 2;
  AMPFAST_ELEMENT static Peak peak(Word word) {
    return larger<Peak>(magnitude16(static_cast<uint16_t>(word)),
                        magnitude16(static_cast<uint16_t>(word >> 16)));
  }
};

// It converts by intrinsics, since torch compiles extensions without the operators of these types.
struct Float16 : Pair16 {
  AMPFAST_ELEMENT static void widen(Word word, float* values) {
    const float2 pair = __half22float2(bits_as<__half2>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  AMPFAST_ELEMENT static Word narrow(const float* values) {
    return bits_as<Word>(__floats2half2_rn(values[0], values[1]));
  }
};

struct BFloat16 : Pair16 {
  AMPFAST_ELEMENT static void widen(Word word, float* values) {
    const float2 pair = __bfloat1622float2(bits_as<__nv_bfloat162>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  }
  AMPFAST_ELEMENT static Word narrow(const float* values) {
    return bits_as<Word>(__floats2bfloat162_rn(values[0], values[1]));
  }
};

// The largest magnitude as it is used: rounded to its dtype where that is written, as fused
// optimizers see it otherwise. Rounding is monotone, so the largest magnitude tells of all.
template <class Format>
AMPFAST_ELEMENT typename Format::Opmath used_peak(typename Format::Peak peak, Factor how,
                                                  typename Format::Opmath factor) {
  typename Format::Opmath values[Format::kPerWord] = {};
  Format::widen(static_cast<typename Format::Word>(peak), values);
  values[0] = used_value(values[0], how, static_cast<float>(factor));
  if (how != Factor::kNone && how != Factor::kDivide) {
    Format::widen(Format::narrow(values), values);
  }
  // An infinite factor makes zeros NaN and others infinite; which of them a thread saw must not
  // decide.
  if (peak == 0 && !std::isnan(factor) && std::isnan(values[0])) {
    return static_cast<typename Format::Opmath>(INFINITY);
  }
  return values[0];
}

}  // namespace ampfast::cuda
