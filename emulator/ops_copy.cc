// cp.async, its groups and its mbarrier arrivals, and st.async.
#include "ops_copy.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "deferred.h"

namespace sonicmoe::emulator {
namespace {

/// The meaning of the operand of cp.async after its size.
enum class Limit : std::uint32_t { kNone, kSourceBytes, kIgnored, kUnlessIgnored };

/// The copy of one lane.
struct Piece {
  std::byte* target;
  std::uint32_t target_offset;
  const std::byte* source;
  std::uint32_t bytes;  ///< of the source; zeros follow
};

std::uint32_t source_bytes(Warp& warp, const Instruction& i, int lane, std::uint32_t size) {
  switch (static_cast<Limit>(i.detail)) {
    case Limit::kNone:
      return size;
    case Limit::kSourceBytes:
      return std::min(warp.lanes_of<std::uint32_t>(i.slots[0])[lane], size);
    case Limit::kIgnored:
      return (warp.predicate(i.slots[0]) >> lane & 1) != 0 ? 0 : size;
    case Limit::kUnlessIgnored:
      return (warp.predicate(i.slots[0]) >> lane & 1) != 0 ? size : 0;
  }
  return size;
}

/// List: target, source. Slots: the operand after the size. Value: the size.
Next run_copy(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  const auto size = static_cast<std::uint32_t>(i.value);
  std::vector<Piece> pieces;
  pieces.reserve(kLanes);
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t target = shared_address_at(warp, list, lane);
    const std::uint64_t source = address_at(warp, list + kAddressEntries, lane);
    const std::uint32_t bytes = source_bytes(warp, i, lane, size);
    check_aligned(target, size, "the target of cp.async");
    if (bytes > 0) {  // else the source is not read, and may be anything
      check_aligned(source, size, "the source of cp.async");
      warp.grid().memory().check(source, bytes);
    }
    pieces.push_back({warp.cta().own_shared(target, size), target,
                      reinterpret_cast<const std::byte*>(source), bytes});
  });
  Cta& cta = warp.cta();
  const int index = warp.index();
  const Stamp written = warp.clock().issue(Agent::kCopies);
  CopyTask copy = defer(
      warp, i,
      [&cta, index, pieces = std::move(pieces), size, written, known = warp.clock().release()] {
        SharedPass pass(cta, written, *known);
        for (const Piece& p : pieces) {
          pass.write(p.target_offset, size);
          cta.note_write(p.target_offset, size, index);
          if (p.bytes > 0) std::memcpy(p.target, p.source, p.bytes);
          std::memset(p.target + p.bytes, 0, size - p.bytes);
        }
      });
  warp.copies().issue(std::move(copy), lanes, written.number);
  return Next::kAdvance;
}

/// [target], [source], size {, source size or predicate} {, cache policy}
void decode_copy(const Statement& s, Builder& b, Instruction* i) {
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  append_address(b, s.operands.at(1), &list);
  b.set_list(i, list);
  i->value = s.operands.at(2).value;
  if (i->value != 16 && (s.has("cg") || (i->value != 4 && i->value != 8))) {
    throw Fault("cp.async cannot copy " + std::to_string(i->value) + " bytes");
  }
  Limit limit = Limit::kNone;
  const std::size_t policies = s.has("L2::cache_hint") ? 1 : 0;
  if (s.operands.size() > 3 + policies) {
    const Operand& o = s.operands[3];
    const bool is_predicate = o.kind == Operand::Kind::kRegister && b.width(o) == 0;
    limit = Limit::kSourceBytes;
    if (is_predicate) limit = o.negated ? Limit::kUnlessIgnored : Limit::kIgnored;
    i->slots[0] = b.source(o, is_predicate ? 0 : 4);
  }
  i->detail = static_cast<std::uint32_t>(limit);
  i->run = &run_copy;
}

Next run_commit(Warp& warp, const Instruction&, std::uint32_t lanes) {
  warp.copies().commit(lanes);
  return Next::kAdvance;
}

/// Value: the number of groups that may stay.
Next run_wait_group(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  warp.wait_for_group(Agent::kCopies, lanes, i.value);
  return Next::kAdvance;
}

Next run_wait_all(Warp& warp, const Instruction&, std::uint32_t lanes) {
  warp.copies().commit(lanes);
  warp.wait_for_group(Agent::kCopies, lanes, 0);
  return Next::kAdvance;
}

/// Bits of Instruction::detail of cp.async.mbarrier.arrive.
constexpr std::uint32_t kIsCounted = 1;  // .noinc: one of the arrivals that are expected anyway
constexpr std::uint32_t kIsGeneric = 2;  // the address

