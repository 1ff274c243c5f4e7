// Integer arithmetic, bits and shifts.
#include <cstdint>

#include "integer_functions.h"
#include "ops_lanes.h"

namespace sonicmoe::emulator {
namespace {

using namespace integer;

template <class Op>
Next run_predicate(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint32_t bits = Op()(warp.predicate(instruction.slots[1]));
  write_predicate(warp, instruction.slots[0], bits, lanes);
  return Next::kAdvance;
}

template <class Op>
Next run_predicates(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint32_t bits =
      Op()(warp.predicate(instruction.slots[1]), warp.predicate(instruction.slots[2]));
  write_predicate(warp, instruction.slots[0], bits, lanes);
  return Next::kAdvance;
}

/// Any function of three bits, by its table: bit 4 a + 2 b + c of `detail`.
Next run_lop3(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  std::uint32_t* const to = warp.lanes_of<std::uint32_t>(instruction.slots[0]);
  const std::uint32_t* const a = warp.lanes_of<std::uint32_t>(instruction.slots[1]);
  const std::uint32_t* const b = warp.lanes_of<std::uint32_t>(instruction.slots[2]);
  const std::uint32_t* const c = warp.lanes_of<std::uint32_t>(instruction.slots[3]);
  std::array<std::uint32_t, 8> rows;
  for (int i = 0; i < 8; ++i) rows[i] = (instruction.detail >> i & 1) != 0 ? ~0u : 0;
  for_lanes(lanes, [=](int lane) {
    const std::uint32_t x = a[lane], y = b[lane], z = c[lane];
    to[lane] = (~x & ((~y & ((~z & rows[0]) | (z & rows[1]))) |  //
                      (y & ((~z & rows[2]) | (z & rows[3]))))) |
               (x & ((~y & ((~z & rows[4]) | (z & rows[5]))) |  //
                     (y & ((~z & rows[6]) | (z & rows[7])))));
  });
  return Next::kAdvance;
}

void decode_lop3(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers modifiers(statement);
  const bool is_known = modifiers.take("b32") && modifiers.empty() &&
                        statement.operands.size() == 5 &&
                        statement.operands[4].kind == Operand::Kind::kInteger;
  if (!is_known) return decode_unknown(statement, builder, instruction);
  Statement without_table = statement;
  without_table.operands.pop_back();
  place(Sources<Ternary<std::uint32_t>>::form(for_host<&run_lop3>()), without_table, builder,
        instruction);
  instruction->detail = static_cast<std::uint32_t>(statement.operands[4].value);
}

template <class T>
using Shift = T(T, std::uint32_t);
template <class T>
using Extract = T(T, std::uint32_t, std::uint32_t);
template <class T>
using Insert = T(T, T, std::uint32_t, std::uint32_t);
template <class T>
using Count = std::uint32_t(T);
template <class T>
using Widening = Product<T>(T, T);
template <class T>
using WideningSum = Product<T>(T, T, Product<T>);

/// For operations that look at the sign.
template <class Op, template <class> class Signature>
Form form_of_32_or_64(std::string_view type) {
  if (type == "u32") return form_of<Op, Signature<std::uint32_t>>();
  if (type == "s32") return form_of<Op, Signature<std::int32_t>>();
  if (type == "u64") return form_of<Op, Signature<std::uint64_t>>();
  if (type == "s64") return form_of<Op, Signature<std::int64_t>>();
  return {};
}

template <class Op, template <class> class Signature>
Form form_of_16_or_32(std::string_view type) {
  if (type == "u16") return form_of<Op, Signature<std::uint16_t>>();
  if (type == "s16") return form_of<Op, Signature<std::int16_t>>();
  if (type == "u32") return form_of<Op, Signature<std::uint32_t>>();
  if (type == "s32") return form_of<Op, Signature<std::int32_t>>();
  return {};
}

template <class Op, template <class> class Signature>
Form form_of_integer(std::string_view type) {
  if (type.ends_with("16")) return form_of_16_or_32<Op, Signature>(type);
  return form_of_32_or_64<Op, Signature>(type);
}

/// For operations that give the same bits with and without a sign.
template <class Op, template <class> class Signature>
Form form_of_bits(std::string_view type) {
  if (type.size() != 3) return {};
  if (type.ends_with("16")) return form_of<Op, Signature<std::uint16_t>>();
  if (type.ends_with("32")) return form_of<Op, Signature<std::uint32_t>>();
  if (type.ends_with("64")) return form_of<Op, Signature<std::uint64_t>>();
  return {};
}

template <class Op>
Form form_of_pairs(std::string_view type) {
  if (type == "u16x2") return form_of<Pairs<Op, std::uint16_t>, Binary<std::uint32_t>>();
  if (type == "s16x2") return form_of<Pairs<Op, std::int16_t>, Binary<std::uint32_t>>();
  return {};
}

template <class Op, class Saturating>
Form find_sum(Modifiers& m) {
  const std::string type = m.take_last();
  if (type.ends_with("x2")) return form_of_pairs<Op>(type);
  if (type == "s32" && m.take("sat")) return form_of<Saturating, Binary<std::int32_t>>();
  return form_of_bits<Op, Binary>(type);
}

Form find_multiply(Modifiers& m) {
  const std::string type = m.take_last();
  if (m.take("wide")) return form_of_16_or_32<MultiplyWide, Widening>(type);
  if (m.take("hi")) return form_of_integer<MultiplyHigh, Binary>(type);
  return m.take("lo") ? form_of_bits<MultiplyLow, Binary>(type) : Form();
}

Form find_multiply_add(Modifiers& m) {
  const std::string type = m.take_last();
  if (m.take("wide")) return form_of_16_or_32<MultiplyAdd<MultiplyWide>, WideningSum>(type);
  if (m.take("hi")) return form_of_integer<MultiplyAdd<MultiplyHigh>, Ternary>(type);
  return m.take("lo") ? form_of_bits<MultiplyAdd<MultiplyLow>, Ternary>(type) : Form();
}

template <class Low, class High, template <class> class Signature>
Form find_24(Modifiers& m) {
  const bool is_low = m.take("lo");
  if (!is_low && !m.take("hi")) return {};
  const std::string type = m.take_last();
  if (type == "s32") {
    return is_low ? form_of<Low, Signature<std::int32_t>>()
                  : form_of<High, Signature<std::int32_t>>();
  }
  if (type != "u32") return {};
  return is_low ? form_of<Low, Signature<std::uint32_t>>()
                : form_of<High, Signature<std::uint32_t>>();
}

template <class Op, template <class> class Signature>
Form find_integer(Modifiers& m) {
  return form_of_integer<Op, Signature>(m.take_last());
}

/// abs and neg.
template <class Op>
Form find_signed(Modifiers& m) {
  return m.last().starts_with('s') ? form_of_integer<Op, Unary>(m.take_last()) : Form();
}

template <class Op>
Form find_extreme(Modifiers& m) {
  const std::string type = m.take_last();
  if (m.take("relu")) {
    if (type == "s32") return form_of<NotNegative<Op>, Binary<std::int32_t>>();
    return type == "s16x2" ? form_of_pairs<NotNegative<Op>>(type) : Form();
  }
  return type.ends_with("x2") ? form_of_pairs<Op>(type) : form_of_integer<Op, Binary>(type);
}

template <class Op>
Form find_bits(Modifiers& m) {
  const std::string type = m.take_last();
  if (type == "pred") return {&run_predicates<Op>, {}, 2};
  return form_of_bits<Op, Binary>(type);
}

Form find_not(Modifiers& m) {
  const std::string type = m.take_last();
  return type == "pred" ? Form{&run_predicate<Not>, {}, 1} : form_of_bits<Not, Unary>(type);
}

Form find_is_zero(Modifiers& m) { return form_of_bits<IsZero, Unary>(m.take_last()); }

Form find_shift_left(Modifiers& m) { return form_of_bits<ShiftLeft, Shift>(m.take_last()); }

Form find_shift_right(Modifiers& m) {
  const std::string type = m.take_last();
  if (type.starts_with('s')) return form_of_integer<ShiftRight, Shift>(type);
  return form_of_bits<ShiftRight, Shift>(type);
}

/// popc, clz, brev and bfi have types of 32 and 64 bits only.
template <class Op, template <class> class Signature>
Form find_b32_or_b64(Modifiers& m) {
  const std::string type = m.take_last();
  if (type == "b32") return form_of<Op, Signature<std::uint32_t>>();
  return type == "b64" ? form_of<Op, Signature<std::uint64_t>>() : Form();
}

Form find_extract(Modifiers& m) { return form_of_32_or_64<ExtractField, Extract>(m.take_last()); }

Form find_bit(Modifiers& m) {
  const std::string type = m.take_last();
  if (m.take("shiftamt")) return form_of_32_or_64<FindShift, Count>(type);
  return form_of_32_or_64<FindBit, Count>(type);
}

Form find_permute(Modifiers& m) {
  using Words = Ternary<std::uint32_t>;
  if (!m.take("b32")) return {};
  if (m.take("f4e")) return form_of<PermuteByMode<0x3210, 0x4321, 0x5432, 0x6543>, Words>();
  if (m.take("b4e")) return form_of<PermuteByMode<0x5670, 0x6701, 0x7012, 0x0123>, Words>();
  if (m.take("rc8")) return form_of<PermuteByMode<0x0000, 0x1111, 0x2222, 0x3333>, Words>();
  if (m.take("ecl")) return form_of<PermuteByMode<0x3210, 0x3211, 0x3222, 0x3333>, Words>();
  if (m.take("ecr")) return form_of<PermuteByMode<0x0000, 0x1110, 0x2210, 0x3210>, Words>();
  if (m.take("rc16")) return form_of<PermuteByMode<0x1010, 0x3232, 0x1010, 0x3232>, Words>();
  return form_of<Permute, Words>();
}

Form find_funnel(Modifiers& m) {
  using Words = Ternary<std::uint32_t>;
  if (!m.take("b32")) return {};
  const bool wraps = m.take("wrap");
  if (!wraps && !m.take("clamp")) return {};
  if (m.take("l")) {
    return wraps ? form_of<FunnelLeft<Wrap>, Words>() : form_of<FunnelLeft<Clamp>, Words>();
  }
  if (!m.take("r")) return {};
  return wraps ? form_of<FunnelRight<Wrap>, Words>() : form_of<FunnelRight<Clamp>, Words>();
}

}  // namespace

const FormTable& integer_forms() {
  static const FormTable table{
      {"add", &find_sum<Add, SaturatingAdd>},
      {"sub", &find_sum<Subtract, SaturatingSubtract>},
      {"mul", &find_multiply},
      {"mad", &find_multiply_add},
      {"mul24", &find_24<Multiply24Low, Multiply24High, Binary>},
      {"mad24", &find_24<MultiplyAdd<Multiply24Low>, MultiplyAdd<Multiply24High>, Ternary>},
      {"div", &find_integer<Divide, Binary>},
      {"rem", &find_integer<Remainder, Binary>},
      {"sad", &find_integer<SumOfDifferences, Ternary>},
      {"abs", &find_signed<Absolute>},
      {"neg", &find_signed<Negate>},
      {"min", &find_extreme<Minimum>},
      {"max", &find_extreme<Maximum>},
      {"and", &find_bits<And>},
      {"or", &find_bits<Or>},
      {"xor", &find_bits<Xor>},
      {"not", &find_not},
      {"cnot", &find_is_zero},
      {"shl", &find_shift_left},
      {"shr", &find_shift_right},
      {"bfe", &find_extract},
      {"bfi", &find_b32_or_b64<InsertField, Insert>},
      {"bfind", &find_bit},
      {"popc", &find_b32_or_b64<CountOnes, Count>},
      {"clz", &find_b32_or_b64<CountLeadingZeros, Count>},
      {"brev", &find_b32_or_b64<Reverse, Unary>},
      {"prmt", &find_permute},
      {"shf", &find_funnel},
  };
  return table;
}

bool is_float_type(std::string_view type) {
  return type == "f32" || type == "f64" || type == "f16" || type == "f16x2" || type == "bf16" ||
         type == "bf16x2";
}

void decode_arithmetic(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers modifiers(statement);
  const FormTable& table = is_float_type(modifiers.last()) ? float_forms() : integer_forms();
  const auto found = table.find(statement.opcode());
  const Form form = found == table.end() ? Form() : found->second(modifiers);
  if (!modifiers.empty()) return decode_unknown(statement, builder, instruction);
  place(form, statement, builder, instruction);
}

void add_integer_opcodes(OpcodeTable& table) {
  for (const auto& entry : integer_forms()) table[std::string(entry.first)] = &decode_arithmetic;
  table["lop3"] = &decode_lop3;
  add_compare_opcodes(table);
}

}  // namespace sonicmoe::emulator
