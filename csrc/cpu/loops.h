// The loops over one contiguous block; included once per instruction set, in a namespace of its own
// and under the matching target, so there is no include guard. AMPFAST_AVX2 tells whether AVX2
// and F16C are that target.

// Not std::max: a copy of it compiled for one instruction set could end up in the code of another.
template <class T>
T larger(T a, T b) {
  return a < b ? b : a;
}

// Several lanes, since every maximum waits for the one before it.
template <class T, class Magnitude>
int64_t largest_magnitude(const T* values, int64_t numel, Magnitude magnitude_of) {
  using Bits = decltype(magnitude_of(*values));
  constexpr int kLanes = 128 / sizeof(T);
  Bits lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = larger(lanes[lane], magnitude_of(values[i + lane]));
    }
  }
  Bits peak = 0;
  for (; i < numel; ++i) {
    peak = larger(peak, magnitude_of(values[i]));
  }
  for (const Bits lane : lanes) {
    peak = larger(peak, lane);
  }
  return peak;
}

template <class T>
int64_t peak_bits(const void* data, int64_t numel) {
  return largest_magnitude(static_cast<const T*>(data), numel,
                           [](T value) { return magnitude(value); });
}

// For 16-bit types: integers of that width, twice as many to a register as their floats.
inline int64_t peak_bits16(const void* data, int64_t numel) {
  return largest_magnitude(static_cast<const uint16_t*>(data), numel,
                           [](uint16_t bits) { return magnitude16(bits); });
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

#ifdef AMPFAST_AVX2

// Multiplies 16 elements.
inline void multiply16(Half* values, __m256 factor) {
  for (int i = 0; i < 16; i += 8) {
    __m128i* place = reinterpret_cast<__m128i*>(values + i);
    const __m256 product = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(place)), factor);
    _mm_storeu_si128(place, _mm256_cvtps_ph(product, _MM_FROUND_TO_NEAREST_INT));
  }
}

// The upper half of each float's bits is the result.
inline __m256i rounded_to_bfloat16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(is_nan));
}

// Elements of even and of odd index stay in their place: nothing has to be packed.
inline void multiply16(BFloat16* values, __m256 factor) {
  __m256i* place = reinterpret_cast<__m256i*>(values);
  const __m256i bits = _mm256_loadu_si256(place);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(bits, upper));
  const __m256i even_product = rounded_to_bfloat16(_mm256_mul_ps(even, factor));
  const __m256i odd_product = rounded_to_bfloat16(_mm256_mul_ps(odd, factor));
  _mm256_storeu_si256(place,
                      _mm256_blend_epi16(_mm256_srli_epi32(even_product, 16), odd_product, 0xaa));
}

#endif

template <class T>
int64_t unscale16(void* data, int64_t numel, float inv_scale) {
  T* values = static_cast<T*>(data);
  int16_t peak = 0;
  int64_t i = 0;
#ifdef AMPFAST_AVX2
  const __m256 factor = _mm256_set1_ps(inv_scale);
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i peaks = _mm256_setzero_si256();
  for (; i + 16 <= numel; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    peaks = _mm256_max_epi16(peaks, _mm256_and_si256(bits, mask));
    multiply16(values + i, factor);
  }
  int16_t lanes[16];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), peaks);
  for (const int16_t lane : lanes) {
    peak = larger(peak, lane);
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

// The counts of at most 2^15 lanes full of elements, so that 16-bit lanes count far enough.
// Magnitudes less one, as unsigned numbers, put zero behind all others: a single comparison tells
// whether one is below a bound and not zero.
template <class Bits>
void count_block(const Bits* values, int64_t rounds, const HalfRange& range, Counts& counts) {
  constexpr int kLanes = 64 / sizeof(Bits);
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  const Bits vanishing = static_cast<Bits>(range.smallest_subnormal - 1);
  const Bits subnormal = static_cast<Bits>(range.smallest_normal - 1);
  const Bits too_large = static_cast<Bits>(range.largest);
  Bits zero[kLanes] = {}, vanished[kLanes] = {}, small[kLanes] = {}, fits[kLanes] = {};
  Bits largest[kLanes] = {}, smallest[kLanes];
  for (Bits& lane : smallest) {
    lane = static_cast<Bits>(~Bits{0});
  }
  for (int64_t i = 0; i < rounds; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const Bits magnitude = values[i * kLanes + lane] & kMagnitude;
      const Bits less_one = static_cast<Bits>(magnitude - 1);
      zero[lane] += magnitude == 0;
      vanished[lane] += less_one < vanishing;
      small[lane] += less_one < subnormal;
      fits[lane] += less_one < too_large;
      largest[lane] = larger(largest[lane], magnitude);
      smallest[lane] = less_one < smallest[lane] ? less_one : smallest[lane];
    }
  }
  // Back from unsigned numbers, of which the greatest stands for none.
  uint64_t none = static_cast<Bits>(~Bits{0});
  uint64_t least = none;
  for (int lane = 0; lane < kLanes; ++lane) {
    counts.nonzero += rounds - static_cast<int64_t>(zero[lane]);
    counts.vanishing += static_cast<int64_t>(vanished[lane]);
    counts.subnormal += static_cast<int64_t>(small[lane]);
    counts.overflowing +=
        rounds - static_cast<int64_t>(zero[lane]) - static_cast<int64_t>(fits[lane]);
    counts.largest = larger(counts.largest, static_cast<int64_t>(largest[lane]));
    least = smallest[lane] < least ? smallest[lane] : least;
  }
  const int64_t smallest_nonzero = least == none ? 0 : static_cast<int64_t>(least + 1);
  if (smallest_nonzero != 0 && (counts.smallest == 0 || smallest_nonzero < counts.smallest)) {
    counts.smallest = smallest_nonzero;
  }
}

// Of a block whose lanes do not count beyond their width, as a chunk is.
template <class Bits>
Counts counts_of(const void* data, int64_t numel, const HalfRange& range) {
  constexpr int64_t kLanes = 64 / sizeof(Bits);
  const Bits* values = static_cast<const Bits*>(data);
  Counts counts;
  const int64_t rounds = numel / kLanes;
  count_block(values, rounds, range, counts);
  // The others with zeros behind them, which nothing counts.
  if (const int64_t rest = numel - rounds * kLanes) {
    Bits last[kLanes] = {};
    std::memcpy(last, values + rounds * kLanes, rest * sizeof(Bits));
    count_block(last, 1, range, counts);
  }
  return counts;
}

inline Counts counts32(const void* data, int64_t numel) {
  return counts_of<uint32_t>(data, numel, kRangeInFloat32);
}

inline Counts counts64(const void* data, int64_t numel) {
  return counts_of<uint64_t>(data, numel, kRangeInFloat64);
}

inline Counts counts_half(const void* data, int64_t numel) {
  return counts_of<uint16_t>(data, numel, kRangeInFloat16);
}

inline Counts counts_bfloat16(const void* data, int64_t numel) {
  return counts_of<uint16_t>(data, numel, kRangeInBFloat16);
}

inline constexpr Loops kLoops[] = {
    {peak_bits<float>, unscale<float>, squares<float>, counts32},
    {peak_bits<double>, unscale<double>, squares<double>, counts64},
    {peak_bits16, unscale16<Half>, squares16<Half>, counts_half},
    {peak_bits16, unscale16<BFloat16>, squares16<BFloat16>, counts_bfloat16},
};
