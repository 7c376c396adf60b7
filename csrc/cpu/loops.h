// The loops over one contiguous block; included once per instruction set, in a namespace of its own
// and under the matching target, so there is no include guard. AMPFAST_F16C tells whether the
// conversions of float16 may use that extension.

// Not std::max: a copy of it compiled for one instruction set could end up in the code of another.
template <class T>
T larger(T a, T b) {
  return a < b ? b : a;
}

template <class T>
int64_t peak_bits(const void* data, int64_t numel) {
  const T* values = static_cast<const T*>(data);
  decltype(magnitude(*values)) peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = larger(peak, magnitude(values[i]));
  }
  return peak;
}

// For 16-bit types: integers of that width, twice as many to a register as their floats.
inline int64_t peak_bits16(const void* data, int64_t numel) {
  const uint16_t* values = static_cast<const uint16_t*>(data);
  int16_t peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = larger(peak, magnitude16(values[i]));
  }
  return peak;
}

template <class T>
int64_t unscale(void* data, int64_t numel, float inv_scale) {
  T* values = static_cast<T*>(data);
  const T factor = inv_scale;
  decltype(magnitude(*values)) peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = larger(peak, magnitude(values[i]));
    values[i] = values[i] * factor;
  }
  return peak;
}

template <class T>
int64_t unscale16(void* data, int64_t numel, float inv_scale) {
  T* values = static_cast<T*>(data);
  int16_t peak = 0;
  int64_t i = 0;
#ifdef AMPFAST_F16C
  if constexpr (std::is_same_v<T, Half>) {
    const __m256 factor = _mm256_set1_ps(inv_scale);
    const __m128i mask = _mm_set1_epi16(0x7fff);
    __m128i peaks = _mm_setzero_si128();
    for (; i + 8 <= numel; i += 8) {
      __m128i* place = reinterpret_cast<__m128i*>(values + i);
      const __m128i bits = _mm_loadu_si128(place);
      peaks = _mm_max_epi16(peaks, _mm_and_si128(bits, mask));
      const __m256 product = _mm256_mul_ps(_mm256_cvtph_ps(bits), factor);
      _mm_storeu_si128(place, _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
    }
    int16_t lanes[8];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), peaks);
    for (const int16_t lane : lanes) {
      peak = larger(peak, lane);
    }
  }
#endif
  for (; i < numel; ++i) {
    peak = larger(peak, magnitude16(values[i].bits));
    values[i] = narrow(widen(values[i]) * inv_scale, T{});
  }
  return peak;
}

// The sum of squares of the unscaled values, in float64. A fixed number of lanes gives the same
// bits on every instruction set.
template <class T, class Widen>
double squares_of(const void* data, int64_t numel, float inv_scale, Widen widen_value) {
  constexpr int kLanes = 16;
  const T* values = static_cast<const T*>(data);
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = widen_value(values[i + lane]) * inv_scale;
      lanes[lane] += value * value;
    }
  }
  for (; i < numel; ++i) {
    const double value = widen_value(values[i]) * inv_scale;
    lanes[i % kLanes] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

template <class T>
double squares(const void* data, int64_t numel, float inv_scale) {
  return squares_of<T>(data, numel, inv_scale, [](T value) { return value; });
}

template <class T>
double squares16(const void* data, int64_t numel, float inv_scale) {
  return squares_of<T>(data, numel, inv_scale, [](T value) { return widen(value); });
}

inline constexpr Loops kLoops[] = {
    {peak_bits<float>, unscale<float>, squares<float>},
    {peak_bits<double>, unscale<double>, squares<double>},
    {peak_bits16, unscale16<Half>, squares16<Half>},
    {peak_bits16, unscale16<BFloat16>, squares16<BFloat16>},
};
