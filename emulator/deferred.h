// Asynchronous work: actions that an instruction defers to a later time, groups of them, and the
// operands of such instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lanes.h"

namespace sonicmoe::emulator {

/// A copy that calls `act` once, at a random later time. Its faults name the instruction.
template <class Act>
CopyTask defer(Warp& warp, const Instruction& instruction, Act act) {
  const Program& program = *warp.grid().launch().program;
  auto copy = std::make_shared<Copy>([act = std::move(act), &program, &instruction] {
    try {
      act();
    } catch (const Fault& fault) {
      const auto index = static_cast<std::size_t>(&instruction - program.code.data());
      throw Fault(std::string(fault.what()) + " (begun by " + program.texts[index] + ", PTX line " +
                  std::to_string(instruction.line) + ")");
    }
  });
  warp.grid().defer(copy);
  return copy;
}

/// Asynchronous instructions have several addresses. Each address takes this many entries of the
/// instruction's list: slot, offset, and 1 if the slot has 8 bytes.
inline constexpr std::size_t kAddressEntries = 3;

inline void append_address(Builder& builder, const Operand& operand, std::vector<Slot>* list) {
  std::int64_t offset = 0;
  bool is_wide = false;
  const Slot slot = builder.address(operand, &offset, &is_wide);
  list->insert(list->end(), {slot, static_cast<Slot>(offset), is_wide ? 1u : 0u});
}

/// The address that begins at `entries` of a list.
inline std::uint64_t address_at(Warp& warp, const Slot* entries, int lane) {
  const std::uint64_t base = entries[2] != 0 ? warp.lanes_of<std::uint64_t>(entries[0])[lane]
                                             : warp.lanes_of<std::uint32_t>(entries[0])[lane];
  return base + static_cast<std::uint64_t>(std::int64_t{static_cast<std::int32_t>(entries[1])});
}

inline std::uint32_t shared_address_at(Warp& warp, const Slot* entries, int lane) {
  return static_cast<std::uint32_t>(address_at(warp, entries, lane));
}

/// Throws Fault unless `value` is a multiple of `alignment`; `what` names it.
inline void check_aligned(std::uint64_t value, std::uint64_t alignment, const char* what) {
  if (value % alignment == 0) return;
  throw Fault(std::string(what) + " is " + std::to_string(value) + ", which is no multiple of " +
              std::to_string(alignment));
}

/// For .sync.aligned instructions: throws Fault unless all lanes run the instruction together.
inline void check_whole_warp(std::uint32_t lanes) {
  if (lanes != kAllLanes) throw Fault("an aligned instruction is run by a part of its warp");
}

}  // namespace sonicmoe::emulator
