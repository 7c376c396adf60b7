// Parses a listing of instructions, one per line, from assembler.py.
#pragma once

#include <map>
#include <sstream>
#include <string>

#include "instruction.h"

namespace ptx {

template <class T>
T named(const std::map<std::string, T>& names, const std::string& name) {
  const auto found = names.find(name);
  if (found == names.end()) {
    throw Error{"unsupported `" + name + "`", true};
  }
  return found->second;
}

inline Op op_of(const std::string& name) {
  static const std::map<std::string, Op> names{
      {"abs", Op::kAbs},     {"add", Op::kAdd},     {"and", Op::kAnd},   {"atom", Op::kAtom},
      {"bar", Op::kBar},     {"bfe", Op::kBfe},     {"bra", Op::kBra},   {"cvt", Op::kCvt},
      {"div", Op::kDiv},     {"fence", Op::kFence}, {"fma", Op::kFma},   {"inc", Op::kInc},
      {"ld", Op::kLd},       {"mad", Op::kMad},     {"max", Op::kMax},   {"min", Op::kMin},
      {"mov", Op::kMov},     {"mul", Op::kMul},     {"neg", Op::kNeg},   {"not", Op::kNot},
      {"or", Op::kOr},       {"popc", Op::kPopc},   {"prmt", Op::kPrmt}, {"ret", Op::kRet},
      {"redux", Op::kRedux}, {"rem", Op::kRem},     {"selp", Op::kSelp}, {"setp", Op::kSetp},
      {"shfl", Op::kShfl},   {"shl", Op::kShl},     {"shr", Op::kShr},   {"sqrt", Op::kSqrt},
      {"st", Op::kSt},       {"sub", Op::kSub},     {"xor", Op::kXor},
  };
  return named(names, name);
}

inline Compare compare_of(const std::string& name) {
  static const std::map<std::string, Compare> names{
      {"eq", Compare::kEqual},  {"ne", Compare::kNotEqual}, {"lt", Compare::kLess},
      {"le", Compare::kAtMost}, {"gt", Compare::kGreater},  {"ge", Compare::kAtLeast},
      {"nan", Compare::kNan},
  };
  return named(names, name);
}

inline Space space_of(const std::string& name) {
  static const std::map<std::string, Space> names{
      {"global", Space::kGlobal}, {"shared", Space::kShared}, {"param", Space::kParameters}};
  return named(names, name);
}

// "s64", "f16x2", "pred".
inline Type type_of(const std::string& name) {
  static const std::map<std::string, Kind> kinds{{"b", Kind::kBits},
                                                 {"u", Kind::kUnsigned},
                                                 {"s", Kind::kSigned},
                                                 {"f", Kind::kFloat},
                                                 {"bf", Kind::kBFloat}};
  if (name == "pred") {
    return {Kind::kPredicate, 1, false};
  }
  const size_t digits = name.find_first_of("0123456789");
  const size_t pair = name.find("x2");
  const Type type{named(kinds, name.substr(0, digits)), std::stoi(name.substr(digits)),
                  pair != std::string::npos};
  if (type.bits > 64) {
    throw Error{"unsupported `" + name + "`", true};
  }
  return type;
}

// "r12" is a register, "n-1" a number, "s0" a special register, "_" nothing.
inline Operand operand_of(const std::string& name) {
  static const std::map<std::string, Place> places{{"r", Place::kRegister},
                                                   {"n", Place::kNumber},
                                                   {"s", Place::kSpecial},
                                                   {"_", Place::kNowhere}};
  return {named(places, name.substr(0, 1)), name == "_" ? 0 : std::stoll(name.substr(1))};
}

inline std::vector<Operand> operands_of(const std::string& names) {
  std::vector<Operand> operands;
  std::istringstream stream(names);
  for (std::string name; std::getline(stream, name, ',');) {
    operands.push_back(operand_of(name));
  }
  return operands;
}

inline Instruction instruction_of(const std::string& line) {
  Instruction in;
  std::istringstream stream(line);
  for (std::string field; std::getline(stream, field, '\t');) {
    const size_t equals = field.find('=');
    const std::string key = field.substr(0, equals);
    const std::string value = field.substr(equals + 1);
    if (key == "op") {
      in.does.op = op_of(value);
    } else if (key == "type") {
      in.does.type = type_of(value);
    } else if (key == "source") {
      in.does.source = type_of(value);
    } else if (key == "compare") {
      in.does.compare = compare_of(value);
    } else if (key == "or_unordered") {
      in.does.or_unordered = true;
    } else if (key == "part") {
      in.does.is_wide = value == "wide";
      in.does.is_high = value == "hi";
    } else if (key == "combine") {
      in.combine = op_of(value);
    } else if (key == "ordered") {
      in.is_ordered = true;
    } else if (key == "butterfly") {
      in.is_butterfly = true;
    } else if (key == "space") {
      in.space = space_of(value);
    } else if (key == "if" || key == "unless") {
      in.predicate = operand_of(value).value;
      in.runs_if = key == "if";
    } else if (key == "base") {
      in.base = operand_of(value);
    } else if (key == "offset") {
      in.offset = std::stoll(value);
    } else if (key == "target") {
      in.target = std::stoll(value);
    } else if (key == "to") {
      in.to = operands_of(value);
    } else if (key == "from") {
      in.from = operands_of(value);
    } else if (key == "text") {
      in.text = value;
    } else {
      throw Error{"unsupported `" + field + "`", true};
    }
  }
  return in;
}

inline Kernel kernel_of(const std::string& listing) {
  Kernel kernel;
  std::istringstream stream(listing);
  stream >> kernel.registers >> kernel.shared_bytes >> std::ws;
  for (std::string line; std::getline(stream, line);) {
    kernel.instructions.push_back(instruction_of(line));
  }
  return kernel;
}

}  // namespace ptx
