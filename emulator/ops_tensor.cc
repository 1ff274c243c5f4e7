// tcgen05, but for products and copies: allocation, loads, stores, fences and commits.
#include "ops_tensor.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace sonicmoe::emulator {
namespace {

constexpr std::size_t kBarrierBytes = sizeof(std::uint64_t);

std::uint32_t uniform(const std::uint32_t* lanes, const char* what) {
  if (std::any_of(lanes, lanes + kLanes, [&](std::uint32_t v) { return v != lanes[0]; })) {
    throw Fault(std::string("the lanes have different ") + what);
  }
  return lanes[0];
}

std::uint32_t uniform_columns(Warp& warp, Slot slot) {
  const std::uint32_t columns = uniform(warp.lanes_of<std::uint32_t>(slot), "numbers of columns");
  if (columns < TensorMemory::kLeastColumns || columns > TensorMemory::kColumns ||
      !std::has_single_bit(columns)) {
    throw Fault("tensor memory is allocated by powers of two from 32 to 512 columns, not by " +
                std::to_string(columns));
  }
  return columns;
}

/// Columns that are free in each of the CTAs. Not always the first ones: a kernel may not count on
/// an address.
std::optional<Columns> free_columns(Warp& warp, std::uint32_t count,
                                    const std::vector<Cta*>& ctas) {
  const std::uint32_t places = TensorMemory::kColumns / count;
  const auto shift = static_cast<std::uint32_t>(warp.grid().random()() % places);
  for (std::uint32_t n = 0; n < places; ++n) {
    const Columns columns{(n + shift) % places * count, count};
    const bool is_free =
        std::all_of(ctas.begin(), ctas.end(), [&](Cta* c) { return c->tensor().is_free(columns); });
    if (is_free) return columns;
  }
  return std::nullopt;
}

void take(Warp& warp, const Instruction& i, const Columns& columns) {
  constexpr std::size_t kAddressBytes = 4;
  Cta& cta = warp.cta();
  const std::uint32_t to = shared_address_at(warp, list_of(warp, i), 0);
  check_aligned(to, kAddressBytes, "the target of tcgen05.alloc");
  std::memcpy(cta.own_shared(to, kAddressBytes), &columns.first, kAddressBytes);
  cta.note_write(to, kAddressBytes, warp.index());
  SharedPass(cta, warp.clock()).write(to, kAddressBytes);
  cta.tensor().allocate(columns, warp.clock().now());
  warp.grid().note_progress();
}

/// One CTA of the pair chooses for both. Its warp goes on at once or waits for the other CTA.
Next alloc_pair(Warp& warp, const Instruction& i, std::uint32_t count) {
  std::shared_ptr<TensorMemory::PairAllocation>& offer = warp.tensor.offer;
  if (offer != nullptr) {
    if (!offer->is_taken) return Next::kWait;
    offer = nullptr;
    return Next::kAdvance;
  }
  TensorMemory& own = warp.cta().tensor();
  if (own.offered != nullptr) {
    const Columns columns = own.offered->columns;
    if (columns.count != count) {
      throw Fault("the CTAs of a pair allocate " + std::to_string(columns.count) + " and " +
                  std::to_string(count) + " columns of tensor memory");
    }
    own.offered->is_taken = true;
    own.offered = nullptr;
    take(warp, i, columns);
    return Next::kAdvance;
  }
  Cta& other = other_of_pair(warp);
  if (other.tensor().offered != nullptr) return Next::kWait;  // it has not taken the last one
  const auto columns = free_columns(warp, count, {&warp.cta(), &other});
  if (!columns) return Next::kWait;
  take(warp, i, *columns);
  other.tensor().offered = std::make_shared<TensorMemory::PairAllocation>(*columns);
  if (warp.grid().random()() % 2 == 0) return Next::kAdvance;
  offer = other.tensor().offered;
  return Next::kWait;
}

/// Detail of the instructions with a cta_group: the group. List: the target, the number of columns.
Next run_alloc(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  check_cta_group(warp, static_cast<int>(i.detail));
  if (warp.cta().tensor().is_relinquished) {
    throw Fault("tcgen05.alloc follows tcgen05.relinquish_alloc_permit");
  }
  const std::uint32_t count = uniform_columns(warp, list_of(warp, i)[kAddressEntries]);
  if (i.detail == 2) return alloc_pair(warp, i, count);
  const auto columns = free_columns(warp, count, {&warp.cta()});
  if (!columns) return Next::kWait;
  take(warp, i, *columns);
  return Next::kAdvance;
}

/// Slots: address, number of columns.
Next run_dealloc(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  check_cta_group(warp, static_cast<int>(i.detail));
  const std::uint32_t first = uniform(warp.lanes_of<std::uint32_t>(i.slots[0]), "addresses");
  const Columns columns{first, uniform_columns(warp, i.slots[1])};
  const Stamp now = warp.clock().now();
  warp.cta().tensor().deallocate(columns, now, warp.clock().known());
  warp.grid().note_progress();
  return Next::kAdvance;
}

Next run_relinquish(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  check_cta_group(warp, static_cast<int>(i.detail));
  warp.cta().tensor().is_relinquished = true;
  return Next::kAdvance;
}

/// The lanes and columns of a load or a store of one word for each lane and register.
struct Block {
  std::uint32_t quarter;
  Columns columns;
};

/// List: the address, then the registers.
Block block_of(Warp& warp, const Instruction& i) {
  std::uint32_t addresses[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    addresses[lane] = shared_address_at(warp, list_of(warp, i), lane);
  }
  const std::uint32_t at = uniform(addresses, "addresses");
  const auto count = static_cast<std::uint32_t>(i.count - kAddressEntries);
  const Block block{static_cast<std::uint32_t>(warp.index()) % TensorMemory::kQuarters,
                    {at & 0xffff, count}};
  if (at >> 16 != block.quarter * kLanes) {
    throw Fault("warp " + std::to_string(warp.index()) + " accesses tensor memory from lane " +
                std::to_string(at >> 16) + ", but its lanes begin at " +
                std::to_string(block.quarter * kLanes));
  }
  warp.cta().tensor().check_allocated(block.columns);
  return block;
}

/// The registers get their values in wait::ld. Before that they are NaN: a program may not count on
/// the order in which hardware respects registers.
Next run_load(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  TensorMemory& memory = warp.cta().tensor();
  const Block block = block_of(warp, i);
  memory.check_written(block.quarter, block.columns);
  const VectorClock order = warp.clock().tensor_order();
  History::Pass(memory.history(), warp.clock().issue(Agent::kTensorLoads), order)
      .read(TensorMemory::unit(block.quarter, block.columns.first), block.columns.count);
  const Slot* registers = list_of(warp, i) + kAddressEntries;
  std::vector<std::uint32_t> values;
  values.reserve(std::size_t{block.columns.count} * kLanes);
  for (std::uint32_t c = 0; c < block.columns.count; ++c) {
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      values.push_back(memory.cell(block.quarter * kLanes + lane, block.columns.first + c));
    }
    std::memset(warp.lanes_of<std::uint32_t>(registers[c]), 0xff, sizeof(std::uint32_t) * kLanes);
  }
  warp.tensor.loads.push_back(
      std::make_shared<Copy>([&warp, registers, values = std::move(values)] {
        for (std::size_t c = 0; c * kLanes < values.size(); ++c) {
          std::memcpy(warp.lanes_of<std::uint32_t>(registers[c]), values.data() + c * kLanes,
                      sizeof(std::uint32_t) * kLanes);
        }
      }));
  return Next::kAdvance;
}

