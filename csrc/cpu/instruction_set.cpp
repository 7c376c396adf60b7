// Compiles the loops once per instruction set and picks the best that the machine has.
#include "instruction_set.h"

#include <atomic>
#include <stdexcept>
#include <type_traits>

#include "../element.h"
#include "../track.h"
#include "half.h"

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define AMPFAST_HAS_AVX2
#include <immintrin.h>
#endif

namespace ampfast::cpu {

namespace baseline {
#include "loops.h"
}  // namespace baseline

#ifdef AMPFAST_HAS_AVX2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define AMPFAST_AVX2
namespace avx2 {
#include "loops.h"
}  // namespace avx2
#undef AMPFAST_AVX2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

struct InstructionSet {
  const char* name;
  const Loops* loops;
};

// What this machine can run, best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> found = [] {
    std::vector<InstructionSet> sets{{"baseline", baseline::kLoops}};
#ifdef AMPFAST_HAS_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
      sets.insert(sets.begin(), {"avx2", avx2::kLoops});
    }
#endif
    return sets;
  }();
  return found;
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> set{&instruction_sets().front()};
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

void set_capability(const std::string& name) {
  for (const InstructionSet& set : instruction_sets()) {
    if (name == set.name) {
      chosen() = &set;
      return;
    }
  }
  throw std::invalid_argument("this machine has no CPU capability '" + name + "'");
}

}  // namespace ampfast::cpu
