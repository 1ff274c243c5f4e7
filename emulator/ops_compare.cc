// Comparisons, and choices by their results.
#include <cstdint>
#include <cstring>
#include <functional>

#include "float_functions.h"
#include "ops_lanes.h"

namespace sonicmoe::emulator {
namespace {

using floating::widen;

/// How the result of a comparison is joined with a predicate: the low byte of `detail`.
enum class Join : std::uint32_t { kNone, kAnd, kOr, kXor };
/// In `detail`: the predicate is negated.
constexpr std::uint32_t kNegated = 0x100;

std::uint32_t join(std::uint32_t detail, std::uint32_t a, std::uint32_t b) {
  switch (static_cast<Join>(detail & 0xff)) {
    case Join::kAnd:
      return a & b;
    case Join::kOr:
      return a | b;
    case Join::kXor:
      return a ^ b;
    default:
      return a;
  }
}

/// A bit for each byte, which is 0 or 1.
std::uint32_t pack(const std::uint8_t (&flags)[kLanes]) {
  std::uint32_t bits = 0;
  for (int i = 0; i < kLanes; i += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, flags + i, sizeof eight);
    // Byte j of the eight comes to bit 56 + j.
    bits |= static_cast<std::uint32_t>(eight * 0x0102'0408'1020'4080 >> 56) << i;
  }
  return bits;
}

/// Test()(a, b) of each lane, where slots[2] and slots[3] hold a and b.
template <class Test, class T>
std::uint32_t compare(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const T* const a = warp.lanes_of<T>(instruction.slots[2]);
  const T* const b = warp.lanes_of<T>(instruction.slots[3]);
  std::uint8_t flags[kLanes] = {};
  for_lanes(lanes, [&flags, a, b](int lane) { flags[lane] = Test()(a[lane], b[lane]); });
  return pack(flags);
}

/// The predicate that a comparison is joined with: slots[4].
std::uint32_t joined_predicate(Warp& warp, const Instruction& instruction) {
  if (instruction.slots[4] == kNoSlot) return 0;
  const std::uint32_t bits = warp.predicate(instruction.slots[4]);
  return (instruction.detail & kNegated) != 0 ? ~bits : bits;
}

/// setp. slots[0] gets the result, slots[1] that of the opposite comparison.
template <class Test, class T>
Next run_setp(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint32_t bits = compare<Test, T>(warp, instruction, lanes);
  const std::uint32_t other = joined_predicate(warp, instruction);
  write_predicate(warp, instruction.slots[0], join(instruction.detail, bits, other), lanes);
  write_predicate(warp, instruction.slots[1], join(instruction.detail, ~bits, other), lanes);
  return Next::kAdvance;
}

/// set. slots[0] gets `value` or zero.
template <class Test, class T>
Next run_set(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint32_t bits = join(instruction.detail, compare<Test, T>(warp, instruction, lanes),
                                  joined_predicate(warp, instruction));
  std::uint32_t* const to = warp.lanes_of<std::uint32_t>(instruction.slots[0]);
  const auto value = static_cast<std::uint32_t>(instruction.value);
  for_lanes(lanes, [=](int lane) { to[lane] = (bits >> lane & 1) != 0 ? value : 0; });
  return Next::kAdvance;
}

/// The handlers of a comparison of two values with so many bytes.
struct Comparison {
  Handler setp = nullptr;
  Handler set = nullptr;
  int bytes = 0;
};

template <class Test, class T>
Comparison comparison_of() {
  return {for_host<&run_setp<Test, T>>(), &run_set<Test, T>, sizeof(T)};
}

// Tests.

template <class Test>
struct Not {
  template <class T>
  bool operator()(T a, T b) const {
    return !Test()(a, b);
  }
};

struct LessOrGreater {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};

struct AreNumbers {
  template <class T>
  bool operator()(T a, T b) const {
    return a == a && b == b;
  }
};

template <class Test>
struct Widened {
  template <class T>
  bool operator()(T a, T b) const {
    return Test()(widen(a), widen(b));
  }
};

template <class Test>
struct Flushed {
  template <class T>
  bool operator()(T a, T b) const {
    return Widened<Test>()(floating::flush_subnormal(a), floating::flush_subnormal(b));
  }
};

using FindComparison = Comparison (*)(std::string_view type, Modifiers& modifiers);

template <class Test>
Comparison find_integer(std::string_view type, Modifiers&) {
  const bool has_sign = type.starts_with('s');
  if (type.ends_with("16")) {
    return has_sign ? comparison_of<Test, std::int16_t>() : comparison_of<Test, std::uint16_t>();
  }
  if (type.ends_with("32")) {
    return has_sign ? comparison_of<Test, std::int32_t>() : comparison_of<Test, std::uint32_t>();
  }
  if (!type.ends_with("64")) return {};
  return has_sign ? comparison_of<Test, std::int64_t>() : comparison_of<Test, std::uint64_t>();
}

template <class Test>
Comparison find_float(std::string_view type, Modifiers& m) {
  const bool flushes = (type == "f32" || type == "f16") && m.take("ftz");
  if (type == "f32") {
    return flushes ? comparison_of<Flushed<Test>, float>() : comparison_of<Widened<Test>, float>();
  }
  if (type == "f16") {
    return flushes ? comparison_of<Flushed<Test>, Half>() : comparison_of<Widened<Test>, Half>();
  }
  if (type == "bf16") return comparison_of<Widened<Test>, Brain>();
  return type == "f64" ? comparison_of<Widened<Test>, double>() : Comparison();
}

using TestTable = std::map<std::string_view, FindComparison>;

const TestTable& integer_tests() {
  static const TestTable table{
      {"eq", &find_integer<std::equal_to<>>}, {"ne", &find_integer<std::not_equal_to<>>},
      {"lt", &find_integer<std::less<>>},     {"le", &find_integer<std::less_equal<>>},
      {"gt", &find_integer<std::greater<>>},  {"ge", &find_integer<std::greater_equal<>>},
      {"lo", &find_integer<std::less<>>},     {"ls", &find_integer<std::less_equal<>>},
      {"hi", &find_integer<std::greater<>>},  {"hs", &find_integer<std::greater_equal<>>},
  };
  return table;
}

/// If an operand is NaN, tests with the suffix u are true, and tests without it false, also ne.
const TestTable& float_tests() {
  static const TestTable table{
      {"eq", &find_float<std::equal_to<>>},
      {"ne", &find_float<LessOrGreater>},
      {"lt", &find_float<std::less<>>},
      {"le", &find_float<std::less_equal<>>},
      {"gt", &find_float<std::greater<>>},
      {"ge", &find_float<std::greater_equal<>>},
      {"equ", &find_float<Not<LessOrGreater>>},
      {"neu", &find_float<std::not_equal_to<>>},
      {"ltu", &find_float<Not<std::greater_equal<>>>},
      {"leu", &find_float<Not<std::greater<>>>},
      {"gtu", &find_float<Not<std::less_equal<>>>},
      {"geu", &find_float<Not<std::less<>>>},
      {"num", &find_float<AreNumbers>},
      {"nan", &find_float<Not<AreNumbers>>},
  };
  return table;
}

/// Takes the test; without a comparison if it is not known.
Comparison find_comparison(std::string_view type, Modifiers& m) {
  for (const auto& [name, find] : is_float_type(type) ? float_tests() : integer_tests()) {
    if (m.take(name)) return find(type, m);
  }
  return {};
}

Join take_join(Modifiers& m) {
  if (m.take("and")) return Join::kAnd;
  if (m.take("or")) return Join::kOr;
  return m.take("xor") ? Join::kXor : Join::kNone;
}

/// The sources of setp and set: a, b and, where results are joined, a predicate. False: it is not
/// there.
bool place_compared(const Statement& statement, int bytes, Builder& builder,
                    Instruction* instruction) {
  const std::vector<Operand>& operands = statement.operands;
  const bool joins = instruction->detail != 0;
  if (operands.size() != (joins ? 4u : 3u)) return false;
  instruction->slots[2] = builder.source(operands[1], bytes);
  instruction->slots[3] = builder.source(operands[2], bytes);
  if (!joins) return true;
  instruction->slots[4] = builder.source(operands[3], 0);
  if (operands[3].negated) instruction->detail |= kNegated;
  return true;
}

void decode_setp(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string type = m.take_last();
  const Comparison comparison = find_comparison(type, m);
  instruction->detail = static_cast<std::uint32_t>(take_join(m));
  if (comparison.setp == nullptr || !m.empty() ||
      !place_compared(statement, comparison.bytes, builder, instruction)) {
    return decode_unknown(statement, builder, instruction);
  }
  const Operand& target = statement.operands[0];
  const bool is_pair = target.kind == Operand::Kind::kPair;
  instruction->slots[0] = builder.target(is_pair ? target.elements[0] : target);
  if (is_pair) instruction->slots[1] = builder.target(target.elements[1]);
  instruction->run = comparison.setp;
}

void decode_set(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string type = m.take_last();
  const std::string result = m.take_last();
  const Comparison comparison = find_comparison(type, m);
  const bool is_known = result == "u32" || result == "s32" || result == "f32";
  instruction->detail = static_cast<std::uint32_t>(take_join(m));
  if (comparison.set == nullptr || !is_known || !m.empty() ||
      !place_compared(statement, comparison.bytes, builder, instruction)) {
    return decode_unknown(statement, builder, instruction);
  }
  instruction->slots[0] = builder.target(statement.operands[0]);
  instruction->value = result == "f32" ? std::bit_cast<std::uint32_t>(1.0f) : ~0u;
  instruction->run = comparison.set;
}

/// selp: slots[1] where the predicate slots[3] holds, else slots[2].
template <class T>
Next run_selp(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  T* const to = warp.lanes_of<T>(instruction.slots[0]);
  const T* const a = warp.lanes_of<T>(instruction.slots[1]);
  const T* const b = warp.lanes_of<T>(instruction.slots[2]);
  using Word = std::common_type_t<T, std::uint32_t>;  // as wide as T, for vector code
  const Word bits = warp.predicate(instruction.slots[3]);
  for_lanes(lanes, [=](int lane) { to[lane] = (bits >> lane & 1) != 0 ? a[lane] : b[lane]; });
  return Next::kAdvance;
}

void decode_selp(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string type = m.take_last();
  Form form;
  if (type.ends_with("16")) form = {for_host<&run_selp<std::uint16_t>>(), {2, 2, 0}, 3};
  if (type.ends_with("32")) form = {for_host<&run_selp<std::uint32_t>>(), {4, 4, 0}, 3};
  if (type.ends_with("64")) form = {for_host<&run_selp<std::uint64_t>>(), {8, 8, 0}, 3};
  if (!m.empty()) return decode_unknown(statement, builder, instruction);
  place(form, statement, builder, instruction);
}

struct SelectBySign {
  template <class T, class C>
  T operator()(T a, T b, C c) const {
    return c >= 0 ? a : b;
  }
};

struct SelectBySignFlushed {
  template <class T>
  T operator()(T a, T b, float c) const {
    return floating::flush_subnormal(c) >= 0 ? a : b;
  }
};

template <class T>
Form find_slct(std::string_view compared, Modifiers& m) {
  if (compared == "s32") return form_of<SelectBySign, T(T, T, std::int32_t)>();
  if (compared != "f32") return {};
  return m.take("ftz") ? form_of<SelectBySignFlushed, T(T, T, float)>()
                       : form_of<SelectBySign, T(T, T, float)>();
}

void decode_slct(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string compared = m.take_last();
  const std::string type = m.take_last();
  Form form;
  if (type.ends_with("16")) form = find_slct<std::uint16_t>(compared, m);
  if (type.ends_with("32")) form = find_slct<std::uint32_t>(compared, m);
  if (type.ends_with("64")) form = find_slct<std::uint64_t>(compared, m);
  if (!m.empty()) return decode_unknown(statement, builder, instruction);
  place(form, statement, builder, instruction);
}

// testp is run as a comparison of a value with itself.

struct IsFinite {
  template <class T>
  bool operator()(T x, T) const {
    return floating::magnitude_of(x) < floating::kExponent<T>;
  }
};

struct IsInfinite {
  template <class T>
  bool operator()(T x, T) const {
    return floating::magnitude_of(x) == floating::kExponent<T>;
  }
};

struct IsNumber {
  template <class T>
  bool operator()(T x, T) const {
    return !floating::is_nan(x);
  }
};

struct IsSubnormal {
  template <class T>
  bool operator()(T x, T) const {
    return floating::magnitude_of(x) != 0 && (floating::bits_of(x) & floating::kExponent<T>) == 0;
  }
};

/// Zero is a normal number here.
struct IsNormal {
  template <class T>
  bool operator()(T x, T) const {
    return IsFinite()(x, x) && !IsSubnormal()(x, x);
  }
};

template <class Test>
Handler find_testp(std::string_view type) {
  if (type == "f32") return for_host<&run_setp<Test, float>>();
  return type == "f64" ? for_host<&run_setp<Test, double>>() : nullptr;
}

Handler find_testp(std::string_view type, Modifiers& m) {
  if (m.take("finite")) return find_testp<IsFinite>(type);
  if (m.take("infinite")) return find_testp<IsInfinite>(type);
  if (m.take("number")) return find_testp<IsNumber>(type);
  if (m.take("notanumber")) return find_testp<Not<IsNumber>>(type);
  if (m.take("normal")) return find_testp<IsNormal>(type);
  return m.take("subnormal") ? find_testp<IsSubnormal>(type) : nullptr;
}

void decode_testp(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string type = m.take_last();
  const Handler run = find_testp(type, m);
  if (run == nullptr || !m.empty() || statement.operands.size() != 2) {
    return decode_unknown(statement, builder, instruction);
  }
  instruction->slots[0] = builder.target(statement.operands[0]);
  instruction->slots[2] = builder.source(statement.operands[1], type == "f32" ? 4 : 8);
  instruction->slots[3] = instruction->slots[2];
  instruction->run = run;
}

/// The CTA that a shared address names. Zero: the CTA that runs; else a rank + 1.
std::uint64_t owner_of(std::uint64_t address) { return (address & ~kWindowMask) >> kRankShift; }

// Tests of isspacep.

bool is_global(Warp&, std::uint64_t address) {
  const std::uint64_t window = address & kWindowMask;
  return window != kSharedWindow && window != kLocalWindow;
}
bool is_local(Warp&, std::uint64_t address) { return (address & kWindowMask) == kLocalWindow; }
bool is_shared(Warp&, std::uint64_t address) { return (address & kWindowMask) == kSharedWindow; }
bool is_own_shared(Warp& warp, std::uint64_t address) {
  const std::uint64_t owner = owner_of(address);
  return is_shared(warp, address) && (owner == 0 || owner == warp.cta().rank() + 1);
}

template <bool (*kTest)(Warp&, std::uint64_t)>
Next run_isspacep(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint64_t* const addresses = warp.lanes_of<std::uint64_t>(instruction.slots[1]);
  std::uint8_t flags[kLanes] = {};
  for_lanes(lanes, [&](int lane) { flags[lane] = kTest(warp, addresses[lane]); });
  write_predicate(warp, instruction.slots[0], pack(flags), lanes);
  return Next::kAdvance;
}

void decode_isspacep(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string space = m.take_last();
  Form form{nullptr, {8}, 1};
  if (space == "global") form.run = &run_isspacep<&is_global>;
  if (space == "local") form.run = &run_isspacep<&is_local>;
  if (space == "shared" || space == "shared::cta") form.run = &run_isspacep<&is_own_shared>;
  if (space == "shared::cluster") form.run = &run_isspacep<&is_shared>;
  if (!m.empty()) return decode_unknown(statement, builder, instruction);
  place(form, statement, builder, instruction);
}

}  // namespace

void add_compare_opcodes(OpcodeTable& table) {
  table["setp"] = &decode_setp;
  table["set"] = &decode_set;
  table["selp"] = &decode_selp;
  table["slct"] = &decode_slct;
  table["testp"] = &decode_testp;
  table["isspacep"] = &decode_isspacep;
}

}  // namespace sonicmoe::emulator
