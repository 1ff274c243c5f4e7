// bar, barrier and mbarrier.
#include <bit>

#include "lanes.h"

namespace sonicmoe::emulator {
namespace {

int first_lane(std::uint32_t lanes) { return std::countr_zero(lanes); }

/// Slots: member mask.
Next run_warp_barrier(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  std::uint32_t members = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) members |= warp.lanes_of<std::uint32_t>(i.slots[0])[lane];
  }
  return warp.has_all(members) ? Next::kAdvance : Next::kWait;
}

enum class Named : std::uint32_t { kSync, kArrive, kCount, kAll, kAny };

NamedBarrier& barrier_of(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const std::uint32_t id = warp.lanes_of<std::uint32_t>(i.slots[2])[first_lane(lanes)];
  if (id >= warp.cta().barriers.size()) throw Fault("a CTA has no barrier " + std::to_string(id));
  return warp.cta().barriers[id];
}

void complete_if_all_arrived(Warp& warp, NamedBarrier& barrier) {
  const std::uint32_t expected =
      barrier.expected == 0 ? warp.cta().threads_alive() : barrier.expected;
  if (barrier.arrived == 0 || barrier.arrived < expected) return;
  if (barrier.arrived > expected) throw Fault("more threads arrive at a barrier than it expects");
  ++barrier.phase;
  barrier.clock_complete = barrier.clock_arrived;
  barrier.result = barrier.count;
  barrier.arrived = barrier.expected = barrier.count = 0;
  warp.grid().note_progress();
}

void arrive(Warp& warp, const Instruction& i, NamedBarrier& barrier, std::uint32_t lanes) {
  std::uint32_t expected = 0;
  if (i.slots[3] != kNoSlot) {
    expected = warp.lanes_of<std::uint32_t>(i.slots[3])[first_lane(lanes)];
    if (expected == 0 || expected % kLanes != 0) {
      throw Fault("a barrier expects a number of threads that is no multiple of 32");
    }
  }
  if (barrier.arrived != 0 && barrier.expected != expected) {
    throw Fault("threads name different numbers of threads for one barrier");
  }
  barrier.expected = expected;
  barrier.arrived += expected == 0 ? static_cast<std::uint32_t>(std::popcount(warp.live()))
                                   : static_cast<std::uint32_t>(kLanes);
  if (i.slots[4] != kNoSlot) {
    const std::uint32_t bits = warp.predicate(i.slots[4]);
    barrier.count +=
        static_cast<std::uint32_t>(std::popcount((i.value != 0 ? ~bits : bits) & lanes));
  }
}

void store_result(Warp& warp, const Instruction& i, const NamedBarrier& barrier,
                  std::uint32_t lanes) {
  switch (static_cast<Named>(i.detail)) {
    case Named::kCount:
      for (int lane = 0; lane < kLanes; ++lane) {
        if (lanes >> lane & 1) warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = barrier.result;
      }
      break;
    case Named::kAny:
      write_predicate(warp, i.slots[0], barrier.result != 0 ? kAllLanes : 0, lanes);
      break;
    case Named::kAll:
      write_predicate(warp, i.slots[0],
                      barrier.result == warp.cta().threads_alive() ? kAllLanes : 0, lanes);
      break;
    default:
      break;
  }
}

/// Slots: result, -, number of the barrier, number of threads, predicate.
Next run_named(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  NamedBarrier& barrier = barrier_of(warp, i, lanes);
  Fragment& f = warp.fragment();
  if (f.ticket == -1) {
    const std::int64_t phase = barrier.phase;
    warp.clock().release(&barrier.clock_arrived);
    arrive(warp, i, barrier, lanes);
    complete_if_all_arrived(warp, barrier);
    if (static_cast<Named>(i.detail) == Named::kArrive) return Next::kAdvance;
    f.ticket = phase;
  } else if (barrier.phase == f.ticket) {
    complete_if_all_arrived(warp, barrier);  // the missing warps may have ended
  }
  if (barrier.phase == f.ticket) return Next::kWait;
  f.ticket = -1;
  warp.clock().acquire(barrier.clock_complete);
  store_result(warp, i, barrier, lanes);
  return Next::kAdvance;
}

