// Compiles the loops once per instruction set and picks the best that the machine has.
#include "instruction_set.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "../element.h"

// AMPFAST_SCALAR is for tests of what compilers without vectors get.
#if defined(__GNUC__) && !defined(AMPFAST_SCALAR)
#define AMPFAST_REGISTER 16
#if defined(__x86_64__)
#define AMPFAST_X86
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#define AMPFAST_NEON
#include <arm_neon.h>
#endif
#define AMPFAST_INLINE __attribute__((always_inline)) inline
#define AMPFAST_VECTOR(bytes) __attribute__((vector_size(bytes)))
#define AMPFAST_CONVERT(value, type) __builtin_convertvector(value, type)
#else
#define AMPFAST_REGISTER 0
#define AMPFAST_INLINE inline
#define AMPFAST_VECTOR(bytes)
#define AMPFAST_CONVERT(value, type) static_cast<type>(value)
#endif

namespace ampfast::cpu {

// Elements as bits.
enum class Half : uint16_t {};
enum class BFloat16 : uint16_t {};

namespace baseline {
// clang-format off: the order
#include "vectors.h"
#include "loops.h"
}  // namespace baseline

#ifdef AMPFAST_X86

#define AMPFAST_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define AMPFAST_BEGIN(set) \
  AMPFAST_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define AMPFAST_END AMPFAST_PRAGMA(clang attribute pop)
#else
#define AMPFAST_BEGIN(set) AMPFAST_PRAGMA(GCC push_options) AMPFAST_PRAGMA(GCC target(set))
#define AMPFAST_END AMPFAST_PRAGMA(GCC pop_options)
#endif

#undef AMPFAST_REGISTER
#define AMPFAST_REGISTER 32
AMPFAST_BEGIN("avx2,f16c")
namespace avx2 {
#include "vectors.h"
#include "loops.h"
}  // namespace avx2
AMPFAST_END

#undef AMPFAST_REGISTER
#define AMPFAST_REGISTER 64
AMPFAST_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,bmi2")
namespace avx512 {
#include "vectors.h"
#include "loops.h"
}  // namespace avx512
AMPFAST_END
// clang-format on

#endif

namespace {

#ifdef AMPFAST_X86
// Older versions of clang know no "f16c" in __builtin_cpu_supports.
bool has_f16c() {
  unsigned int a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

struct InstructionSet {
  const char* name;
  const Loops* loops;
};

// The instruction sets that this machine can run, best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> found = [] {
#ifdef AMPFAST_NEON
    std::vector<InstructionSet> sets{{"neon", baseline::kLoops}};  // which every aarch64 has
#else
    std::vector<InstructionSet> sets{{"baseline", baseline::kLoops}};
#endif
#ifdef AMPFAST_X86
    if (__builtin_cpu_supports("avx2") && has_f16c()) {
      sets.insert(sets.begin(), {"avx2", avx2::kLoops});
    }
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2")) {
      sets.insert(sets.begin(), {"avx512", avx512::kLoops});
    }
#endif
    return sets;
  }();
  return found;
}

const InstructionSet* set_of(const std::string& name) {
  std::string known;
  for (const InstructionSet& set : instruction_sets()) {
    if (name == set.name) {
      return &set;
    }
    known += std::string(known.empty() ? "" : ", ") + set.name;
  }
  throw std::invalid_argument("this machine has no CPU capability '" + name +
                              "': AMPFAST_CPU_CAPABILITY may be " + known);
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> set = [] {
    const char* name = std::getenv("AMPFAST_CPU_CAPABILITY");
    return name != nullptr && *name != 0 ? set_of(name) : &instruction_sets().front();
  }();
  return set;
}

}  // namespace

const Loops& loops_for(Dtype dtype) { return chosen().load()->loops[static_cast<int>(dtype)]; }

std::string capability() { return chosen().load()->name; }

std::vector<std::string> capabilities() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets()) {
    names.emplace_back(set.name);
  }
  return names;
}

void set_capability(const std::string& name) { chosen() = set_of(name); }

}  // namespace ampfast::cpu