/// The clocks alone say when a store is complete: an access too early is a fault.
Next run_store(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  TensorMemory& memory = warp.cta().tensor();
  const Block block = block_of(warp, i);
  const VectorClock order = warp.clock().tensor_order();
  History::Pass(memory.history(), warp.clock().issue(Agent::kTensorStores), order)
      .write(TensorMemory::unit(block.quarter, block.columns.first), block.columns.count);
  const Slot* registers = list_of(warp, i) + kAddressEntries;
  for (std::uint32_t c = 0; c < block.columns.count; ++c) {
    const std::uint32_t* values = warp.lanes_of<std::uint32_t>(registers[c]);
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      memory.cell(block.quarter * kLanes + lane, block.columns.first + c) = values[lane];
    }
  }
  return Next::kAdvance;
}

template <Agent kAgent>
Next run_wait(Warp& warp, const Instruction&, std::uint32_t lanes) {
  if (!warp.has_all(kAllLanes)) return Next::kWait;
  check_whole_warp(lanes);
  if (kAgent == Agent::kTensorLoads) {
    for (const CopyTask& load : warp.tensor.loads) load->finish();
    warp.tensor.loads.clear();
  }
  warp.clock().wait_for_tensor(kAgent);
  return Next::kAdvance;
}

Next run_fence_before(Warp& warp, const Instruction&, std::uint32_t) {
  if (!warp.clock().has_waited_for_tensor(Agent::kTensorLoads)) {
    throw Fault("tcgen05.fence::before_thread_sync follows tcgen05.ld without tcgen05.wait::ld");
  }
  if (!warp.clock().has_waited_for_tensor(Agent::kTensorStores)) {
    throw Fault("tcgen05.fence::before_thread_sync follows tcgen05.st without tcgen05.wait::st");
  }
  warp.clock().fence_before();
  return Next::kAdvance;
}

