// PTX instructions that the emulator supports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ptx {

struct Error {
  std::string text;
  bool is_unsupported = false;  // else an illegal operation
};

enum class Kind { kNone, kPredicate, kBits, kUnsigned, kSigned, kFloat, kBFloat };

struct Type {
  Kind kind = Kind::kNone;
  int bits = 0;
  bool is_pair = false;  // two of them in one register
};

enum class Op {
  kAbs,
  kAdd,
  kAnd,
  kAtom,
  kBar,
  kBfe,
  kBra,
  kCvt,
  kDiv,
  kFence,
  kFma,
  kInc,
  kLd,
  kMad,
  kMax,
  kMin,
  kMov,
  kMul,
  kNeg,
  kNot,
  kOr,
  kPopc,
  kPrmt,
  kRedux,
  kRem,
  kRet,
  kSelp,
  kSetp,
  kShfl,
  kShl,
  kShr,
  kSqrt,
  kSt,
  kSub,
  kXor,
};

enum class Compare { kEqual, kNotEqual, kLess, kAtMost, kGreater, kAtLeast, kNan };

// Arithmetic operations.
struct Operation {
  Op op = Op::kRet;
  Type type;
  Type source;  // of a conversion
  Compare compare = Compare::kEqual;
  bool or_unordered = false;  // the comparison also holds where an operand is NaN
  bool is_wide = false;       // the result has twice the bits
  bool is_high = false;       // the upper half of a product
};

enum class Space { kNone, kGlobal, kShared, kParameters };

enum class Place { kNowhere, kRegister, kNumber, kSpecial };

struct Operand {
  Place place = Place::kNowhere;
  int64_t value = 0;  // a register's number, the number itself, or a special register's index
};

struct Instruction {
  Operation does;
  Op combine = Op::kAdd;      // of atomics and of reductions over a warp
  bool is_ordered = false;    // an atomic that acquires and releases
  bool is_butterfly = false;  // a shuffle by the lanes' exclusive or, else from a lane
  Space space = Space::kNone;
  int64_t predicate = -1;  // a register, or none
  bool runs_if = true;     // what that must hold
  Operand base;            // of an address
  int64_t offset = 0;      // of an address
  int64_t target = 0;      // of a branch
  std::vector<Operand> to;
  std::vector<Operand> from;
  std::string text;  // as it was written
};

struct Kernel {
  int64_t registers = 0;
  int64_t shared_bytes = 0;
  std::vector<Instruction> instructions;
};

}  // namespace ptx
