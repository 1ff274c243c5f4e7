#include "program.h"

#include <algorithm>
#include <atomic>

#include "registers.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::size_t kSlotAlignment = 64;

std::size_t round_up(std::size_t n, std::size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

int bytes_of_register(const std::string& type) {
  if (type == "pred") return 0;
  if (type.ends_with("128")) throw Fault("registers of 128 bits are not emulated");
  if (type.ends_with("64")) return 8;
  if (type.ends_with("32") || type.ends_with("x2")) return 4;
  return type.ends_with("16") ? 2 : 1;
}

Next run_unknown(Warp&, const Instruction&, std::uint32_t) {
  throw Fault("the emulator does not know this instruction");
}

}  // namespace

void decode_unknown(const Statement&, Builder&, Instruction* instruction) {
  instruction->run = &run_unknown;
}

const OpcodeTable& opcode_table() {
  // Never destroyed: a process may end while one of its grids runs.
  static const OpcodeTable& table = *[] {
    auto* table = new OpcodeTable;
    OpcodeTable& t = *table;
    add_integer_opcodes(t);
    add_float_opcodes(t);
    add_convert_opcodes(t);
    add_control_opcodes(t);
    add_memory_opcodes(t);
    add_lane_opcodes(t);
    add_barrier_opcodes(t);
    add_copy_opcodes(t);
    add_matrix_opcodes(t);
    add_tensor_opcodes(t);
    return table;
  }();
  return table;
}

Builder::Builder(const Function& function, const std::map<std::string, std::uint64_t>& globals,
                 const Target& target)
    : function_(function) {
  static std::atomic<std::uint64_t> programs = 0;
  program_.name = function.name;
  program_.number = ++programs;
  program_.target = target;
  program_.most_threads = function.most_threads;
  place_registers();
  place_variables(globals);
}

/// Registers of one size take places that are free again. Each lane has its own part of a place,
/// so lanes that run apart do not meet. Targets never lie where the same statement reads.
void Builder::place_registers() {
  const auto lifetimes = lifetimes_of(function_);
  std::vector<std::vector<std::string_view>> begin(function_.statements.size() + 1), end = begin;
  for (const auto& [name, type] : function_.registers) {
    const auto found = lifetimes.find(name);
    if (found == lifetimes.end()) continue;
    const Lifetime& l = found->second;
    const bool is_short = l.is_short && bytes_of_register(type) != 0;
    begin[is_short ? l.first : 0].push_back(name);
    end[is_short ? l.last : function_.statements.size()].push_back(name);
  }
  std::map<int, std::vector<Slot>> free;
  for (std::size_t at = 0; at < function_.statements.size(); ++at) {
    for (const std::string_view name : begin[at]) {
      const int bytes = bytes_of_register(function_.registers.find(name)->second);
      std::vector<Slot>& places = free[bytes];
      if (places.empty()) places.push_back(allocate(bytes));
      registers_[std::string(name)] = places.back();
      places.pop_back();
    }
    for (const std::string_view name : end[at]) {
      const int bytes = bytes_of_register(function_.registers.find(name)->second);
      free[bytes].push_back(registers_.find(name)->second);
    }
  }
}

Slot Builder::allocate(int bytes) {
  const std::size_t size = bytes == 0 ? sizeof(std::uint32_t) : std::size_t(bytes) * kLanes;
  if (bytes != 0) program_.file_bytes = round_up(program_.file_bytes, kSlotAlignment);
  const std::size_t slot = program_.file_bytes;
  program_.file_bytes += size;
  return static_cast<Slot>(slot);
}

void Builder::place_variables(const std::map<std::string, std::uint64_t>& globals) {
  const auto add = [&](const std::string& name, Preset::Source source, std::uint64_t bits) {
    symbols_[name] = Preset{source, kNoSlot, 8, bits, {}};
  };
  for (const Variable& v : function_.parameters) {
    const std::size_t offset = round_up(program_.parameter_bytes, v.alignment);
    program_.parameter_offsets.push_back(offset);
    program_.parameter_sizes.push_back(v.bytes);
    program_.parameter_bytes = offset + v.bytes;
    add(v.name, Preset::Source::kParameters, offset);
  }
  for (const auto& [name, address] : globals) add(name, Preset::Source::kConstant, address);
  for (const Variable& v : function_.variables) {
    std::size_t& end = v.space == "local" ? program_.local_bytes : program_.static_shared;
    if (v.bytes == 0) continue;
    const std::size_t offset = round_up(end, v.alignment);
    end = offset + v.bytes;
    add(v.name, Preset::Source::kConstant, offset);
  }
  for (const Variable& v : function_.variables) {  // dynamic shared memory comes last
    if (v.bytes != 0) continue;
    add(v.name, Preset::Source::kConstant, round_up(program_.static_shared, v.alignment));
  }
}

