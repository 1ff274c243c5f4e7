// mov and cvta.
#include <chrono>
#include <cstdint>
#include <cstring>

#include "ops_lanes.h"

namespace sonicmoe::emulator {
namespace {

struct Identity {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};

Next run_move_predicate(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const std::uint32_t bits = warp.predicate(instruction.slots[1]);
  write_predicate(warp, instruction.slots[0], bits, lanes);
  return Next::kAdvance;
}

template <class Wide, class Narrow>
constexpr std::size_t kParts = sizeof(Wide) / sizeof(Narrow);
constexpr std::size_t kMostParts = 4;

/// slots[0] = {slots[1], slots[2], ...}, the first one in the low bits.
template <class Wide, class Narrow>
Next run_pack(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  Wide* const to = warp.lanes_of<Wide>(instruction.slots[0]);
  std::array<const Narrow*, kParts<Wide, Narrow>> from;
  for (std::size_t i = 0; i < from.size(); ++i) {
    from[i] = warp.lanes_of<Narrow>(instruction.slots[i + 1]);
  }
  for_lanes(lanes, [=](int lane) {
    Wide whole = 0;
    for (std::size_t i = 0; i < from.size(); ++i) {
      whole |= static_cast<Wide>(from[i][lane]) << (8 * sizeof(Narrow) * i);
    }
    to[lane] = whole;
  });
  return Next::kAdvance;
}

/// {slots[0], slots[1], ...} = slots[kMostParts]. Targets without a slot are discarded.
template <class Wide, class Narrow>
Next run_unpack(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const Wide* const from = warp.lanes_of<Wide>(instruction.slots[kMostParts]);
  for (std::size_t i = 0; i < kParts<Wide, Narrow>; ++i) {
    if (instruction.slots[i] == kNoSlot) continue;
    Narrow* const to = warp.lanes_of<Narrow>(instruction.slots[i]);
    const int shift = static_cast<int>(8 * sizeof(Narrow) * i);
    for_lanes(lanes, [=](int lane) { to[lane] = static_cast<Narrow>(from[lane] >> shift); });
  }
  return Next::kAdvance;
}

/// The handlers for a value of `bytes` with `parts` parts.
struct Vector {
  Handler pack = nullptr;
  Handler unpack = nullptr;
};

template <class Wide, class Narrow>
Vector vector_of() {
  return {for_host<&run_pack<Wide, Narrow>>(), for_host<&run_unpack<Wide, Narrow>>()};
}

Vector find_vector(int bytes, std::size_t parts) {
  if (bytes == 8 && parts == 2) return vector_of<std::uint64_t, std::uint32_t>();
  if (bytes == 8 && parts == 4) return vector_of<std::uint64_t, std::uint16_t>();
  if (bytes == 4 && parts == 2) return vector_of<std::uint32_t, std::uint16_t>();
  if (bytes == 4 && parts == 4) return vector_of<std::uint32_t, std::uint8_t>();
  if (bytes == 2 && parts == 2) return vector_of<std::uint16_t, std::uint8_t>();
  return {};
}

/// A clock of the host in nanoseconds, the same for all lanes; `detail` is how far it is shifted.
template <class T>
Next run_clock(Warp& warp, const Instruction& instruction, std::uint32_t lanes) {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  const auto now = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
  T* const to = warp.lanes_of<T>(instruction.slots[0]);
  for_lanes(lanes, [=](int lane) { to[lane] = static_cast<T>(now >> instruction.detail); });
  return Next::kAdvance;
}

bool is_clock(std::string_view name) {
  return name.starts_with("%clock") || name.starts_with("%globaltimer");
}

int bytes_of(std::string_view type) {
  if (type.ends_with("16")) return 2;
  if (type.ends_with("32")) return 4;
  return type.ends_with("64") ? 8 : 0;
}

Form find_move(std::string_view type) {
  if (type == "pred") return {&run_move_predicate, {0}, 1};
  switch (bytes_of(type)) {
    case 2:
      return form_of<Identity, Unary<std::uint16_t>>();
    case 4:
      return form_of<Identity, Unary<std::uint32_t>>();
    case 8:
      return form_of<Identity, Unary<std::uint64_t>>();
    default:
      return {};
  }
}

void decode_pack(int bytes, const Statement& statement, Builder& builder,
                 Instruction* instruction) {
  const std::vector<Operand>& parts = statement.operands[1].elements;
  const Vector vector = find_vector(bytes, parts.size());
  if (vector.pack == nullptr) return decode_unknown(statement, builder, instruction);
  instruction->slots[0] = builder.target(statement.operands[0]);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    instruction->slots[i + 1] = builder.source(parts[i], bytes / static_cast<int>(parts.size()));
  }
  instruction->run = vector.pack;
}

void decode_unpack(int bytes, const Statement& statement, Builder& builder,
                   Instruction* instruction) {
  const std::vector<Operand>& parts = statement.operands[0].elements;
  const Vector vector = find_vector(bytes, parts.size());
  if (vector.unpack == nullptr) return decode_unknown(statement, builder, instruction);
  for (std::size_t i = 0; i < parts.size(); ++i) instruction->slots[i] = builder.target(parts[i]);
  instruction->slots[kMostParts] = builder.source(statement.operands[1], bytes);
  instruction->run = vector.unpack;
}

void decode_mov(const Statement& statement, Builder& builder, Instruction* instruction) {
  Modifiers m(statement);
  const std::string type = m.take_last();
  if (!m.empty() || statement.operands.size() != 2) {
    return decode_unknown(statement, builder, instruction);
  }
  const Operand& target = statement.operands[0];
  const Operand& source = statement.operands[1];
  if (target.kind == Operand::Kind::kVector) {
    return decode_unpack(bytes_of(type), statement, builder, instruction);
  }
  if (source.kind == Operand::Kind::kVector) {
    return decode_pack(bytes_of(type), statement, builder, instruction);
  }
  if (source.kind == Operand::Kind::kSpecial && is_clock(source.name)) {
    instruction->slots[0] = builder.target(target);
    instruction->detail = source.name.ends_with("_hi") ? 32 : 0;
    instruction->run = bytes_of(type) == 8 ? &run_clock<std::uint64_t> : &run_clock<std::uint32_t>;
    return;
  }
  place(find_move(type), statement, builder, instruction);
}

template <std::uint64_t kWindow>
struct ToGeneric {
  std::uint64_t operator()(std::uint64_t address) const { return address + kWindow; }
};

template <std::uint64_t kWindow>
struct FromGeneric {
  std::uint64_t operator()(std::uint64_t address) const { return address - kWindow; }
};

void decode_cvta(const Statement& statement, Builder& builder, Instruction* instruction) {
  using Address = Unary<std::uint64_t>;
  Modifiers m(statement);
  const bool is_wide = m.take("u64");
  const bool from_generic = m.take("to");
  const std::string space = m.take_last();
  if (!is_wide || !m.empty()) return decode_unknown(statement, builder, instruction);
  Form form;
  if (space.starts_with("shared")) {
    form = from_generic ? form_of<FromGeneric<kSharedWindow>, Address>()
                        : form_of<ToGeneric<kSharedWindow>, Address>();
  } else if (space == "local") {
    form = from_generic ? form_of<FromGeneric<kLocalWindow>, Address>()
                        : form_of<ToGeneric<kLocalWindow>, Address>();
  } else if (space == "global" || space == "const" || space.starts_with("param")) {
    form = form_of<Identity, Address>();
  }
  place(form, statement, builder, instruction);
}

}  // namespace

void add_move_opcodes(OpcodeTable& table) {
  table["mov"] = &decode_mov;
  table["cvta"] = &decode_cvta;
}

}  // namespace sonicmoe::emulator
