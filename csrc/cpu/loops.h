// The loops over one contiguous block; included once per instruction set, in a namespace of its own
// and under the matching target, so there is no include guard. AMPFAST_AVX2 tells whether AVX2
// and F16C are that target.

inline int32_t bits_of_magnitude(float value) { return magnitude(value); }
inline int64_t bits_of_magnitude(double value) { return magnitude(value); }
// Integers of that width, twice as many to a register as their floats.
inline int16_t bits_of_magnitude(Half value) { return magnitude16(value.bits); }
inline int16_t bits_of_magnitude(BFloat16 value) { return magnitude16(value.bits); }

// Several lanes, since every maximum waits for the one before it.
template <class T>
int64_t peak_bits(const void* data, int64_t numel) {
  constexpr int kLanes = 128 / sizeof(T);
  const T* values = static_cast<const T*>(data);
  decltype(bits_of_magnitude(*values)) peak = 0;
  int64_t i = 0;
  if (numel >= kLanes) {
    decltype(peak) lanes[kLanes] = {};
    for (; i + kLanes <= numel; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] = larger(lanes[lane], bits_of_magnitude(values[i + lane]));
      }
    }
    for (const auto bits : lanes) {
      peak = larger(peak, bits);
    }
  }
  for (; i < numel; ++i) {
    peak = larger(peak, bits_of_magnitude(values[i]));
  }
  return peak;
}

template <class T, bool kTwice>
int64_t multiply(void* data, int64_t numel, T factor, T second) {
  T* values = static_cast<T*>(data);
  decltype(magnitude(*values)) peak = 0;
  for (int64_t i = 0; i < numel; ++i) {
    peak = larger(peak, magnitude(values[i]));
    values[i] = kTwice ? values[i] * factor * second : values[i] * factor;
  }
  return peak;
}

#ifdef AMPFAST_AVX2

// Multiplies 16 elements, by a second factor too if `kTwice`, rounding each time.
template <bool kTwice>
void multiply_some(Half* values, __m256 factor, __m256 second) {
  for (int i = 0; i < 16; i += 8) {
    __m128i* place = reinterpret_cast<__m128i*>(values + i);
    const __m256 product = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(place)), factor);
    __m128i rounded = _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT);
    if (kTwice) {
      const __m256 again = _mm256_mul_ps(_mm256_cvtph_ps(rounded), second);
      rounded = _mm256_cvtps_ph(again, _MM_FROUND_TO_NEAREST_INT);
    }
    _mm_storeu_si128(place, rounded);
  }
}

// The upper half of each float's bits is the result, except of a NaN.
inline __m256i rounded_to_bfloat16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

template <bool kTwice>
__m256i bfloat16_product(__m256 value, __m256 factor, __m256 second) {
  const __m256 product = _mm256_mul_ps(value, factor);
  __m256 last = product;
  if (kTwice) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    const __m256i rounded = _mm256_and_si256(rounded_to_bfloat16(product), upper);
    last = _mm256_mul_ps(_mm256_castsi256_ps(rounded), second);
  }
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(product, last, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded_to_bfloat16(last), _mm256_set1_epi32(0x7fc00000), is_nan);
}

// Elements of even and of odd index stay in their place: nothing has to be packed.
template <bool kTwice>
void multiply_some(BFloat16* values, __m256 factor, __m256 second) {
  __m256i* place = reinterpret_cast<__m256i*>(values);
  const __m256i bits = _mm256_loadu_si256(place);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bits, upper));
  const __m256i even_product = bfloat16_product<kTwice>(even, factor, second);
  const __m256i odd_product = bfloat16_product<kTwice>(odd, factor, second);
  _mm256_storeu_si256(place,
                      _mm256_blend_epi16(_mm256_srli_epi32(even_product, 16), odd_product, 0xaa));
}

template <class Lane>
Lane largest_of(__m256i values) {
  Lane lanes[sizeof(values) / sizeof(Lane)];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), values);
  Lane largest = 0;
  for (const Lane lane : lanes) {
    largest = larger(largest, lane);
  }
  return largest;
}