/// List: mbarrier. The arrivals are one more copy, which finishes the earlier ones of its lanes.
Next run_arrive(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  std::vector<std::byte*> barriers;
  barriers.reserve(kLanes);
  for_each_lane(lanes, [&](int lane) {
    constexpr std::size_t kBytes = sizeof(std::uint64_t);
    const std::uint64_t address = address_at(warp, list, lane);
    check_aligned(address, kBytes, "the address of an mbarrier");
    std::byte* at = (i.detail & kIsGeneric) != 0
                        ? warp.generic(lane, address, kBytes)
                        : warp.cta().own_shared(static_cast<std::uint32_t>(address), kBytes);
    if ((i.detail & kIsCounted) == 0) mbarrier::expect_arrival(at);
    barriers.push_back(at);
  });
  Cluster& cluster = warp.cta().cluster();
  const Stamp copied = warp.clock().issue(Agent::kCopies);
  CopyTask arrival = defer(warp, i,
                           [&cluster, barriers = std::move(barriers), copied,
                            known = warp.clock().release(), earlier = warp.copies().take(lanes)] {
                             for (const CopyTask& copy : earlier) copy->finish();
                             const std::byte* last = nullptr;
                             for (std::byte* barrier : barriers) {
                               if (barrier != last) {
                                 BarrierClock& clock = mbarrier::clock_of(cluster, barrier, *known);
                                 clock.arrived.merge(*known);
                                 clock.arrived.add(copied);
                                 last = barrier;
                               }
                               mbarrier::arrive(cluster, barrier, 1);
                             }
                           });
  warp.copies().issue(std::move(arrival), lanes, copied.number);
  return Next::kAdvance;
}

void decode_arrive(const Statement& s, Builder& b, Instruction* i) {
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  b.set_list(i, list);
  const bool is_shared = s.has("shared") || s.has("shared::cta");
  i->detail = (s.has("noinc") ? kIsCounted : 0) | (is_shared ? 0 : kIsGeneric);
  i->run = &run_arrive;
}

/// All opcodes that begin with cp.
void decode_cp(const Statement& s, Builder& b, Instruction* i) {
  if (s.parts.size() < 3 || s.parts[1] != "async") return decode_unknown(s, b, i);
  const std::string& what = s.parts[2];
  if (what == "bulk") return decode_bulk(s, b, i);
  if (what == "mbarrier") return decode_arrive(s, b, i);
  if (what == "ca" || what == "cg") return decode_copy(s, b, i);
  if (what == "commit_group") {
    i->run = &run_commit;
  } else if (what == "wait_all") {
    i->run = &run_wait_all;
  } else if (what == "wait_group") {
    i->value = s.operands.at(0).value;
    i->run = &run_wait_group;
  } else {
    decode_unknown(s, b, i);
  }
}

/// List: target, mbarrier, then the slots of the values. Value: bytes of each.
Next run_store_async(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  const std::size_t first_value = 2 * kAddressEntries;
  const auto size = static_cast<std::size_t>(i.value);
  const std::size_t total = size * (i.count - first_value);
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t target = shared_address_at(warp, list, lane);
    const std::uint32_t barrier = shared_address_at(warp, list + kAddressEntries, lane);
    check_aligned(target, total, "the target of st.async");
    check_aligned(barrier, sizeof(std::uint64_t), "the address of an mbarrier");
    Cta& cta = warp.cta().owner(target);
    if (&warp.cta().owner(barrier) != &cta) {
      throw Fault("st.async has its target and its mbarrier in different CTAs");
    }
    std::vector<std::byte> values(total);
    for (std::size_t k = 0; first_value + k < i.count; ++k) {
      const std::byte* value = warp.lanes_of<std::byte>(list[first_value + k]) + size * lane;
      std::memcpy(values.data() + k * size, value, size);
    }
    std::byte* to = warp.cta().shared(target, total);
    std::byte* at = warp.cta().shared(barrier, sizeof(std::uint64_t));
    defer(warp, i,
          [&cta, target, to, at, values = std::move(values), known = warp.clock().release()] {
            if (cta.is_done())
              throw Fault("a word arrives in shared memory of a CTA that has ended");
            const BarrierClock& clock = mbarrier::clock_of(cta.cluster(), at, *known);
            SharedPass pass(cta, clock.copy(), *known);
            pass.write(target & kOffsetMask, values.size());
            std::memcpy(to, values.data(), values.size());
            mbarrier::complete(cta.cluster(), at, static_cast<std::uint32_t>(values.size()));
          });
  });
  return Next::kAdvance;
}

}  // namespace

/// [target], value or {values}, [mbarrier]
void decode_store_async(const Statement& s, Builder& b, Instruction* i) {
  const std::string& type = s.parts.back();
  int bits = 0;
  std::from_chars(type.data() + 1, type.data() + type.size(), bits);
  if (bits != 32 && bits != 64) throw Fault("st.async has no values of type " + type);
  const std::vector<Operand> values = elements_of(s.operands.at(1));
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  append_address(b, s.operands.at(2), &list);
  for (const Operand& o : values) {
    if (o.kind == Operand::Kind::kRegister && b.width(o) * 8 != bits) {
      throw Fault("st.async has a register of another width than its type");
    }
    list.push_back(b.source(o, bits / 8));
  }
  b.set_list(i, list);
  i->value = bits / 8;
  i->run = &run_store_async;
}

void add_copy_opcodes(OpcodeTable& table) {
  table["cp"] = &decode_cp;
  table["prefetch"] = &decode_prefetch;
  table["prefetchu"] = &decode_prefetch;
}

}  // namespace sonicmoe::emulator
