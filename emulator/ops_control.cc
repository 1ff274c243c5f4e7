// Branches, exits, hints, and instructions that have no effect in the emulator.
#include <atomic>

#include "machine.h"

namespace sonicmoe::emulator {
namespace {

Next run_branch(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  warp.jump(lanes, static_cast<std::uint32_t>(i.value));
  return Next::kJumped;
}

void decode_branch(const Statement& s, Builder& b, Instruction* i) {
  i->run = &run_branch;
  i->value = static_cast<std::int64_t>(b.label(s.operands.at(0)));
}

Next run_exit(Warp& warp, const Instruction&, std::uint32_t lanes) {
  warp.exit(lanes);
  return Next::kJumped;
}

void decode_exit(const Statement&, Builder&, Instruction* i) { i->run = &run_exit; }

Next run_trap(Warp&, const Instruction&, std::uint32_t) { throw Fault("the kernel trapped"); }

void decode_trap(const Statement&, Builder&, Instruction* i) { i->run = &run_trap; }

Next run_sleep(Warp&, const Instruction&, std::uint32_t) { return Next::kYield; }

void decode_sleep(const Statement&, Builder&, Instruction* i) { i->run = &run_sleep; }

Next run_fence(Warp&, const Instruction&, std::uint32_t) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return Next::kAdvance;
}

Next run_proxy_fence(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  warp.cta().note_proxy_fence(warp.index());
  return run_fence(warp, i, lanes);
}

void decode_fence(const Statement& s, Builder&, Instruction* i) {
  i->run = s.has("proxy") && s.has("async") ? &run_proxy_fence : &run_fence;
}

Next run_wait_for_previous(Warp& warp, const Instruction&, std::uint32_t) {
  if (!warp.grid().previous_is_complete()) return Next::kWait;
  warp.cta().has_waited = true;
  return Next::kAdvance;
}

Next run_launch_next(Warp& warp, const Instruction&, std::uint32_t) {
  warp.grid().launch_next(warp.cta());
  return Next::kAdvance;
}

/// Programmatic dependent launch.
void decode_dependence(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("wait")) {
    i->run = &run_wait_for_previous;
  } else if (s.has("launch_dependents")) {
    i->run = &run_launch_next;
  } else {
    decode_unknown(s, b, i);
  }
}

Next run_nothing(Warp&, const Instruction&, std::uint32_t) { return Next::kAdvance; }

void decode_nothing(const Statement&, Builder&, Instruction* i) { i->run = &run_nothing; }

Next run_policy(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) warp.lanes_of<std::uint64_t>(i.slots[0])[lane] = 0;
  }
  return Next::kAdvance;
}

/// A cache policy, which nothing reads.
void decode_policy(const Statement& s, Builder& b, Instruction* i) {
  i->run = &run_policy;
  i->slots[0] = b.target(s.operands.at(0));
}

}  // namespace

void add_control_opcodes(OpcodeTable& table) {
  table["bra"] = &decode_branch;
  table["ret"] = &decode_exit;
  table["exit"] = &decode_exit;
  table["trap"] = &decode_trap;
  table["nanosleep"] = &decode_sleep;
  table["fence"] = &decode_fence;
  table["membar"] = &decode_fence;
  table["griddepcontrol"] = &decode_dependence;
  table["setmaxnreg"] = &decode_nothing;
  table["discard"] = &decode_nothing;
  table["applypriority"] = &decode_nothing;
  table["createpolicy"] = &decode_policy;
}

}  // namespace sonicmoe::emulator
