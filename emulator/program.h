// A kernel ready to run: instructions whose operands are slots of a warp's register file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ptx_text.h"
#include "target.h"

namespace sonicmoe::emulator {

inline constexpr int kLanes = 32;
inline constexpr std::uint32_t kAllLanes = ~0u;

/// An error of the emulated program, or an instruction that the emulator does not know.
class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Warp;
struct Instruction;

/// What happens to the lanes that ran an instruction.
enum class Next {
  kAdvance,  ///< they go on behind it
  kJumped,   ///< the handler has placed them
  kWait,     ///< they run it again later, when another event may have changed its result
  kYield,    ///< they go on behind it after other warps had a turn
};

/// Runs an instruction for `lanes` (bit i: lane i), all of which stand at it.
using Handler = Next (*)(Warp& warp, const Instruction& instruction, std::uint32_t lanes);

/// Where a value of 32 lanes starts in the register file, in bytes. A register of 1, 2, 4 or 8
/// bytes holds 32 of them side by side; a predicate is one word with a bit for each lane.
using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = ~0u;

struct Instruction {
  Handler run = nullptr;
  Slot guard = kNoSlot;
  bool guard_negated = false;
  std::array<Slot, 6> slots{kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot, kNoSlot};
  std::uint32_t list = 0;   ///< a longer list of slots: Program::lists from here
  std::uint32_t count = 0;  ///< of the list
  std::int64_t value = 0;   ///< offset of an address, target of a branch, a modifier: the handler's
  std::uint32_t detail = 0;  ///< more modifiers
  std::uint32_t line = 0;
};

/// Constants of 32 equal lanes and special registers, copied into each register file at its start.
struct Preset {
  enum class Source { kConstant, kSpecial, kParameters, kLocal };
  Source source;
  Slot slot;
  int bytes;
  std::uint64_t bits = 0;  ///< of a constant; offset into the parameters
  std::string special;     ///< %tid.x
};

struct Program {
  std::string name;
  std::uint64_t number = 0;  ///< from 1, another one for each program that was built
  Target target;
  std::vector<Instruction> code;
  std::vector<std::string> texts;  ///< of each instruction, for messages
  std::vector<Slot> lists;
  std::vector<Preset> presets;
  std::size_t file_bytes = 0;  ///< of a warp's register file
  std::size_t parameter_bytes = 0;
  std::vector<std::size_t> parameter_offsets;
  std::vector<std::size_t> parameter_sizes;
  std::size_t static_shared = 0;
  std::size_t local_bytes = 0;    ///< of a thread
  std::int64_t most_threads = 0;  ///< of a CTA; 0: any
};

/// Decodes the statements of one function.
class Builder {
 public:
  /// `globals`: addresses of the module's variables.
  Builder(const Function& function, const std::map<std::string, std::uint64_t>& globals,
          const Target& target);
  /// Throws Fault if the target lacks one of the instructions, as ptxas refuses the whole text.
  Program build();

  // For the functions that decode one opcode each.

  /// The slot that is read for an operand of `bytes`: a register, or a constant that is put into
  /// the register file. Integers are cut to `bytes`; floats are taken as they are. 0 bytes: a
  /// predicate.
  Slot source(const Operand& operand, int bytes);
  Slot target(const Operand& operand);      ///< kNoSlot where the result is discarded
  int width(const Operand& operand) const;  ///< bytes of a register; 0: a predicate
  /// The slot of the base; `offset` gets the constant that is added to the base. The base is a
  /// register of 8 bytes (`is_wide`) or of 4 bytes. Symbols become constants.
  Slot address(const Operand& operand, std::int64_t* offset, bool* is_wide);
  std::size_t label(const Operand& operand) const;
  /// Appends slots to Program::lists and sets list and count.
  void set_list(Instruction* instruction, const std::vector<Slot>& slots);

 private:
  Slot allocate(int bytes);
  Slot constant(std::uint64_t bits, int bytes);
  Slot special(const std::string& name, int bytes);
  void place_registers();
  void place_variables(const std::map<std::string, std::uint64_t>& globals);

  const Function& function_;
  Program program_;
  std::map<std::string, Slot, std::less<>> registers_;
  std::map<std::string, Preset> symbols_;
  std::map<std::pair<std::uint64_t, int>, Slot> constants_;
  std::map<std::pair<std::string, int>, Slot> specials_;
};

/// Fills run, slots, list, value and detail; guard and line are the builder's.
using Decoder = void (*)(const Statement& statement, Builder& builder, Instruction* instruction);

/// Decoders by the opcode's first part, "mul". Each file ops_*.cc adds its own.
using OpcodeTable = std::map<std::string, Decoder, std::less<>>;
void add_integer_opcodes(OpcodeTable& table);
void add_float_opcodes(OpcodeTable& table);
void add_convert_opcodes(OpcodeTable& table);
void add_control_opcodes(OpcodeTable& table);
void add_memory_opcodes(OpcodeTable& table);
void add_lane_opcodes(OpcodeTable& table);
void add_barrier_opcodes(OpcodeTable& table);
void add_copy_opcodes(OpcodeTable& table);
void add_matrix_opcodes(OpcodeTable& table);
void add_tensor_opcodes(OpcodeTable& table);
const OpcodeTable& opcode_table();

/// A statement that no decoder knows. The instruction faults when it is run, not before: a kernel
/// may hold code for cases that a test never meets.
void decode_unknown(const Statement& statement, Builder& builder, Instruction* instruction);

}  // namespace sonicmoe::emulator