#endif

template <class T, bool kTwice>
int64_t multiply16(void* data, int64_t numel, float inv_scale, float coefficient) {
  T* values = static_cast<T*>(data);
  int16_t peak = 0;
  int64_t i = 0;
#ifdef AMPFAST_AVX2
  const __m256 factor = _mm256_set1_ps(inv_scale);
  const __m256 second = _mm256_set1_ps(coefficient);
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i peaks = _mm256_setzero_si256();
  for (; i + 16 <= numel; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    peaks = _mm256_max_epi16(peaks, _mm256_and_si256(bits, mask));
    multiply_some<kTwice>(values + i, factor, second);
  }
  peak = largest_of<int16_t>(peaks);
#endif
  for (; i < numel; ++i) {
    peak = larger(peak, magnitude16(values[i].bits));
    values[i] = narrow(widen(values[i]) * inv_scale, T{});
    if (kTwice) {
      values[i] = narrow(widen(values[i]) * coefficient, T{});
    }
  }
  return peak;
}

template <class T>
int64_t unscale(void* data, int64_t numel, float inv_scale, double coefficient) {
  const bool once = coefficient == 1;
  if constexpr (sizeof(T) == 2) {
    const float second = static_cast<float>(coefficient);
    return once ? multiply16<T, false>(data, numel, inv_scale, second)
                : multiply16<T, true>(data, numel, inv_scale, second);
  } else {
    const T second = static_cast<T>(coefficient);
    return once ? multiply<T, false>(data, numel, inv_scale, second)
                : multiply<T, true>(data, numel, inv_scale, second);
  }
}

// The sum of squares of the unscaled values is taken in float64, in which those of all other types
// are exact and cannot overflow. A fixed number of lanes gives the same bits on every instruction
// set, and keeps the additions from waiting for one another.
constexpr int kSumLanes = 16;

inline float as_opmath(float value) { return value; }
inline double as_opmath(double value) { return value; }
inline float as_opmath(Half value) { return widen(value); }
inline float as_opmath(BFloat16 value) { return widen(value); }

// Adds the squares of what follows a multiple of kSumLanes elements.
template <class T>
void add_squares(const T* values, int64_t numel, float inv_scale, double* lanes) {
  int64_t i = 0;
  for (; i + kSumLanes <= numel; i += kSumLanes) {
    for (int lane = 0; lane < kSumLanes; ++lane) {
      const double value = as_opmath(values[i + lane]) * inv_scale;
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i < numel; ++i, ++lane) {
    const double value = as_opmath(values[i]) * inv_scale;
    lanes[lane] += value * value;
  }
}

inline double sum_of(const double* lanes) {
  double sum = 0;
  for (int lane = 0; lane < kSumLanes; ++lane) {
    sum += lanes[lane];
  }
  return sum;
}

#ifdef AMPFAST_AVX2

inline __m256 widen8(const float* values) { return _mm256_loadu_ps(values); }

inline __m256 widen8(const Half* values) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

inline __m256 widen8(const BFloat16* values) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Adds the squares of 8 unscaled values to two registers of lanes.
inline void add_squares8(__m256 values, __m256 factor, __m256d* lanes) {
  const __m256 product = _mm256_mul_ps(values, factor);
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(product));
  const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(product, 1));
  lanes[0] = _mm256_add_pd(lanes[0], _mm256_mul_pd(low, low));
  lanes[1] = _mm256_add_pd(lanes[1], _mm256_mul_pd(high, high));
}

// The largest magnitudes with those of 16 more elements, as integers of their width.
inline __m256i raised(__m256i peaks, const float* values) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  const __m256i* place = reinterpret_cast<const __m256i*>(values);
  const __m256i first = _mm256_and_si256(_mm256_loadu_si256(place), mask);
  const __m256i second = _mm256_and_si256(_mm256_loadu_si256(place + 1), mask);
  return _mm256_max_epi32(peaks, _mm256_max_epi32(first, second));
}

