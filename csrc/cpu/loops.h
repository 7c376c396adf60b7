// The loops over one contiguous block; included once per instruction set, after vectors.h.

// Elements that a loop takes at a time, on every instruction set.
constexpr int kRow = 32;

// Elements of a register.
template <class T>
constexpr int kStep = sizeof(Doubles) / sizeof(T);

// How far ahead of a row memory is asked for, in bytes: a processor's own prefetch stops at the end
// of a page, and looks less far ahead where more is computed. It pays in a long block.
constexpr int64_t kAhead = 8192;

template <class T>
constexpr int64_t kLong = 2 * kAhead / sizeof(T);

template <class T>
AMPFAST_INLINE void fetch_ahead([[maybe_unused]] const T* row) {
#if AMPFAST_REGISTER
  for (size_t i = 0; i < kRow * sizeof(T); i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + kAhead + i);
  }
#endif
}

// Calls `row.take<kRow>(from, to)` for every row of a block, which is only read where `to` is
// constant, and `from`. What is left is taken by `kLast` elements; the last are filled up with
// zeros after the first `count`.
template <int kLast, class From, class To, class Row>
AMPFAST_INLINE void for_each_row(const From* from, To* to, int64_t numel, Row& row) {
  constexpr bool kWrites = !std::is_const_v<To>;
  int64_t i = 0;
  if constexpr (kWrites) {
    for (; numel >= kLong<From> && i + kRow <= numel; i += kRow) {
      fetch_ahead(from + i);
      row.template take<kRow>(from + i, to + i);
    }
  }
  for (; i + kRow <= numel; i += kRow) {
    row.template take<kRow>(from + i, to + i);
  }
  if constexpr (kLast < kRow) {
    for (; i + kLast <= numel; i += kLast) {
      row.template take<kLast>(from + i, to + i);
    }
  }
  if (i < numel) {
    alignas(64) From last[kLast];
    alignas(64) std::remove_const_t<To> written[kLast];
    const auto count = static_cast<int>(numel - i);
    copy_part<sizeof(last), true>(last, from + i, count * sizeof(From));
    row.template take<kLast>(last, written, count);
    if constexpr (kWrites) {
      constexpr size_t kStored = sizeof(To) == sizeof(uint16_t) ? 32 : 64;
      copy_part<sizeof(written), false, kStored>(to + i, written, count * sizeof(To));
    }
  }
}

// Bits of magnitudes, which are compared as signed integers of their size.
template <class T>
using Bits = std::conditional_t<sizeof(T) == 8, int64_t,
                                std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;

// Joins so many lanes, which it overwrites, each half with the other.
template <int kLanes, class Lane, class Join>
AMPFAST_INLINE Lane joined(Lane* lanes, const Join& join) {
  if constexpr (kLanes > 1) {
    typedef Lane Half AMPFAST_VECTOR(kLanes / 2 * sizeof(Lane));
    store(lanes, join(load<Half>(lanes), load<Half>(lanes + kLanes / 2)));
    return joined<kLanes / 2>(lanes, join);
  }
  return lanes[0];
}

// The largest magnitude of rows.
template <class T>
struct Peak {
  using Register = typename VectorOf<Bits<T>>::type;
  static constexpr int kLanes = sizeof(Register) / sizeof(T);
  // Two, since every maximum waits for the one before it.
  Register even = {}, odd = {};

  AMPFAST_INLINE static Register larger_at(Register most, const T* values) {
    const Register bits = load<Register>(values) & std::numeric_limits<Bits<T>>::max();
    return most < bits ? bits : most;
  }

  template <int kCount>
  AMPFAST_INLINE void take(const T* row, const T* /*to*/ = nullptr, int /*count*/ = 0) {
    for (int k = 0; k < kCount; k += 2 * kLanes) {
      even = larger_at(even, row + k);
      if constexpr (kLanes < kCount) {
        odd = larger_at(odd, row + k + kLanes);
      }
    }
  }

  AMPFAST_INLINE Bits<T> bits() const {
    Bits<T> lanes[kLanes];
    store(lanes, even < odd ? odd : even);
    return joined<kLanes>(lanes, [](auto a, auto b) { return a < b ? b : a; });
  }
};

