// PTX text as a tree: functions, their variables and their instructions, with names as written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sonicmoe::emulator {

/// An operand as it is written.
struct Operand {
  enum class Kind {
    kRegister,   ///< %r1, !%p1 (negated), and every other name that .reg declares
    kSpecial,    ///< %tid.x
    kInteger,    ///< value
    kFloat,      ///< 0f3F800000 or 0d...: value holds the bits, `bytes` their number
    kSymbol,     ///< a parameter, a variable or a label
    kAddress,    ///< [elements[0] + value]; elements[1] if there, the coordinates of a tensor
    kVector,     ///< {a, b, ...}: elements
    kPair,       ///< %r1|%p1: elements
    kDiscarded,  ///< _
  };
  Kind kind = Kind::kDiscarded;
  std::string name;  ///< unique in its function: registers of inner scopes are renamed
  std::int64_t value = 0;
  int bytes = 0;
  bool negated = false;
  std::vector<Operand> elements;
};

/// One instruction. `add.rn.f32` has the parts add, rn and f32.
struct Statement {
  std::vector<std::string> parts;
  std::vector<Operand> operands;
  Operand guard;  ///< kDiscarded if there is none
  int line = 0;   ///< in the text of the module

  const std::string& opcode() const { return parts[0]; }
  /// Whether a part after the first is `part`.
  bool has(std::string_view part) const;
  /// Makes it an instruction without an effect. A wait for an mbarrier succeeds at once.
  void leave_out();
  std::string text() const;  ///< the opcode with its parts, for messages
};

struct Variable {
  std::string name;
  std::string space;       ///< param, shared, local, global or const
  std::int64_t bytes = 0;  ///< 0: dynamic shared memory
  std::int64_t alignment = 1;
  std::vector<std::uint8_t> initial;  ///< empty: zeros
};

struct Function {
  std::string name;
  std::vector<Variable> parameters;
  std::vector<Variable> variables;  ///< of its body
  /// Type of each: pred, b16, b32, b64, f32...
  std::map<std::string, std::string, std::less<>> registers;
  std::map<std::string, std::size_t> labels;  ///< index of the statement that follows
  std::vector<Statement> statements;
  std::int64_t most_threads = 0;  ///< of a CTA, by .maxntid or .reqntid; 0: any
};

/// A kernel in the text of its module.
struct KernelText {
  std::string_view name;
  std::string_view text;  ///< from its name to the end of its body
  int line = 1;           ///< of its name, in the text of the module
};

/// Refers to the text that it was read from.
struct Module {
  std::vector<KernelText> kernels;
  std::vector<Variable> variables;  ///< outside of functions
};

/// Reads all but the bodies of kernels, because most kernels of a text are never launched. Throws
/// std::runtime_error with the line that it does not understand.
Module parse_module(std::string_view text);
/// Reads a kernel of the module. Throws as parse_module() does.
Function parse_kernel(const Module& module, const KernelText& kernel);

}  // namespace sonicmoe::emulator