Next run_fence_after(Warp& warp, const Instruction&, std::uint32_t) {
  warp.clock().fence_after();
  return Next::kAdvance;
}

/// List: mbarrier, and the mask of a multicast or kNoSlot.
std::vector<std::uint32_t> barriers_of(Warp& warp, const Slot* list, int lane) {
  const std::uint32_t address = shared_address_at(warp, list, lane);
  check_aligned(address, kBarrierBytes, "the address of an mbarrier");
  if (list[kAddressEntries] == kNoSlot) return {address};
  std::vector<std::uint32_t> all;
  std::uint32_t mask = warp.lanes_of<std::uint16_t>(list[kAddressEntries])[lane];
  for (; mask != 0; mask &= mask - 1) {
    const auto name = static_cast<std::uint32_t>(std::countr_zero(mask) + 1);
    all.push_back((address & kOffsetMask) | name << kRankShift);
  }
  return all;
}

/// Arrives at each mbarrier at a time of its own, when the thread's products and copies are
/// complete.
Next run_commit(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const int lane = single_lane(lanes, "tcgen05.commit");
  check_cta_group(warp, static_cast<int>(i.detail));
  if (warp.tensor.issuing_lane != -1 && warp.tensor.issuing_lane != lane) {
    throw Fault("tcgen05.commit is issued by lane " + std::to_string(lane) +
                ", which has not issued the products");
  }
  const ClockCopy known = warp.clock().release();
  const Stamp products = warp.clock().last(Agent::kTensorProducts);
  const Stamp copies = warp.clock().last(Agent::kTensorCopies);
  for (const std::uint32_t address : barriers_of(warp, list_of(warp, i), lane)) {
    Cta& cta = warp.cta().owner(address);
    std::byte* at = warp.cta().shared(address, kBarrierBytes);
    defer(warp, i, [&cta, at, known, products, copies, last = warp.tensor.last_issued] {
      if (cta.is_done()) throw Fault("tcgen05.commit arrives in a CTA that has ended");
      if (last != nullptr) last->finish();
      BarrierClock& clock = mbarrier::clock_of(cta.cluster(), at, *known);
      clock.arrived.merge(*known);
      clock.arrived.add(products);
      clock.arrived.add(copies);
      clock.committed = clock.copy();
      mbarrier::arrive(cta.cluster(), at, 1);
    });
  }
  return Next::kAdvance;
}

/// [mbarrier] {, mask}
void decode_commit(const Statement& s, Builder& b, Instruction* i) {
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  list.push_back(s.has("multicast::cluster") ? b.source(s.operands.at(1), 2) : kNoSlot);
  b.set_list(i, list);
  i->run = &run_commit;
}

