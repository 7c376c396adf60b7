// Arithmetic of PTX instructions, bit for bit, on register bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "instruction.h"

namespace ptx {

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

[[noreturn]] inline void refuse() { throw Error{"is not supported for these operands", true}; }

inline uint64_t truncated(uint64_t value, int bits) {
  return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1);
}

inline int64_t extended(uint64_t value, int bits) {
  const int unused = 64 - bits;
  return static_cast<int64_t>(value << unused) >> unused;
}

// Canonical NaN of float32 arithmetic on a GPU; for float64 one of its NaNs.
inline uint64_t canonical(float value) {
  return std::isnan(value) ? 0x7fffffff : bits_as<uint32_t>(value);
}

inline uint64_t canonical(double value) {
  return std::isnan(value) ? 0x7ff8000000000000 : bits_as<uint64_t>(value);
}

inline bool is_float(Type type) { return type.kind == Kind::kFloat || type.kind == Kind::kBFloat; }

// Layout of a 16-bit float: sign, exponent, fraction.
struct Format {
  int fraction_bits;
  int bias;
  explicit Format(Type type)
      : fraction_bits(type.kind == Kind::kBFloat ? 7 : 10), bias((1 << (14 - fraction_bits)) - 1) {}
  uint64_t infinity() const { return truncated(~uint64_t{0}, 15 - fraction_bits) << fraction_bits; }
};

// Value of a 16-bit float.
inline double widened(uint64_t bits, Type type) {
  const Format format(type);
  const uint64_t magnitude = truncated(bits, 15);
  const uint64_t fraction = truncated(bits, format.fraction_bits);
  double value;
  if (magnitude > format.infinity()) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == format.infinity()) {
    value = std::numeric_limits<double>::infinity();
  } else {
    const int exponent = static_cast<int>(magnitude >> format.fraction_bits);
    const uint64_t whole =
        exponent == 0 ? fraction : fraction | uint64_t{1} << format.fraction_bits;
    const int quantum = std::max(exponent, 1) - format.bias - format.fraction_bits;
    value = std::ldexp(static_cast<double>(whole), quantum);
  }
  return bits >> 15 & 1 ? -value : value;
}

// Rounds to a 16-bit float, to nearest and ties to even; a GPU produces a single NaN.
inline uint64_t narrowed(double value, Type type) {
  if (std::isnan(value)) {
    return 0x7fff;
  }
  const Format format(type);
  const uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) {
    return sign;
  }
  // Subnormal numbers share the least exponent.
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias);
  if (exponent > format.bias) {
    return sign | format.infinity();
  }
  const double whole = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  // The leading bit, which a subnormal number lacks, and a carry add to the exponent.
  const auto below = static_cast<uint64_t>(exponent + format.bias - 1) << format.fraction_bits;
  return sign | (below + static_cast<uint64_t>(whole));
}

// float64 represents every value of the types below it.
inline double number(uint64_t bits, Type type) {
  switch (type.bits) {
    case 16:
      return widened(bits, type);
    case 32:
      return bits_as<float>(static_cast<uint32_t>(bits));
    default:
      return bits_as<double>(bits);
  }
}

inline uint64_t integer_of(uint64_t bits, Type type) {
  return type.kind == Kind::kSigned ? static_cast<uint64_t>(extended(bits, type.bits))
                                    : truncated(bits, type.bits);
}

// Rounds toward zero, to the nearest integer of the type.
inline uint64_t rounded_to_integer(double value, Type source, Type to) {
  const bool is_signed = to.kind == Kind::kSigned;
  if (std::isnan(value)) {
    return source.bits < 64 && to.bits < 64 ? 0 : uint64_t{1} << (to.bits - 1);
  }
  const double end = std::ldexp(1.0, is_signed ? to.bits - 1 : to.bits);
  if (value >= end) {
    return truncated(~uint64_t{0}, is_signed ? to.bits - 1 : to.bits);
  }
  if (is_signed) {
    return truncated(static_cast<uint64_t>(static_cast<int64_t>(std::max(value, -end))), to.bits);
  }
  return static_cast<uint64_t>(std::max(value, 0.0));
}

