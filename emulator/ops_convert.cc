// cvt. Frequent conversions have handlers of their own; Conversion does all others.
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float_functions.h"
#include "number_format.h"
#include "ops_lanes.h"

namespace sonicmoe::emulator {
namespace {

// Frequent conversions.

template <class T>
struct Cast {
  template <class A>
  T operator()(A x) const {
    return static_cast<T>(x);
  }
};

struct Shorten {
  float operator()(double x) const { return floating::canonical(static_cast<float>(x)); }
};

struct Widen {
  template <class T>
  float operator()(T x) const {
    return widen(x);
  }
};

struct ToHalf {
  Half operator()(float x) const { return to_half(x); }
};

struct ToBrain {
  Brain operator()(float x) const { return to_brain(x); }
};

/// The result for a is the upper half.
struct ToHalves {
  std::uint32_t operator()(float a, float b) const {
    return static_cast<std::uint32_t>(to_half(a).bits) << 16 | to_half(b).bits;
  }
};

struct ToBrains {
  std::uint32_t operator()(float a, float b) const {
    return static_cast<std::uint32_t>(to_brain(a).bits) << 16 | to_brain(b).bits;
  }
};

template <std::uint8_t (*kToByte)(float)>
struct ToBytes {
  std::uint16_t operator()(float a, float b) const {
    return static_cast<std::uint16_t>(kToByte(a) << 8 | kToByte(b));
  }
};

template <Half (*kToHalf)(std::uint8_t)>
struct BytesToHalves {
  std::uint32_t operator()(std::uint16_t x) const {
    const std::uint32_t upper = kToHalf(static_cast<std::uint8_t>(x >> 8)).bits;
    return upper << 16 | kToHalf(static_cast<std::uint8_t>(x)).bits;
  }
};

/// A form for targets of so many bytes.
struct Frequent {
  Form form;
  int bytes = 0;
};

template <class Op, class Signature>
struct FrequentOf;
template <class Op, class R, class... A>
struct FrequentOf<Op, R(A...)> {
  static Frequent get() { return {form_of<Op, R(A...)>(), sizeof(R)}; }
};

const std::map<std::string_view, Frequent>& frequent_conversions() {
  using Bytes = std::uint16_t(float, float);
  using Words = std::uint32_t(float, float);
  static const std::map<std::string_view, Frequent> table{
      {"cvt.f32.f16", FrequentOf<Widen, float(Half)>::get()},
      {"cvt.f32.bf16", FrequentOf<Widen, float(Brain)>::get()},
      {"cvt.rn.f16.f32", FrequentOf<ToHalf, Half(float)>::get()},
      {"cvt.rn.bf16.f32", FrequentOf<ToBrain, Brain(float)>::get()},
      {"cvt.rn.f16x2.f32", FrequentOf<ToHalves, Words>::get()},
      {"cvt.rn.bf16x2.f32", FrequentOf<ToBrains, Words>::get()},
      {"cvt.rn.satfinite.e4m3x2.f32", FrequentOf<ToBytes<&to_e4m3>, Bytes>::get()},
      {"cvt.rn.satfinite.e5m2x2.f32", FrequentOf<ToBytes<&to_e5m2>, Bytes>::get()},
      {"cvt.rn.f16x2.e4m3x2",
       FrequentOf<BytesToHalves<&half_of_e4m3>, std::uint32_t(std::uint16_t)>::get()},
      {"cvt.rn.f16x2.e5m2x2",
       FrequentOf<BytesToHalves<&half_of_e5m2>, std::uint32_t(std::uint16_t)>::get()},
      {"cvt.f64.f32", FrequentOf<Cast<double>, double(float)>::get()},
      {"cvt.rn.f32.f64", FrequentOf<Shorten, float(double)>::get()},
      {"cvt.rn.f32.s32", FrequentOf<Cast<float>, float(std::int32_t)>::get()},
      {"cvt.rn.f32.u32", FrequentOf<Cast<float>, float(std::uint32_t)>::get()},
      {"cvt.rn.f64.s32", FrequentOf<Cast<double>, double(std::int32_t)>::get()},
      {"cvt.rn.f64.s64", FrequentOf<Cast<double>, double(std::int64_t)>::get()},
  };
  return table;
}

template <class To>
Form form_of_cast(std::string_view from) {
  if (from == "u8") return form_of<Cast<To>, To(std::uint8_t)>();
  if (from == "s8") return form_of<Cast<To>, To(std::int8_t)>();
  if (from == "u16") return form_of<Cast<To>, To(std::uint16_t)>();
  if (from == "s16") return form_of<Cast<To>, To(std::int16_t)>();
  if (from == "u32") return form_of<Cast<To>, To(std::uint32_t)>();
  if (from == "s32") return form_of<Cast<To>, To(std::int32_t)>();
  if (from == "u64") return form_of<Cast<To>, To(std::uint64_t)>();
  if (from == "s64") return form_of<Cast<To>, To(std::int64_t)>();
  return {};
}

/// Integers in registers as wide as their types.
Frequent find_cast(std::string_view to, std::string_view from) {
  if (to == "u8" || to == "s8") return {form_of_cast<std::uint8_t>(from), 1};
  if (to == "u16" || to == "s16") return {form_of_cast<std::uint16_t>(from), 2};
  if (to == "u32" || to == "s32") return {form_of_cast<std::uint32_t>(from), 4};
  if (to == "u64" || to == "s64") return {form_of_cast<std::uint64_t>(from), 8};
  return {};
}

Frequent find_frequent(const Statement& statement) {
  const auto found = frequent_conversions().find(statement.text());
  if (found != frequent_conversions().end()) return found->second;
  const std::vector<std::string>& parts = statement.parts;
  return parts.size() == 3 ? find_cast(parts[1], parts[2]) : Frequent();
}

// All conversions. `value` holds the Conversion, `detail` the bytes of the registers.

static_assert(sizeof(Conversion) == sizeof(std::int64_t));
static_assert(std::is_trivially_copyable_v<Conversion>);

constexpr int kTargetShift = 8;

/// A register of any width.
class Register {
 public:
  Register(Warp& warp, Slot slot, std::size_t bytes)
      : start_(warp.lanes_of<std::byte>(slot)), bytes_(bytes) {}

