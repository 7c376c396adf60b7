// Compiles the loops once per instruction set and picks the best that the machine has.
#include "instruction_set.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <atomic>
#include <limits>
#include <type_traits>

#if defined(__GNUC__) && defined(__x86_64__)
#define AMPFAST_X86
#include <immintrin.h>
#endif

namespace ampfast::cpu {

namespace baseline {
#include "loops.h"
}  // namespace baseline

#ifdef AMPFAST_X86

#define AMPFAST_F16C
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#include "loops.h"
}  // namespace avx2
#ifdef __clang__
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

// The instruction sets that this machine can run, best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> found = [] {
    std::vector<InstructionSet> sets{{"baseline", baseline::kLoops}};
#ifdef AMPFAST_X86
    if (__builtin_cpu_supports("avx2")) {  // no processor has it without F16C
      sets.insert(sets.begin(), {"avx2", avx2::kLoops});
    }
#endif
    return sets;
  }();
  return found;
}

std::atomic<const Loops*>& chosen() {
  static std::atomic<const Loops*> loops = instruction_sets().front().loops;
  return loops;
}

}  // namespace

const Loops& loops_for(Dtype dtype) { return chosen().load()[static_cast<int>(dtype)]; }

std::vector<std::string> capabilities() {
  std::vector<std::string> names;
  for (const InstructionSet& set : instruction_sets()) {
    names.emplace_back(set.name);
  }
  return names;
}

void set_capability(int64_t number) { chosen() = instruction_sets().at(number).loops; }

}  // namespace ampfast::cpu
