// The 16-bit floating point types as bits, converted to and from float without depending on
// hardware.
#pragma once

#include "../element.h"

namespace ampfast::cpu {

struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

inline float widen(BFloat16 value) {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Rounds to nearest, ties to even.
inline BFloat16 narrow(float value, BFloat16 /*tag*/) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(nan ? 0x7fc0 : rounded)};
}

// Subnormals are made by arithmetic on normal floats, so that a flush-to-zero mode cannot lose
// them.
inline float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(0x3f000000 | magnitude) - 0.5f);
  const uint32_t normal = (magnitude << 13) + 0x38000000;
  const uint32_t special = (magnitude << 13) | 0x7f800000;
  const uint32_t finite = magnitude < 0x400 ? subnormal : normal;
  return bits_as<float>(sign | (magnitude < 0x7c00 ? finite : special));
}

// Rounds to nearest, ties to even.
inline Half narrow(float value, Half /*tag*/) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // 0.5 has the unit in the last place of a subnormal half, so the addition rounds.
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude < 0x477ff000 ? finite : special))};
}

}  // namespace ampfast::cpu
