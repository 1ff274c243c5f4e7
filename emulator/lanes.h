// Functions that all opcodes use: loops over lanes, predicates, and lists of operands.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "machine.h"
#include "program.h"

namespace sonicmoe::emulator {

/// Calls body(lane) for each lane of `lanes`. Two registers are either the same or do not overlap,
/// so the loop over all lanes may run as vector code.
template <class Body>
void for_lanes(std::uint32_t lanes, const Body& body) {
  if (lanes == kAllLanes) {
#pragma GCC ivdep
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
    return;
  }
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

/// Calls body(lane) one lane after the other: for bodies that access data of several lanes.
template <class Body>
void for_each_lane(std::uint32_t lanes, const Body& body) {
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

inline void write_predicate(Warp& warp, Slot slot, std::uint32_t bits, std::uint32_t lanes) {
  if (slot == kNoSlot) return;
  std::uint32_t& word = warp.predicate(slot);
  word = (word & ~lanes) | (bits & lanes);
}

/// The predicate of one lane.
inline void write_predicate_bit(Warp& warp, Slot slot, int lane, bool value) {
  write_predicate(warp, slot, value ? kAllLanes : 0, 1u << lane);
}

inline const Slot* list_of(Warp& warp, const Instruction& instruction) {
  return warp.grid().launch().program->lists.data() + instruction.list;
}

/// {a, b, ...} or a single operand.
inline std::vector<Operand> elements_of(const Operand& o) {
  return o.kind == Operand::Kind::kVector ? o.elements : std::vector<Operand>{o};
}

}  // namespace sonicmoe::emulator
