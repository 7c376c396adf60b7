// Arithmetic of PTX instructions, bit for bit, on register bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../csrc/cpu/half.h"
#include "instruction.h"

namespace ptx {

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

[[noreturn]] inline void refuse() { throw Error{"the machine does not know it"}; }

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

// float64 represents every value of the types below it.
inline double number(uint64_t bits, Type type) {
  if (type.kind == Kind::kBFloat) {
    return ampfast::cpu::widen(ampfast::cpu::BFloat16{static_cast<uint16_t>(bits)});
  }
  switch (type.bits) {
    case 16:
      return ampfast::cpu::widen(ampfast::cpu::Half{static_cast<uint16_t>(bits)});
    case 32:
      return bits_as<float>(static_cast<uint32_t>(bits));
    default:
      return bits_as<double>(bits);
  }
}

inline bool is_float(Type type) { return type.kind == Kind::kFloat || type.kind == Kind::kBFloat; }

// Rounds float32 to 16 bits; a GPU produces a single NaN.
inline uint64_t narrowed(float value, Type type) {
  if (std::isnan(value)) {
    return 0x7fff;
  }
  return type.kind == Kind::kBFloat ? ampfast::cpu::narrow(value, ampfast::cpu::BFloat16{}).bits
                                    : ampfast::cpu::narrow(value, ampfast::cpu::Half{}).bits;
}

inline uint64_t converted(const Operation& does, const uint64_t* from) {
  const Type to = does.type;
  if (to.is_pair) {  // the first operand becomes the upper half
    if (to.bits != 16) {
      refuse();
    }
    const auto upper = bits_as<float>(static_cast<uint32_t>(from[0]));
    const auto lower = bits_as<float>(static_cast<uint32_t>(from[1]));
    return narrowed(upper, to) << 16 | narrowed(lower, to);
  }
  if (!is_float(to) && !is_float(does.source)) {
    const bool is_signed = does.source.kind == Kind::kSigned;
    const auto wide = is_signed ? static_cast<uint64_t>(extended(from[0], does.source.bits))
                                : truncated(from[0], does.source.bits);
    return truncated(wide, to.bits);
  }
  if (!is_float(to) || !is_float(does.source)) {
    refuse();
  }
  if (to.bits == 16 && does.source.bits == 32) {
    return narrowed(bits_as<float>(static_cast<uint32_t>(from[0])), to);
  }
  const double value = number(from[0], does.source);
  if (to.bits == 64) {
    return canonical(value);
  }
  if (to.bits != 32) {
    refuse();
  }
  return canonical(static_cast<float>(value));
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

template <class T>
uint64_t calculated_float(const Operation& does, T a, T b) {
  switch (does.op) {
    case Op::kAdd:
      return canonical(a + b);
    case Op::kSub:
      return canonical(a - b);
    case Op::kMul:
      return canonical(a * b);
    case Op::kDiv:
      return canonical(a / b);
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
      const uint64_t product =
          is_signed && does.is_wide ? static_cast<uint64_t>(signed_a * signed_b) : a * b;
      return does.op == Op::kMad ? product + from[2] : product;
    }
    case Op::kDiv:
      if (b == 0) {
        throw Error{"divides by zero"};
      }
      return is_signed ? static_cast<uint64_t>(signed_a / signed_b) : a / b;
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
  if (is_float(type) && type.bits == 32) {
    return calculated_float(does, bits_as<float>(static_cast<uint32_t>(from[0])),
                            bits_as<float>(static_cast<uint32_t>(from[1])));
  }
  if (is_float(type) && type.bits == 64) {
    return calculated_float(does, bits_as<double>(from[0]), bits_as<double>(from[1]));
  }
  if (is_float(type)) {
    refuse();
  }
  return truncated(calculated_integer(does, from), does.is_wide ? 2 * type.bits : type.bits);
}

}  // namespace ptx