Program Builder::build() {
  const OpcodeTable& table = opcode_table();
  for (const Statement& s : function_.statements) {
    Instruction i;
    i.line = static_cast<std::uint32_t>(s.line);
    if (s.guard.kind == Operand::Kind::kRegister) {
      i.guard = registers_.at(s.guard.name);
      i.guard_negated = s.guard.negated;
    }
    const auto found = table.find(s.opcode());
    try {
      program_.target.check(s);
      (found == table.end() ? &decode_unknown : found->second)(s, *this, &i);
    } catch (const std::exception& e) {
      throw Fault("PTX line " + std::to_string(s.line) + ", " + s.text() + ": " + e.what());
    }
    program_.code.push_back(i);
    program_.texts.push_back(s.text());
  }
  return std::move(program_);
}

Slot Builder::constant(std::uint64_t bits, int bytes) {
  const auto [entry, is_new] = constants_.try_emplace({bits, bytes}, kNoSlot);
  if (is_new) {
    entry->second = allocate(bytes);
    program_.presets.push_back({Preset::Source::kConstant, entry->second, bytes, bits, {}});
  }
  return entry->second;
}

Slot Builder::special(const std::string& name, int bytes) {
  const auto [entry, is_new] = specials_.try_emplace({name, bytes}, kNoSlot);
  if (is_new) {
    entry->second = allocate(bytes);
    program_.presets.push_back({Preset::Source::kSpecial, entry->second, bytes, 0, name});
  }
  return entry->second;
}

Slot Builder::source(const Operand& operand, int bytes) {
  switch (operand.kind) {
    case Operand::Kind::kRegister:
      return registers_.at(operand.name);
    case Operand::Kind::kSpecial:
      return special(operand.name, bytes);
    case Operand::Kind::kInteger:
    case Operand::Kind::kFloat: {
      const auto bits = static_cast<std::uint64_t>(operand.value);
      if (bytes == 0) return constant(bits != 0 ? kAllLanes : 0, 0);
      return constant(bytes >= 8 ? bits : bits & ((std::uint64_t{1} << (8 * bytes)) - 1), bytes);
    }
    case Operand::Kind::kSymbol: {
      const auto found = symbols_.find(operand.name);
      if (found == symbols_.end()) throw Fault("nothing is named " + operand.name);
      Preset& preset = found->second;
      if (preset.source == Preset::Source::kConstant) return constant(preset.bits, bytes);
      if (preset.slot == kNoSlot) {
        preset.slot = allocate(8);
        program_.presets.push_back(preset);
      }
      return preset.slot;
    }
    default:
      throw Fault("an operand of an unexpected kind");
  }
}

Slot Builder::target(const Operand& operand) {
  if (operand.kind == Operand::Kind::kDiscarded) return kNoSlot;
  if (operand.kind != Operand::Kind::kRegister) throw Fault("the target is no register");
  return registers_.at(operand.name);
}

int Builder::width(const Operand& operand) const {
  const auto found = function_.registers.find(operand.name);
  if (found == function_.registers.end()) throw Fault("an operand is no register");
  return bytes_of_register(found->second);
}

Slot Builder::address(const Operand& operand, std::int64_t* offset, bool* is_wide) {
  if (operand.kind != Operand::Kind::kAddress) throw Fault("the operand is no address");
  const Operand& base = operand.elements[0];
  *offset = operand.value;
  *is_wide = base.kind != Operand::Kind::kRegister || width(base) == 8;
  return source(base, 8);
}

std::size_t Builder::label(const Operand& operand) const {
  const auto found = function_.labels.find(operand.name);
  if (found == function_.labels.end()) throw Fault("no label " + operand.name);
  return found->second;
}

void Builder::set_list(Instruction* instruction, const std::vector<Slot>& slots) {
  instruction->list = static_cast<std::uint32_t>(program_.lists.size());
  instruction->count = static_cast<std::uint32_t>(slots.size());
  program_.lists.insert(program_.lists.end(), slots.begin(), slots.end());
}

}  // namespace sonicmoe::emulator
