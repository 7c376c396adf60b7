// The loops over one contiguous block, which compilers vectorize; included once per instruction
// set, in a namespace of its own.

// Elements that stay in the cache until they are taken again.
constexpr int64_t kBlock = 512;

// Sums of squares that do not wait for each other: as many on every instruction set.
constexpr int64_t kSums = 32;

// Bits of magnitudes, which are compared as signed integers of their size.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, int64_t,
                                std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;

// The type in which a type is computed.
template <class T>
using Opmath = std::conditional_t<sizeof(T) == sizeof(double), double, float>;

template <class T>
Bits<T> raised(Bits<T> peak, T value) {
  return larger<Bits<T>>(peak, bits_as<Bits<T>>(value) & std::numeric_limits<Bits<T>>::max());
}

template <class T>
Bits<T> peak_bits(const T* values, int64_t numel) {
  Bits<T> peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = raised(peak, values[i]);
  }
  return peak;
}

// Multiplies in place, and returns the largest magnitude that was there before, as bits.
template <class T>
Bits<T> multiply(T* values, int64_t numel, Opmath<T> factor) {
  Bits<T> peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = raised(peak, values[i]);
    values[i] = static_cast<Opmath<T>>(values[i]) * factor;
  }
  return peak;
}

#ifdef AMPFAST_F16C
// Compilers take several instructions for a conversion of float16.
inline int16_t multiply(c10::Half* values, int64_t numel, float factor) {
  const int16_t peak = peak_bits(values, numel);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    auto* place = reinterpret_cast<__m128i*>(values + i);
    const __m256 product = _mm256_cvtph_ps(_mm_loadu_si128(place)) * factor;
    _mm_storeu_si128(place, _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
  }
  multiply<c10::Half>(values + i, numel - i, factor);
  return peak;
}
#endif

// Calls `body(block, numel)` for every block.
template <class T, class Body>
void for_each_block(T* values, int64_t numel, const Body& body) {
  for (int64_t i = 0; i < numel; i += kBlock) {
    body(values + i, numel - i < kBlock ? numel - i : kBlock);
  }
}

template <class T>
double peak(const void* data, int64_t numel) {
  return bits_as<T>(peak_bits(static_cast<const T*>(data), numel));
}

template <class T>
double unscale(void* data, int64_t numel, float inv_scale, double coefficient) {
  Bits<T> peak = 0;
  for_each_block(static_cast<T*>(data), numel, [&](T* block, int64_t count) {
    peak = larger(peak, multiply(block, count, inv_scale));
    if (coefficient != 1) {
      multiply(block, count, static_cast<Opmath<T>>(coefficient));
    }
  });
  return bits_as<T>(peak);
}

// In float64 squares of all other types are exact and cannot overflow.
template <class T>
double squares(const void* data, int64_t numel, float inv_scale, double* peak) {
  const Opmath<T> factor = inv_scale;
  Bits<T> most = 0;
  double sums[kSums] = {};
  const auto add = [&](const T* values, int64_t count) {
    for (int64_t k = 0; k < count; ++k) {
      const double product = static_cast<Opmath<T>>(values[k]) * factor;
      sums[k] += product * product;
    }
  };
  for_each_block(static_cast<const T*>(data), numel, [&](const T* block, int64_t count) {
    most = larger(most, peak_bits(block, count));
    int64_t k = 0;
    for (; k + kSums <= count; k += kSums) {
      add(block + k, kSums);
    }
    add(block + k, count - k);
  });
  for (int64_t half = kSums / 2; half > 0; half /= 2) {
    for (int64_t k = 0; k < half; ++k) {
      sums[k] += sums[k + half];
    }
  }
  *peak = bits_as<T>(most);
  return sums[0];
}

inline constexpr Loops kLoops[] = {
    {peak<float>, unscale<float>, squares<float>},
    {peak<double>, unscale<double>, squares<double>},
    {peak<c10::Half>, unscale<c10::Half>, squares<c10::Half>},
    {peak<c10::BFloat16>, unscale<c10::BFloat16>, squares<c10::BFloat16>},
};
