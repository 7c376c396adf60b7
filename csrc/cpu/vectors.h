// Registers of one instruction set, and the 16-bit types in them; included once per set, in a
// namespace of its own and under the matching target, so there is no include guard.
// AMPFAST_REGISTER is the size of a register in bytes; 0 makes registers of one element, for which
// the same expressions are scalar.

template <class T>
struct VectorOf {
  typedef T type AMPFAST_VECTOR(AMPFAST_REGISTER);  // not `using`, where GCC ignores the attribute
};

using Floats = VectorOf<float>::type;
using Doubles = VectorOf<double>::type;
using Words = VectorOf<uint32_t>::type;
typedef uint16_t Halves AMPFAST_VECTOR(AMPFAST_REGISTER / 2);  // as many as floats

constexpr int kFloats = sizeof(Floats) / sizeof(float);

template <class Register>
AMPFAST_INLINE Register load(const void* from) {
  Register result;
  std::memcpy(&result, from, sizeof(result));
  return result;
}

template <class To, class From>
AMPFAST_INLINE To as(From value) {
  static_assert(sizeof(To) == sizeof(From), "as keeps the size");
  return load<To>(&value);
}

template <class Register>
AMPFAST_INLINE void store(void* to, Register value) {
#if AMPFAST_REGISTER == 32
  // Folded into the store, as GCC does it else, the conversion to float16 takes twice as long.
  if constexpr (sizeof(value) == 16) {
    return _mm_storeu_si128(static_cast<__m128i*>(to), as<__m128i>(value));
  }
#endif
  std::memcpy(to, &value, sizeof(value));
}

// Copies the first bytes of a row, and zeros after them if `kWhole`. Masks save calls, and the
// wait of a load for several stores: of `kStored` bytes each, where that is less than the row.
template <size_t kSize, bool kWhole, size_t kStored = 64>
AMPFAST_INLINE void copy_part(void* to, const void* from, size_t bytes) {
#if AMPFAST_REGISTER == 64
  for (size_t i = 0; i < kSize; i += kStored) {
    const uint64_t mask = _bzhi_u64(~uint64_t{0}, bytes > i ? bytes - i : 0);
    const char* place = static_cast<const char*>(from) + i;
    if constexpr (kWhole) {
      store(static_cast<char*>(to) + i, _mm512_maskz_loadu_epi8(mask, place));
    } else if constexpr (kStored == 64) {
      _mm512_mask_storeu_epi8(static_cast<char*>(to) + i, mask, load<__m512i>(place));
    } else {
      _mm256_mask_storeu_epi8(static_cast<char*>(to) + i, mask, load<__m256i>(place));
    }
  }
#elif AMPFAST_REGISTER == 32
  const __m256i words = _mm256_set1_epi32(static_cast<int>(bytes / sizeof(int)));
  const size_t odd = bytes % sizeof(int) != 0 ? bytes - sizeof(uint16_t) : 0;
  uint16_t last = 0;
  if (bytes % sizeof(int) != 0) {
    last = load<uint16_t>(static_cast<const char*>(from) + odd);
  }
  for (int i = 0; i < static_cast<int>(kSize / sizeof(int)); i += 8) {
    const __m256i places = _mm256_setr_epi32(i, i + 1, i + 2, i + 3, i + 4, i + 5, i + 6, i + 7);
    const __m256i mask = _mm256_cmpgt_epi32(words, places);
    const __m256i values = _mm256_maskload_epi32(static_cast<const int*>(from) + i, mask);
    if (kWhole) {
      const __m256i there = _mm256_cmpeq_epi32(words, places);
      store(static_cast<int*>(to) + i, values | (there & _mm256_set1_epi32(last)));
    } else {
      _mm256_maskstore_epi32(static_cast<int*>(to) + i, mask, values);
    }
  }
  if (!kWhole && bytes % sizeof(int) != 0) {
    store(static_cast<char*>(to) + odd, last);
  }
#else
  if (kWhole) {
    std::memset(to, 0, kSize);
  }
  std::memcpy(to, from, bytes);
#endif
}