/// registers, [address]  or  [address], registers
void decode_block(const Statement& s, Builder& b, Instruction* i) {
  constexpr std::size_t kParts = 6;  // tcgen05.ld.sync.aligned.32x32b.x8.b32
  const bool loads = s.parts[1] == "ld";
  if (s.parts.size() != kParts + 1 || !s.has("32x32b")) return decode_unknown(s, b, i);
  const std::vector<Operand> registers = elements_of(s.operands.at(loads ? 0 : 1));
  std::string count = "x";
  count += std::to_string(registers.size());
  if (!s.has(count)) throw Fault("the number of registers is not that of the instruction");
  std::vector<Slot> list;
  append_address(b, s.operands.at(loads ? 1 : 0), &list);
  for (const Operand& r : registers) list.push_back(loads ? b.target(r) : b.source(r, 4));
  if (std::find(list.begin() + kAddressEntries, list.end(), kNoSlot) != list.end()) {
    throw Fault("a result of tcgen05.ld has no register");
  }
  b.set_list(i, list);
  i->run = loads ? &run_load : &run_store;
}

void decode_tcgen05(const Statement& s, Builder& b, Instruction* i) {
  const std::string& what = s.parts.at(1);
  i->detail = s.has("cta_group::2") ? 2 : 1;
  if (what == "alloc") {
    std::vector<Slot> list;
    append_address(b, s.operands.at(0), &list);
    list.push_back(b.source(s.operands.at(1), 4));
    b.set_list(i, list);
    i->run = &run_alloc;
  } else if (what == "dealloc") {
    i->slots[0] = b.source(s.operands.at(0), 4);
    i->slots[1] = b.source(s.operands.at(1), 4);
    i->run = &run_dealloc;
  } else if (what == "relinquish_alloc_permit") {
    i->run = &run_relinquish;
  } else if (what == "mma") {
    decode_umma(s, b, i);
  } else if (what == "cp") {
    decode_scale_copy(s, b, i);
  } else if (what == "commit") {
    decode_commit(s, b, i);
  } else if (what == "ld" || what == "st") {
    decode_block(s, b, i);
  } else if (what == "wait::ld") {
    i->run = &run_wait<Agent::kTensorLoads>;
  } else if (what == "wait::st") {
    i->run = &run_wait<Agent::kTensorStores>;
  } else if (what == "fence::before_thread_sync") {
    i->run = &run_fence_before;
  } else if (what == "fence::after_thread_sync") {
    i->run = &run_fence_after;
  } else {
    decode_unknown(s, b, i);
  }
}

}  // namespace

void check_cta_group(Warp& warp, int group) {
  Cta& cta = warp.cta();
  if (group == 2 && (cta.rank() ^ 1) >= cta.cluster().ctas.size()) {
    throw Fault("cta_group::2 needs a cluster of pairs of CTAs");
  }
  int& used = cta.tensor().cta_group;
  if (used != 0 && used != group) {
    throw Fault("a kernel has tcgen05 instructions of cta_group::1 and of cta_group::2");
  }
  used = group;
}

Cta& other_of_pair(Warp& warp) { return *warp.cta().cluster().ctas[warp.cta().rank() ^ 1]; }

void check_issuer(Warp& warp, int lane, int group, const char* what) {
  if (warp.tensor.issuing_lane != -1 && warp.tensor.issuing_lane != lane) {
    throw Fault("two lanes of a warp issue tcgen05.mma or .cp, whose order is not known");
  }
  warp.tensor.issuing_lane = lane;
  if (group == 1) return;
  if (warp.cta().rank() % 2 != 0) throw Fault(std::string("the odd CTA of a pair issues ") + what);
  if (other_of_pair(warp).is_done()) {
    throw Fault(std::string(what) + " of a pair is issued when its other CTA has ended");
  }
}

int single_lane(std::uint32_t lanes, const char* what) {
  if (std::popcount(lanes) != 1) throw Fault(std::string(what) + " is issued by several threads");
  return std::countr_zero(lanes);
}

void add_tensor_opcodes(OpcodeTable& table) { table["tcgen05"] = &decode_tcgen05; }

}  // namespace sonicmoe::emulator