template <class T>
int64_t peak_bits(const void* data, int64_t numel) {
  const T* values = static_cast<const T*>(data);
  Peak<T> peak;
  for_each_row<kStep<T>>(values, values, numel, peak);
  return peak.bits();
}

// The type in which a type is computed, and a register of it.
template <class T>
using Opmath = std::conditional_t<sizeof(T) == sizeof(double), double, float>;
template <class T>
using Wide = std::conditional_t<sizeof(T) == sizeof(double), Doubles, Floats>;

template <class T>
AMPFAST_INLINE Wide<T> widened(const T* values) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) {
    return widen(load<Halves>(values), T{});
  } else {
    return load<Wide<T>>(values);
  }
}

// Multiplies a row by as many factors, and rounds each time to what is written.
template <int kFactors, int kCount, class T, class To>
AMPFAST_INLINE void multiply(const T* from, To* to, Opmath<T> factor, Opmath<T> second) {
  constexpr int kLanes = sizeof(Wide<T>) / sizeof(Opmath<T>);
  for (int k = 0; k < kCount; k += kLanes) {
    const Wide<T> value = widened(from + k);
    const Wide<T> product = value * factor;
    if constexpr (sizeof(To) == sizeof(uint16_t)) {
      const Halves rounded = narrow(product, To{});
      store(to + k, kFactors > 1 ? narrow(widen(rounded, To{}) * second, To{}) : rounded);
    } else {
      store<Wide<T>>(to + k, kFactors > 1 ? product * second : product);
    }
  }
}

constexpr uint32_t kUpper = 0xffff0000;

// No factor may be a NaN with bits in its lower half; then no product is.
template <int kFactors>
AMPFAST_INLINE Words bfloat16_product(Words upper, float factor, float second) {
  const Words product = round_to_bfloat16(as<Floats>(upper) * factor);
  return kFactors > 1 ? round_to_bfloat16(as<Floats>(product & kUpper) * second) : product;
}

// Elements of even and of odd index stay in their place: nothing has to be packed.
template <int kFactors, int kCount>
AMPFAST_INLINE void multiply(const BFloat16* from, BFloat16* to, float factor, float second) {
  for (int k = 0; k < kCount; k += 2 * kFloats) {
    const Words bits = load<Words>(from + k);
    const Words even = bfloat16_product<kFactors>(bits << 16, factor, second);
    const Words odd = bfloat16_product<kFactors>(bits & kUpper, factor, second);
    store<Words>(to + k, (even >> 16) | (odd & kUpper));
  }
}

template <class T, int kFactors>
struct Multiply {
  Opmath<T> factor, second;
  Peak<T> peak{};

  template <int kCount>
  AMPFAST_INLINE void take(const T* from, T* to, int /*count*/ = 0) {
    peak.template take<kCount>(from);
    multiply<kFactors, kCount>(from, to, factor, second);
  }
};

template <class T, int kFactors>
int64_t times(T* values, int64_t numel, Opmath<T> factor, Opmath<T> second) {
  constexpr Opmath<T> kNan = std::numeric_limits<Opmath<T>>::quiet_NaN();
  Multiply<T, kFactors> row{factor == factor ? factor : kNan, second == second ? second : kNan};
  for_each_row<kStep<T>>(values, values, numel, row);
  return row.peak.bits();
}

template <class T>
int64_t unscale(void* data, int64_t numel, float inv_scale, double coefficient) {
  const auto all = coefficient == 1 ? times<T, 1> : times<T, 2>;
  return all(static_cast<T*>(data), numel, inv_scale, static_cast<Opmath<T>>(coefficient));
}

// Sums of the squares of unscaled values, one for each place of a row: the same bits on every
// instruction set. In float64 squares of all other types are exact and cannot overflow.
template <class T, class Number>
struct Squares {
  using Register = typename VectorOf<Number>::type;
  static constexpr int kLanes = sizeof(Register) / sizeof(Number);
  float factor;
  Peak<T> peak{};
  Register sums[kRow / kLanes];

  AMPFAST_INLINE explicit Squares(float factor_) : factor(factor_) {
#ifndef __clang__
#pragma GCC unroll 32  // else GCC makes a memset of it
#endif
    for (int k = 0; k < kRow / kLanes; ++k) {
      sums[k] = Register{};
    }
  }