void decode_named(const Statement& s, Builder& b, Instruction* i) {
  const bool reduces = s.has("red");
  std::size_t k = reduces ? 1 : 0;
  if (reduces) i->slots[0] = b.target(s.operands.at(0));
  i->slots[2] = b.source(s.operands.at(k++), 4);
  if (k + (reduces ? 1 : 0) < s.operands.size()) i->slots[3] = b.source(s.operands[k++], 4);
  if (reduces) {
    i->slots[4] = b.source(s.operands.at(k), 0);
    i->value = s.operands[k].negated;
  }
  i->detail = static_cast<std::uint32_t>(s.has("arrive") ? Named::kArrive
                                         : s.has("popc") ? Named::kCount
                                         : s.has("and")  ? Named::kAll
                                         : s.has("or")   ? Named::kAny
                                                         : Named::kSync);
  i->run = &run_named;
}

std::uint32_t cluster_threads(Cluster& cluster) {
  std::uint32_t threads = 0;
  for (const auto& cta : cluster.ctas) threads += cta->threads_alive();
  return threads;
}

void complete_cluster_phase(Warp& warp) {
  Cluster& cluster = warp.cta().cluster();
  if (cluster.arrived == 0 || cluster.arrived < cluster_threads(cluster)) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.clock_complete = cluster.clock_arrived;
  warp.grid().note_progress();
}

Next run_cluster_arrive(Warp& warp, const Instruction&, std::uint32_t) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  if (warp.cluster_phase != -1) throw Fault("a warp arrives twice at the cluster's barrier");
  Cluster& cluster = warp.cta().cluster();
  warp.cluster_phase = cluster.phase;
  warp.clock().release(&cluster.clock_arrived);
  cluster.arrived += static_cast<std::uint32_t>(std::popcount(warp.live()));
  complete_cluster_phase(warp);
  return Next::kAdvance;
}

Next run_cluster_wait(Warp& warp, const Instruction&, std::uint32_t) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  if (warp.cluster_phase == -1) throw Fault("a warp waits for the cluster without an arrival");
  if (warp.cta().cluster().phase == warp.cluster_phase) complete_cluster_phase(warp);
  if (warp.cta().cluster().phase == warp.cluster_phase) return Next::kWait;
  warp.cluster_phase = -1;
  warp.clock().acquire(warp.cta().cluster().clock_complete);
  return Next::kAdvance;
}

void decode_barrier(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("cluster")) {
    i->run = s.has("arrive") ? &run_cluster_arrive : &run_cluster_wait;
  } else if (s.has("warp")) {
    i->slots[0] = b.source(s.operands.at(0), 4);
    i->run = &run_warp_barrier;
  } else {
    decode_named(s, b, i);
  }
}

enum class Object : std::uint32_t {
  kInit,
  kInvalidate,
  kExpect,
  kComplete,
  kArrive,
  kArriveExpect,
  kArriveDrop,
  kTest,
};

/// How the address is given, in the bits of Instruction::detail above the operation's.
constexpr std::uint32_t kWide = 1 << 8;
constexpr std::uint32_t kInShared = 1 << 9;