inline uint64_t converted(const Operation& does, const uint64_t* from) {
  const Type to = does.type;
  const Type source = does.source;
  if (to.is_pair) {  // the first operand becomes the upper half
    if (to.bits != 16 || source.bits != 32) {
      refuse();
    }
    return narrowed(number(from[0], source), to) << 16 | narrowed(number(from[1], source), to);
  }
  if (!is_float(to)) {
    return is_float(source) ? rounded_to_integer(number(from[0], source), source, to)
                            : truncated(integer_of(from[0], source), to.bits);
  }
  if (!is_float(source)) {
    const uint64_t integer = integer_of(from[0], source);
    const bool is_signed = source.kind == Kind::kSigned;
    const auto value = static_cast<int64_t>(integer);
    switch (to.bits) {
      case 32:
        return canonical(is_signed ? static_cast<float>(value) : static_cast<float>(integer));
      case 64:
        return canonical(is_signed ? static_cast<double>(value) : static_cast<double>(integer));
      default:
        refuse();
    }
  }
  const double value = number(from[0], source);
  switch (to.bits) {
    case 16:
      return narrowed(value, to);
    case 32:
      return canonical(static_cast<float>(value));
    default:
      return canonical(value);
  }
}

template <class T>
bool compared(const Operation& does, T a, T b) {
  if (a != a || b != b) {
    return does.or_unordered || does.compare == Compare::kNan;
  }
  switch (does.compare) {
    case Compare::kEqual:
      return a == b;
    case Compare::kNotEqual:
      return a != b;
    case Compare::kLess:
      return a < b;
    case Compare::kAtMost:
      return a <= b;
    case Compare::kGreater:
      return a > b;
    case Compare::kAtLeast:
      return a >= b;
    case Compare::kNan:
      return false;
  }
  return false;
}

inline bool compared_bits(const Operation& does, const uint64_t* from) {
  const Type type = does.type;
  if (is_float(type)) {
    return compared(does, number(from[0], type), number(from[1], type));
  }
  if (type.kind == Kind::kSigned) {
    return compared(does, extended(from[0], type.bits), extended(from[1], type.bits));
  }
  return compared(does, truncated(from[0], type.bits), truncated(from[1], type.bits));
}

// The operand that is a number, and of two zeros the one with this sign.
template <class T>
T larger_or_smaller(bool larger, T a, T b) {
  if (a != a || b != b) {
    return a != a ? b : a;
  }
  if (a == b) {
    return std::signbit(a) == larger ? b : a;
  }
  return (a < b) == larger ? b : a;
}

template <class T>
uint64_t calculated_float(const Operation& does, T a, T b, T c) {
  switch (does.op) {
    case Op::kAdd:
      return canonical(a + b);
    case Op::kSub:
      return canonical(a - b);
    case Op::kMul:
      return canonical(a * b);
    case Op::kDiv:
      return canonical(a / b);
    case Op::kFma:
      return canonical(std::fma(a, b, c));
    case Op::kMax:
    case Op::kMin:
      return canonical(larger_or_smaller(does.op == Op::kMax, a, b));
    case Op::kSqrt:
      return canonical(std::sqrt(a));
    default:
      refuse();
  }
}

