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

// The best that this machine can run.
const Loops* best() {
#ifdef AMPFAST_X86
  if (__builtin_cpu_supports("avx2")) {  // no processor has it without F16C
    return avx2::kLoops;
  }
#endif
  return baseline::kLoops;
}

std::atomic<const Loops*> chosen = best();

}  // namespace

const Loops& loops_for(Dtype dtype) { return chosen.load()[static_cast<int>(dtype)]; }

std::string capability() { return best() == baseline::kLoops ? "baseline" : "avx2"; }

void use_baseline(bool uses) { chosen = uses ? baseline::kLoops : best(); }

}  // namespace ampfast::cpu