template <class T>
__m256i raised(__m256i peaks, const T* values) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm256_max_epi16(peaks, _mm256_and_si256(bits, mask));
}

template <class T>
double squares_by_registers(const void* data, int64_t numel, float inv_scale, int64_t* peak) {
  const T* values = static_cast<const T*>(data);
  const __m256 factor = _mm256_set1_ps(inv_scale);
  __m256d sums[kSumLanes / 4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(),
                                 _mm256_setzero_pd()};
  __m256i peaks = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kSumLanes <= numel; i += kSumLanes) {
    peaks = raised(peaks, values + i);
    add_squares8(widen8(values + i), factor, sums);
    add_squares8(widen8(values + i + 8), factor, sums + 2);
  }
  double lanes[kSumLanes];
  for (int k = 0; k < kSumLanes / 4; ++k) {
    _mm256_storeu_pd(lanes + 4 * k, sums[k]);
  }
  *peak = larger<int64_t>(*peak, largest_of<decltype(bits_of_magnitude(T{}))>(peaks));
  *peak = larger(*peak, peak_bits<T>(values + i, numel - i));
  add_squares(values + i, numel - i, inv_scale, lanes);
  return sum_of(lanes);
}

#endif

// In general block by block, so that the second loop over a block finds it in the cache.
template <class T>
double squares(const void* data, int64_t numel, float inv_scale, int64_t* peak) {
#ifdef AMPFAST_AVX2
  if constexpr (!std::is_same_v<T, double>) {
    return squares_by_registers<T>(data, numel, inv_scale, peak);
  }
#endif
  constexpr int64_t kBlock = 1024;
  const T* values = static_cast<const T*>(data);
  double lanes[kSumLanes] = {};
  for (int64_t i = 0; i < numel; i += kBlock) {
    const int64_t count = numel - i < kBlock ? numel - i : kBlock;
    *peak = larger(*peak, peak_bits<T>(values + i, count));
    add_squares(values + i, count, inv_scale, lanes);
  }
  return sum_of(lanes);
}

// Of at most 2^16 - 1 elements, which 16 bits can count. Magnitudes less one, as unsigned numbers,
// put zero behind all others: a single comparison tells whether one is below a bound and not zero.
template <class Bits, const HalfRange& kRange>
Counts counts(const void* data, int64_t numel) {
  constexpr Bits kNone = static_cast<Bits>(~Bits{0});
  constexpr Bits kVanishing = static_cast<Bits>(kRange.smallest_subnormal - 1);
  constexpr Bits kSubnormal = static_cast<Bits>(kRange.smallest_normal - 1);
  const Bits* values = static_cast<const Bits*>(data);
  Bits zero = 0, vanishing = 0, subnormal = 0, overflowing = 0, largest = 0, smallest = kNone;
  for (int64_t i = 0; i < numel; ++i) {
    const Bits magnitude = values[i] & (kNone >> 1);
    const Bits less_one = static_cast<Bits>(magnitude - 1);
    zero += magnitude == 0;
    vanishing += less_one < kVanishing;
    subnormal += less_one < kSubnormal;
    overflowing += magnitude > static_cast<Bits>(kRange.largest);
    largest = larger(largest, magnitude);
    smallest = less_one < smallest ? less_one : smallest;
  }
  const auto number = [](Bits bits) { return static_cast<int64_t>(bits); };
  return {numel - number(zero), number(vanishing), number(subnormal),
          number(overflowing),  number(largest),   number(static_cast<Bits>(smallest + 1))};
}

#ifdef AMPFAST_AVX2

// Tells whether 32 or 16 bytes at a time may be stored past the caches.
template <class Vector>
bool may_stream(bool streams, const void* to) {
  return streams && reinterpret_cast<uintptr_t>(to) % sizeof(Vector) == 0;
}

#endif