inline uint64_t calculated_integer(const Operation& does, const uint64_t* from) {
  const Type type = does.type;
  const bool is_signed = type.kind == Kind::kSigned;
  const uint64_t a = truncated(from[0], type.bits);
  const uint64_t b = truncated(from[1], type.bits);
  const int64_t signed_a = extended(a, type.bits);
  const int64_t signed_b = extended(b, type.bits);
  const bool is_less = is_signed ? signed_a < signed_b : a < b;
  switch (does.op) {
    case Op::kAdd:
      return a + b;
    case Op::kSub:
      return a - b;
    case Op::kMul:
    case Op::kMad: {
      if (type.bits == 64 && (does.is_high || does.is_wide)) {
        refuse();
      }
      uint64_t product =
          is_signed ? static_cast<uint64_t>(signed_a) * static_cast<uint64_t>(signed_b) : a * b;
      if (does.is_high) {
        product >>= type.bits;
      }
      return does.op == Op::kMad ? product + from[2] : product;
    }
    case Op::kDiv:
    case Op::kRem: {
      if (b == 0) {
        throw Error{"divides by zero"};
      }
      // Of 64 bits, -2^63 / -1 overflows in C++.
      const bool is_negation = is_signed && signed_b == -1;
      if (does.op == Op::kDiv) {
        return is_negation ? 0 - a : is_signed ? static_cast<uint64_t>(signed_a / signed_b) : a / b;
      }
      return is_negation ? 0 : is_signed ? static_cast<uint64_t>(signed_a % signed_b) : a % b;
    }
    case Op::kMax:
      return is_less ? b : a;
    case Op::kMin:
      return is_less ? a : b;
    case Op::kNeg:
      return 0 - a;
    case Op::kNot:
      return type.kind == Kind::kPredicate ? !a : ~a;
    case Op::kAnd:
      return a & b;
    case Op::kOr:
      return a | b;
    case Op::kXor:
      return a ^ b;
    case Op::kPopc:
      return static_cast<uint64_t>(__builtin_popcountll(a));
    case Op::kShl:
      return b >= static_cast<uint64_t>(type.bits) ? 0 : a << b;
    case Op::kShr: {
      const uint64_t most = static_cast<uint64_t>(type.bits) - 1;
      if (is_signed) {
        return static_cast<uint64_t>(signed_a >> (b > most ? most : b));
      }
      return b > most ? 0 : a >> b;
    }
    case Op::kBfe:
      if (is_signed) {
        refuse();
      }
      return truncated((from[1] & 0xff) > 63 ? 0 : a >> (from[1] & 0xff),
                       static_cast<int>(from[2] & 0xff));
    case Op::kPrmt: {
      const uint64_t bytes = truncated(from[0], 32) | from[1] << 32;
      uint64_t result = 0;
      for (int i = 0; i < 4; ++i) {
        const uint64_t which = from[2] >> (4 * i) & 0xf;
        if (which > 7) {
          refuse();
        }
        result |= (bytes >> (8 * which) & 0xff) << (8 * i);
      }
      return result;
    }
    default:
      refuse();
  }
}

// Result of an arithmetic instruction.
inline uint64_t calculated(const Operation& does, const uint64_t* from) {
  const Type type = does.type;
  if (does.op == Op::kCvt) {
    return converted(does, from);
  }
  if (does.op == Op::kSetp) {
    return compared_bits(does, from);
  }
  if (does.op == Op::kSelp) {
    return truncated(from[2] != 0 ? from[0] : from[1], type.bits);
  }
  if (type.is_pair) {
    Operation half = does;
    half.type.is_pair = false;
    const int bits = type.bits;
    const uint64_t lower[3] = {truncated(from[0], bits), truncated(from[1], bits), 0};
    const uint64_t upper[3] = {truncated(from[0] >> bits, bits), truncated(from[1] >> bits, bits),
                               0};
    return calculated(half, upper) << bits | calculated(half, lower);
  }
  if (does.op == Op::kAbs && is_float(type)) {
    return truncated(from[0], type.bits - 1);
  }
  if (does.op == Op::kNeg && is_float(type)) {
    return truncated(from[0] ^ uint64_t{1} << (type.bits - 1), type.bits);
  }
  if (is_float(type) && type.bits == 32) {
    const auto as_float = [&](int i) { return bits_as<float>(static_cast<uint32_t>(from[i])); };
    return calculated_float(does, as_float(0), as_float(1), as_float(2));
  }
  if (is_float(type) && type.bits == 64) {
    const auto as_double = [&](int i) { return bits_as<double>(from[i]); };
    return calculated_float(does, as_double(0), as_double(1), as_double(2));
  }
  if (is_float(type)) {
    refuse();
  }
  return truncated(calculated_integer(does, from), does.is_wide ? 2 * type.bits : type.bits);
}

}  // namespace ptx