  template <int kCount>
  AMPFAST_INLINE void take(const T* row, const T* /*to*/, int count = kCount) {
    peak.template take<kCount>(row);
    Opmath<T> products[kCount];
    multiply<1, kCount>(row, products, static_cast<Opmath<T>>(factor), 1);
    if (sizeof(Number) == sizeof(double)) {
      for (int lane = 0; lane < kCount; ++lane) {
        products[lane] = lane < count ? products[lane] : 0;  // also where the factor is infinite
      }
    }
    add<kCount>(products, true);
  }

  // Adds so many values, or their squares.
  template <int kCount, class Value>
  AMPFAST_INLINE void add(const Value* values, bool squared) {
    for (int k = 0; k < kCount; k += kLanes) {
      const Register value = loaded<Register>(values + k);
      sums[k / kLanes] = sums[k / kLanes] + (squared ? value * value : value);
    }
  }

  // Moves the first sums to the sums in float64.
  template <int kCount>
  AMPFAST_INLINE void move_to(Squares<T, double>& wide) {
    float lanes[kCount];
    for (int k = 0; k < kCount; k += kLanes) {
      store(lanes + k, sums[k / kLanes]);
      sums[k / kLanes] = Register{};
    }
    wide.template add<kCount>(lanes, false);
  }

  // Adds the first sums, in a fixed order.
  template <int kCount>
  AMPFAST_INLINE Number total() {
    for (int half = kCount / kLanes / 2; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) {
        sums[k] = sums[k] + sums[k + half];
      }
    }
    Number lanes[kLanes];
    store(lanes, sums[0]);
    return joined<kLanes>(lanes, [](auto a, auto b) { return a + b; });
  }
};

// Blocks of so many rows are summed in float32, so with as many roundings at most, and added in
// float64.
constexpr int kRowsOfBlock = 8;

template <class T>
AMPFAST_INLINE double sum_in_float32(const T* values, int64_t numel, Squares<T, float>& squares) {
  Squares<T, double> sums(1);
  if (numel <= kStep<T>) {
    for_each_row<kStep<T>>(values, values, numel, squares);
    squares.template move_to<kStep<T>>(sums);
    return sums.template total<kStep<T>>();
  }
  constexpr int64_t kBlock = kRowsOfBlock * kRow;
  const bool is_long = numel >= kLong<T>;
  for (; numel >= kBlock; values += kBlock, numel -= kBlock) {
    for (int k = 0; k < kBlock; k += kRow) {
      if (is_long) {
        fetch_ahead(values + k);
      }
      squares.template take<kRow>(values + k, values);
    }
    squares.template move_to<kRow>(sums);
  }
  for_each_row<kRow>(values, values, numel, squares);
  squares.template move_to<kRow>(sums);
  return sums.template total<kRow>();
}

template <class T>
double squares(const void* data, int64_t numel, float inv_scale, int64_t* peak) {
  const T* values = static_cast<const T*>(data);
  if constexpr (sizeof(T) < sizeof(double)) {
    Squares<T, float> squares(inv_scale);
    const double sum = sum_in_float32(values, numel, squares);
    *peak = squares.peak.bits();
    // Where squares overflow, or more than 2^-30 of them vanishes or, of at most 2^16 elements, is
    // lost in subnormal numbers, the sum is not as exact as that.
    alignas(64) T largest[kFloats];
    for (T& each : largest) {
      each = bits_as<T>(static_cast<Bits<T>>(*peak));
    }
    float products[kFloats];
    store<Floats>(products, widened(largest) * inv_scale);
    const float most = std::fabs(products[0]);
    if (most == 0 || (most >= 0x1p-40f && most < 0x1p62f)) {
      return sum;
    }
  }
  Squares<T, double> squares(inv_scale);
  for_each_row<kRow>(values, values, numel, squares);
  *peak = squares.peak.bits();
  return squares.template total<kRow>();
}

inline constexpr Loops kLoops[] = {
    {peak_bits<float>, unscale<float>, squares<float>},
    {peak_bits<double>, unscale<double>, squares<double>},
    {peak_bits<Half>, unscale<Half>, squares<Half>},
    {peak_bits<BFloat16>, unscale<BFloat16>, squares<BFloat16>},
};