// Times as many factors: where there is none, not even a subnormal is flushed.
template <class T, int kFactors>
int64_t widen_times(const void* data, float* wide, int64_t numel, float first, float second,
                    [[maybe_unused]] bool streams) {
  const T* values = static_cast<const T*>(data);
  int16_t peak = 0;
  int64_t i = 0;
#ifdef AMPFAST_AVX2
  const __m256 factor = _mm256_set1_ps(first);
  const __m256 coefficient = _mm256_set1_ps(second);
  __m256i peaks = _mm256_setzero_si256();
  streams = may_stream<__m256>(streams, wide);
  for (; i + 16 <= numel; i += 16) {
    peaks = raised(peaks, values + i);
    for (int64_t k = i; k < i + 16; k += 8) {
      __m256 value = widen8(values + k);
      value = kFactors > 0 ? _mm256_mul_ps(value, factor) : value;
      value = kFactors > 1 ? _mm256_mul_ps(value, coefficient) : value;
      if (streams) {
        _mm256_stream_ps(wide + k, value);
      } else {
        _mm256_storeu_ps(wide + k, value);
      }
    }
  }
  if (streams) {
    _mm_sfence();
  }
  peak = largest_of<int16_t>(peaks);
#endif
  for (; i < numel; ++i) {
    peak = larger(peak, magnitude16(values[i].bits));
    float value = widen(values[i]);
    value = kFactors > 0 ? value * first : value;
    wide[i] = kFactors > 1 ? value * second : value;
  }
  return peak;
}

template <class T>
int64_t widen_all(const void* data, float* wide, int64_t numel, float inv_scale, double coefficient,
                  bool streams) {
  const float second = static_cast<float>(coefficient);
  if (coefficient != 1) {
    return widen_times<T, 2>(data, wide, numel, inv_scale, second, streams);
  }
  return inv_scale != 1 ? widen_times<T, 1>(data, wide, numel, inv_scale, second, streams)
                        : widen_times<T, 0>(data, wide, numel, inv_scale, second, streams);
}

#ifdef AMPFAST_AVX2

inline __m128i narrow8(const float* wide, Half /*tag*/) {
  return _mm256_cvtps_ph(_mm256_loadu_ps(wide), _MM_FROUND_TO_NEAREST_INT);
}

inline __m128i narrow8(const float* wide, BFloat16 /*tag*/) {
  const __m256 value = _mm256_loadu_ps(wide);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i bits =
      _mm256_blendv_epi8(rounded_to_bfloat16(value), _mm256_set1_epi32(0x7fc00000), is_nan);
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

#endif

template <class T>
void narrow_all(void* data, const float* wide, int64_t numel, [[maybe_unused]] bool streams) {
  T* values = static_cast<T*>(data);
  int64_t i = 0;
#ifdef AMPFAST_AVX2
  streams = may_stream<__m128i>(streams, data);
  for (; i + 8 <= numel; i += 8) {
    auto* to = reinterpret_cast<__m128i*>(values + i);
    if (streams) {
      _mm_stream_si128(to, narrow8(wide + i, T{}));
    } else {
      _mm_storeu_si128(to, narrow8(wide + i, T{}));
    }
  }
  if (streams) {
    _mm_sfence();
  }
#endif
  for (; i < numel; ++i) {
    values[i] = narrow(wide[i], T{});
  }
}

inline constexpr Loops kLoops[] = {
    {peak_bits<float>, unscale<float>, squares<float>, counts<uint32_t, kRangeInFloat32>, nullptr,
     nullptr},
    {peak_bits<double>, unscale<double>, squares<double>, counts<uint64_t, kRangeInFloat64>,
     nullptr, nullptr},
    {peak_bits<Half>, unscale<Half>, squares<Half>, counts<uint16_t, kRangeInFloat16>,
     widen_all<Half>, narrow_all<Half>},
    {peak_bits<BFloat16>, unscale<BFloat16>, squares<BFloat16>, counts<uint16_t, kRangeInBFloat16>,
     widen_all<BFloat16>, narrow_all<BFloat16>},
};
