// The common parts of the arithmetic opcodes: handlers that apply a function object to each lane,
// and the search for the handler of a statement by its modifiers. Code that includes this file
// needs -ffp-contract=off: products and sums must not be fused.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "lanes.h"

namespace sonicmoe::emulator {

/// The handler of d = Op()(a, b, ...). Signature: R(A...), the types of the registers.
template <class Op, class Signature>
struct Elementwise;

template <class Op, class R, class... A>
struct Elementwise<Op, R(A...)> {
  static Next run(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
    return run_on(warp, instruction, lanes, std::index_sequence_for<A...>());
  }

 private:
  template <std::size_t... I>
  static Next run_on(Warp& warp, const Instruction& instruction, std::uint32_t lanes,
                     std::index_sequence<I...>) {
    R* const to = warp.lanes_of<R>(instruction.slots[0]);
    const std::tuple<const A*...> from{warp.lanes_of<A>(instruction.slots[I + 1])...};
    for_lanes(lanes, [=](int lane) { to[lane] = Op()(std::get<I>(from)[lane]...); });
    return Next::kAdvance;
  }
};

/// A handler with a target, slots[0], and the bytes of its sources, slots[1] and on. 0 bytes: a
/// predicate. Without a handler: no instruction has these modifiers.
struct Form {
  Handler run = nullptr;
  std::array<int, 4> bytes{};
  std::size_t sources = 0;
};

template <class Signature>
struct Sources;

template <class R, class... A>
struct Sources<R(A...)> {
  static Form form(Handler run) { return {run, {static_cast<int>(sizeof(A))...}, sizeof...(A)}; }
};

/// A handler compiled for hosts with AVX2 and FMA. Shifts by a register are vector code there, and
/// std::fma is an instruction, not a call.
template <Handler kRun>
__attribute__((target("avx2,fma"), flatten)) Next run_with_avx2(Warp& warp,
                                                                const Instruction& instruction,
                                                                std::uint32_t lanes) {
  return kRun(warp, instruction, lanes);
}

inline bool host_has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}

template <Handler kRun>
Handler for_host() {
  return host_has_avx2() ? &run_with_avx2<kRun> : kRun;
}

template <class Op, class Signature>
Form form_of() {
  return Sources<Signature>::form(for_host<&Elementwise<Op, Signature>::run>());
}

// Signatures.
template <class T>
using Unary = T(T);
template <class T>
using Binary = T(T, T);
template <class T>
using Ternary = T(T, T, T);

/// Op on both halves of a word.
template <class Op, class T>
struct Pairs {
  template <class... Words>
  std::uint32_t operator()(Words... words) const {
    const T low = Op()(std::bit_cast<T>(static_cast<std::uint16_t>(words))...);
    const T high = Op()(std::bit_cast<T>(static_cast<std::uint16_t>(words >> 16))...);
    return std::bit_cast<std::uint16_t>(low) |
           static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(high)) << 16;
  }
};

/// The parts of a statement after its opcode. A search takes out the parts that it knows, so
/// nothing is left if all parts are known.
class Modifiers {
 public:
  explicit Modifiers(const Statement& statement)
      : parts_(statement.parts.begin() + 1, statement.parts.end()) {}

  bool has(std::string_view part) const {
    return std::find(parts_.begin(), parts_.end(), part) != parts_.end();
  }
  bool take(std::string_view part) {
    const auto found = std::find(parts_.begin(), parts_.end(), part);
    if (found == parts_.end()) return false;
    parts_.erase(found);
    return true;
  }
  /// The last part, mostly the type; "" if there is none.
  std::string take_last() {
    if (parts_.empty()) return {};
    std::string last = std::move(parts_.back());
    parts_.pop_back();
    return last;
  }
  std::string_view last() const { return parts_.empty() ? std::string_view() : parts_.back(); }
  bool empty() const { return parts_.empty(); }

 private:
  std::vector<std::string> parts_;
};

/// Fills run and slots: a target, then the sources of the form.
inline void place(const Form& form, const Statement& statement, Builder& builder,
                  Instruction* instruction) {
  const std::vector<Operand>& operands = statement.operands;
  if (form.run == nullptr || operands.size() != form.sources + 1) {
    return decode_unknown(statement, builder, instruction);
  }
  instruction->slots[0] = builder.target(operands[0]);
  if (instruction->slots[0] == kNoSlot) return decode_unknown(statement, builder, instruction);
  for (std::size_t i = 0; i < form.sources; ++i) {
    instruction->slots[i + 1] = builder.source(operands[i + 1], form.bytes[i]);
  }
  instruction->run = form.run;
}

/// Searches for the form of an opcode and takes the modifiers that it knows.
using FindForm = Form (*)(Modifiers& modifiers);
using FormTable = std::map<std::string_view, FindForm>;
/// Opcodes whose last part is an integer type, or no type.
const FormTable& integer_forms();
/// Opcodes whose last part is a floating-point type. Some names are in both tables.
const FormTable& float_forms();
bool is_float_type(std::string_view type);

/// The decoder of all opcodes in these tables.
void decode_arithmetic(const Statement& statement, Builder& builder, Instruction* instruction);

/// set, setp, selp, slct, testp and isspacep.
void add_compare_opcodes(OpcodeTable& table);
/// mov and cvta.
void add_move_opcodes(OpcodeTable& table);

}  // namespace sonicmoe::emulator