  std::uint64_t read(int lane) const {
    std::uint64_t bits = 0;
    std::memcpy(&bits, start_ + static_cast<std::size_t>(lane) * bytes_, bytes_);
    return bits;
  }
  void write(int lane, std::uint64_t bits) const {
    std::memcpy(start_ + static_cast<std::size_t>(lane) * bytes_, &bits, bytes_);
  }

 private:
  std::byte* start_;
  std::size_t bytes_;
};

Next run_convert(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const auto convert = std::bit_cast<Conversion>(instruction.value);
  const Register to(warp, instruction.slots[0], instruction.detail >> kTargetShift);
  const Register from(warp, instruction.slots[1], instruction.detail & 0xff);
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    to.write(lane, convert(from.read(lane)));
  }
  return Next::kAdvance;
}

/// d = {convert(a), convert(b)}, a above b. One source: both halves of it.
Next run_convert_pair(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const auto convert = std::bit_cast<Conversion>(instruction.value);
  const std::size_t source_bytes = instruction.detail & 0xff;
  const Register to(warp, instruction.slots[0], instruction.detail >> kTargetShift);
  const Register a(warp, instruction.slots[1], source_bytes);
  const bool is_single = instruction.slots[2] == kNoSlot;
  const Register b(warp, instruction.slots[is_single ? 1 : 2], source_bytes);
  const int from_bits = is_single ? format_at(convert.from).bits : 0;
  const int to_bits = format_at(convert.to).bits;
  const std::uint64_t mask = (std::uint64_t{1} << to_bits) - 1;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int lane = std::countr_zero(lanes);
    const std::uint64_t upper = convert(a.read(lane) >> from_bits) & mask;
    to.write(lane, upper << to_bits | (convert(b.read(lane)) & mask));
  }
  return Next::kAdvance;
}

/// Takes the modifiers of a conversion.
void take_modifiers(Modifiers& m, Conversion* conversion) {
  struct Mode {
    std::string_view name;
    Rounding rounding;
    bool to_whole;
  };
  static constexpr Mode kModes[] = {
      {"rn", Rounding::kNearest, false}, {"rz", Rounding::kZero, false},
      {"rm", Rounding::kDown, false},    {"rp", Rounding::kUp, false},
      {"rni", Rounding::kNearest, true}, {"rzi", Rounding::kZero, true},
      {"rmi", Rounding::kDown, true},    {"rpi", Rounding::kUp, true},
  };
  for (const Mode& mode : kModes) {
    if (!m.take(mode.name)) continue;
    conversion->rounding = mode.rounding;
    conversion->to_whole = mode.to_whole;
  }
  conversion->flush = m.take("ftz");
  conversion->saturate = m.take("sat");
  conversion->only_finite = m.take("satfinite");
  conversion->rectify = m.take("relu");
}

/// e4m3x2 to e4m3. False: the type is no pair.
bool take_pair(std::string* type) {
  if (!type->ends_with("x2")) return false;
  type->resize(type->size() - 2);
  return true;
}

int bytes_of_source(const Builder& builder, const Operand& operand, int bits) {
  return operand.kind == Operand::Kind::kRegister ? builder.width(operand) : (bits + 7) / 8;
}

void decode_any(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  std::string from = m.take_last();
  std::string to = m.take_last();
  const bool to_pair = take_pair(&to);
  const bool from_pair = take_pair(&from);
  const int from_format = find_format(from);
  const int to_format = find_format(to);
  Conversion conversion;
  take_modifiers(m, &conversion);
  const std::vector<Operand>& operands = statement.operands;
  const std::size_t sources = to_pair && !from_pair ? 2 : 1;
  if (from_format < 0 || to_format < 0 || !m.empty() || (from_pair && !to_pair) ||
      operands.size() != sources + 1) {
    return decode_unknown(statement, builder, instruction);
  }
  conversion.from = static_cast<std::uint8_t>(from_format);
  conversion.to = static_cast<std::uint8_t>(to_format);
  const int bits = format_at(from_format).bits * (from_pair ? 2 : 1);
  const int source_bytes = bytes_of_source(builder, operands[1], bits);
  const int target_bytes = builder.width(operands[0]);
  instruction->value = std::bit_cast<std::int64_t>(conversion);
  instruction->detail = static_cast<std::uint32_t>(target_bytes << kTargetShift | source_bytes);
  const Form form{
      to_pair ? &run_convert_pair : &run_convert, {source_bytes, source_bytes}, sources};
  place(form, statement, builder, instruction);
}

void decode_cvt(const Statement& statement, Builder& builder, Instruction* instruction) {
  const Frequent frequent = find_frequent(statement);
  const std::vector<Operand>& operands = statement.operands;
  const bool fits =
      frequent.form.run != nullptr && operands.size() == frequent.form.sources + 1 &&
      builder.width(operands[0]) == frequent.bytes &&
      bytes_of_source(builder, operands[1], 8 * frequent.form.bytes[0]) == frequent.form.bytes[0];
  if (!fits) return decode_any(statement, builder, instruction);
  place(frequent.form, statement, builder, instruction);
}

}  // namespace

void add_convert_opcodes(OpcodeTable& table) {
  table["cvt"] = &decode_cvt;
  add_move_opcodes(table);
}

}  // namespace sonicmoe::emulator