/// Slots: result, address, operand.
Next run_object(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  Cluster& cluster = warp.cta().cluster();
  bool waits = false;
  const std::byte* last = nullptr;  // whose clock has been asked: that of all lanes in most cases
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const std::uint64_t address =
        ((i.detail & kWide) != 0 ? warp.lanes_of<std::uint64_t>(i.slots[1])[lane]
                                 : warp.lanes_of<std::uint32_t>(i.slots[1])[lane]) +
        static_cast<std::uint64_t>(i.value);
    if (address % 8 != 0) throw Fault("an mbarrier is not aligned");
    std::byte* at = (i.detail & kInShared) != 0
                        ? warp.cta().shared(static_cast<std::uint32_t>(address), 8)
                        : warp.generic(lane, address, 8);
    const std::uint32_t operand =
        i.slots[2] == kNoSlot ? 1 : warp.lanes_of<std::uint32_t>(i.slots[2])[lane];
    const Slot result = i.slots[0];
    const auto object = static_cast<Object>(i.detail & 0xff);
    BarrierClock* clock = nullptr;
    if (object != Object::kInit && at != last) {
      clock = &mbarrier::clock_of(cluster, at, warp.clock().known());
      last = at;
    }
    switch (object) {
      case Object::kInit:
        mbarrier::init(at, operand);
        cluster.agents.initialise(at, warp.clock().now());
        break;
      case Object::kInvalidate:
        mbarrier::invalidate(at);
        break;
      case Object::kExpect:
        mbarrier::expect(at, operand);
        break;
      case Object::kComplete:
        mbarrier::complete(cluster, at, operand);
        break;
      case Object::kTest: {
        const bool done = mbarrier::is_complete(at, operand & 1);
        waits = waits || !done;
        if (done && clock != nullptr) warp.clock().acquire(clock->complete);
        write_predicate_bit(warp, result, lane, done);
        break;
      }
      case Object::kArriveExpect:
      case Object::kArrive: {
        const bool expects = object == Object::kArriveExpect;
        if (clock != nullptr) warp.clock().release(&clock->arrived);
        // The token is the parity of the phase in which the thread arrives.
        const std::uint64_t parity = mbarrier::is_complete(at, 0) ? 1 : 0;
        if (expects) mbarrier::expect(at, operand);
        mbarrier::arrive(cluster, at, expects ? 1 : operand);
        if (result != kNoSlot) warp.lanes_of<std::uint64_t>(result)[lane] = parity;
        break;
      }
      default:
        throw Fault("this operation on an mbarrier is not emulated");
    }
  }
  return waits ? Next::kYield : Next::kAdvance;
}

void decode_object(const Statement& s, Builder& b, Instruction* i) {
  const std::string& operation = s.parts.at(1);
  const bool tests = operation == "try_wait" || operation == "test_wait";
  const bool arrives = operation == "arrive";
  const Object object = operation == "init"               ? Object::kInit
                        : operation == "inval"            ? Object::kInvalidate
                        : operation == "expect_tx"        ? Object::kExpect
                        : operation == "complete_tx"      ? Object::kComplete
                        : tests                           ? Object::kTest
                        : arrives && s.has("expect_tx")   ? Object::kArriveExpect
                        : arrives && !s.has("noComplete") ? Object::kArrive
                                                          : Object::kArriveDrop;
  std::size_t k = 0;
  if (tests || (arrives && s.operands.at(0).kind != Operand::Kind::kAddress)) {
    i->slots[0] = b.target(s.operands.at(k++));
  }
  bool wide = false;
  i->slots[1] = b.address(s.operands.at(k++), &i->value, &wide);
  if (tests && !s.has("parity")) throw Fault("waits by token are not emulated");
  if (k < s.operands.size()) i->slots[2] = b.source(s.operands[k], 4);
  bool shared = false;
  for (const std::string& part : s.parts) shared = shared || part.starts_with("shared");
  i->detail = static_cast<std::uint32_t>(object) | (wide ? kWide : 0) | (shared ? kInShared : 0);
  i->run = &run_object;
}

}  // namespace

void add_barrier_opcodes(OpcodeTable& table) {
  table["bar"] = &decode_barrier;
  table["barrier"] = &decode_barrier;
  table["mbarrier"] = &decode_object;
}

}  // namespace sonicmoe::emulator