// GCC takes several instructions for a conversion of vectors, and warns of registers that
// intrinsics without a mask leave undefined.
AMPFAST_INLINE Words widen_bits(Halves bits) {
#if AMPFAST_REGISTER == 64
  return as<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, as<__m256i>(bits)));
#elif AMPFAST_REGISTER == 32
  return as<Words>(_mm256_cvtepu16_epi32(as<__m128i>(bits)));
#else
  return AMPFAST_CONVERT(bits, Words);
#endif
}

// Values as a register of doubles, or of their own type.
template <class Register, class Value>
AMPFAST_INLINE Register loaded(const Value* values) {
  if constexpr (std::is_same_v<Register, Doubles> && sizeof(Value) == sizeof(float)) {
#if AMPFAST_REGISTER == 64
    return as<Doubles>(_mm512_maskz_cvtps_pd(0xff, load<__m256>(values)));
#elif AMPFAST_REGISTER == 32
    return as<Doubles>(_mm256_cvtps_pd(load<__m128>(values)));
#else
    typedef float Few AMPFAST_VECTOR(AMPFAST_REGISTER / 2);
    return AMPFAST_CONVERT(load<Few>(values), Doubles);
#endif
  } else {
    return load<Register>(values);
  }
}

AMPFAST_INLINE Halves narrow_bits(Words bits) { return AMPFAST_CONVERT(bits, Halves); }

// Rounds to nearest, ties to even. Leaves something in the lower half of the bits, where that of a
// NaN must be zero.
AMPFAST_INLINE Words round_to_bfloat16(Floats value) {
  const Words bits = as<Words>(value);
  return bits + (((bits >> 16) & 1) + 0x7fff);
}

AMPFAST_INLINE Floats widen(Halves bits, BFloat16 /*tag*/) {
  return as<Floats>(widen_bits(bits) << 16);
}

AMPFAST_INLINE Halves narrow(Floats value, BFloat16 /*tag*/) {
  return narrow_bits((value == value ? round_to_bfloat16(value) : Words{} + 0x7fc00000) >> 16);
}

AMPFAST_INLINE Floats widen(Halves bits, Half /*tag*/) {
#if AMPFAST_REGISTER == 64
  return as<Floats>(_mm512_maskz_cvtph_ps(0xffff, as<__m256i>(bits)));
#elif AMPFAST_REGISTER == 32
  return as<Floats>(_mm256_cvtph_ps(as<__m128i>(bits)));
#elif defined(AMPFAST_NEON)
  return as<Floats>(vcvt_f32_f16(as<float16x4_t>(bits)));
#else
  const Words all = widen_bits(bits);
  const Words magnitude = all & 0x7fff;
  // Arithmetic on normal floats makes it, so that a flush-to-zero mode cannot lose it.
  const Words subnormal = as<Words>(as<Floats>(0x3f000000 | magnitude) - 0.5f);
  const Words normal = (magnitude << 13) + 0x38000000;
  const Words special = (magnitude << 13) | 0x7f800000;
  const Words finite = magnitude < 0x400 ? subnormal : normal;
  return as<Floats>(((all & 0x8000) << 16) | (magnitude < 0x7c00 ? finite : special));
#endif
}

// Rounds to nearest, ties to even.
AMPFAST_INLINE Halves narrow(Floats value, Half /*tag*/) {
#if AMPFAST_REGISTER == 64
  return as<Halves>(_mm512_maskz_cvtps_ph(0xffff, as<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif AMPFAST_REGISTER == 32
  return as<Halves>(_mm256_cvtps_ph(as<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(AMPFAST_NEON)
  return as<Halves>(vcvt_f16_f32(as<float32x4_t>(value)));
#else
  const Words bits = as<Words>(value);
  const Words magnitude = bits & 0x7fffffff;
  // 0.5 has the unit in the last place of a subnormal half, so the addition rounds.
  const Words subnormal = as<Words>(as<Floats>(magnitude) + 0.5f) - 0x3f000000;
  const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words special = magnitude > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00;
  const Words finite = magnitude < 0x38800000 ? subnormal : normal;
  return narrow_bits(((bits >> 16) & 0x8000) | (magnitude < 0x477ff000 ? finite : special));
#endif
}
