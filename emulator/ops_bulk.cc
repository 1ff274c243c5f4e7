// cp.async.bulk: copies of blocks and of boxes of tensors, and prefetch.
#include <bit>
#include <cstring>

#include "deferred.h"
#include "ops_copy.h"
#include "tensor_copy.h"

namespace sonicmoe::emulator {
namespace {

// The list of a bulk copy. An operand that an instruction does not have is kNoSlot.
constexpr std::size_t kTarget = 0;  // an address, as the next two; a tensor's is that of its map
constexpr std::size_t kSource = kTarget + kAddressEntries;
constexpr std::size_t kBarrier = kSource + kAddressEntries;
constexpr std::size_t kSize = kBarrier + kAddressEntries;
constexpr std::size_t kMask = kSize + 1;  // of the CTAs that a multicast writes to
constexpr std::size_t kCoordinates = kMask + 1;

constexpr std::uint32_t kBulkAlignment = 16;
constexpr std::uint32_t kTensorAlignment = 128;
constexpr std::size_t kBarrierBytes = sizeof(std::uint64_t);

/// The target of a copy into the shared memory of one CTA.
struct Landing {
  Cta* cta;
  std::uint32_t offset;
  std::byte* data;
  std::byte* barrier;
};

/// Which CTA may have the mbarrier of a copy, besides that of the target: with .cta_group::2 the
/// other one of its pair.
enum class BarrierOf : std::uint32_t { kTarget, kPair };

Landing landing(Cta& runs, std::uint32_t target, std::uint32_t barrier, std::uint32_t bytes,
                BarrierOf where) {
  Cta& cta = runs.owner(target);
  const std::uint32_t ranks = runs.owner(barrier).rank() ^ cta.rank();
  if (ranks > (where == BarrierOf::kPair ? 1 : 0)) {
    throw Fault("a bulk copy has its target and its mbarrier in different CTAs");
  }
  return {&cta, target & kOffsetMask, runs.shared(target, bytes),
          runs.shared(barrier, kBarrierBytes)};
}

/// One for each CTA that the copy of a lane writes to.
std::vector<Landing> landings(Warp& warp, const Instruction& i, int lane, std::uint32_t bytes) {
  const Slot* list = list_of(warp, i);
  const auto where = static_cast<BarrierOf>(i.detail);
  Cta& cta = warp.cta();
  const std::uint32_t target = shared_address_at(warp, list + kTarget, lane);
  const std::uint32_t barrier = shared_address_at(warp, list + kBarrier, lane);
  check_aligned(barrier, kBarrierBytes, "the address of an mbarrier");
  if (list[kMask] == kNoSlot) return {landing(cta, target, barrier, bytes, where)};
  std::vector<Landing> all;
  std::uint32_t mask = warp.lanes_of<std::uint16_t>(list[kMask])[lane];
  for (; mask != 0; mask &= mask - 1) {
    const std::uint32_t rank = static_cast<std::uint32_t>(std::countr_zero(mask) + 1) << kRankShift;
    all.push_back(
        landing(cta, (target & kOffsetMask) | rank, (barrier & kOffsetMask) | rank, bytes, where));
  }
  return all;
}

/// Defers write(landing, stamp, known), which puts `bytes` into shared memory, for each CTA on its
/// own. The stamp is that of the copy, and `known` is what its warp knew.
template <class Write>
void defer_landings(Warp& warp, const Instruction& i, const std::vector<Landing>& all,
                    std::uint32_t bytes, const Write& write) {
  const ClockCopy known = warp.clock().release();
  for (const Landing& to : all) {
    defer(warp, i, [to, bytes, write, known] {
      if (to.cta->is_done()) {
        throw Fault("a bulk copy arrives in shared memory of a CTA that has ended");
      }
      Cluster& cluster = to.cta->cluster();
      const Stamp copied = mbarrier::clock_of(cluster, to.barrier, *known).copy();
      SharedPass pass(*to.cta, copied, *known);
      pass.write(to.offset, bytes);
      write(to, copied, *known);
      to.cta->note_async_write(to.offset, bytes);
      mbarrier::complete(cluster, to.barrier, bytes);
    });
  }
}

/// Bytes of this CTA's shared memory.
struct Span {
  std::uint32_t offset, bytes;
};

/// Defers read(), which takes `span`, into the lane's open bulk group.
template <class Read>
void defer_store(Warp& warp, const Instruction& i, int lane, Span span, Read read) {
  Cta& cta = warp.cta();
  const Stamp stored = warp.clock().issue(Agent::kBulkStores);
  CopyTask copy =
      defer(warp, i, [&cta, span, stored, known = warp.clock().release(), read = std::move(read)] {
        if (cta.is_done()) throw Fault("a bulk copy reads shared memory of a CTA that has ended");
        SharedPass pass(cta, stored, *known);
        pass.read(span.offset, span.bytes);
        read();
      });
  warp.bulk_copies().issue(std::move(copy), 1u << lane, stored.number);
}

std::uint32_t bulk_bytes(Warp& warp, const Slot* list, int lane) {
  const std::uint32_t bytes = warp.lanes_of<std::uint32_t>(list[kSize])[lane];
  check_aligned(bytes, kBulkAlignment, "the size of a bulk copy");
  return bytes;
}

/// From global memory to shared memory.
Next run_load(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  warp.cta().check_global_read(warp.index());
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t bytes = bulk_bytes(warp, list, lane);
    const std::uint64_t source = address_at(warp, list + kSource, lane);
    check_aligned(source, kBulkAlignment, "the source of a bulk copy");
    const std::vector<Landing> all = landings(warp, i, lane, bytes);
    for (const Landing& to : all) {
      check_aligned(to.offset, kBulkAlignment, "the target of a bulk copy");
    }
    warp.grid().memory().check(source, bytes);
    defer_landings(warp, i, all, bytes,
                   [source, bytes](const Landing& to, Stamp, const VectorClock&) {
                     std::memcpy(to.data, reinterpret_cast<const std::byte*>(source), bytes);
                   });
  });
  return Next::kAdvance;
}

/// From this CTA's shared memory to the shared memory of any CTA of the cluster.
Next run_shared_copy(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t bytes = bulk_bytes(warp, list, lane);
    const std::uint32_t source = shared_address_at(warp, list + kSource, lane);
    check_aligned(source, kBulkAlignment, "the source of a bulk copy");
    const std::vector<Landing> all = landings(warp, i, lane, bytes);
    check_aligned(all.front().offset, kBulkAlignment, "the target of a bulk copy");
    const std::byte* from = warp.cta().own_shared(source, bytes);
    warp.cta().check_async_read(source, bytes, warp.index());
    Cta& cta = warp.cta();
    defer_landings(
        warp, i, all, bytes,
        [from, bytes, &cta, source](const Landing& to, Stamp by, const VectorClock& known) {
          SharedPass pass(cta, by, known);
          pass.read(source, bytes);
          std::memmove(to.data, from, bytes);
        });
  });
  return Next::kAdvance;
}

/// From shared memory to global memory.
Next run_store(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t bytes = bulk_bytes(warp, list, lane);
    const std::uint64_t target = address_at(warp, list + kTarget, lane);
    const std::uint32_t source = shared_address_at(warp, list + kSource, lane);
    check_aligned(target, kBulkAlignment, "the target of a bulk copy");
    check_aligned(source, kBulkAlignment, "the source of a bulk copy");
    const std::byte* from = warp.cta().own_shared(source, bytes);
    warp.cta().check_async_read(source, bytes, warp.index());
    warp.grid().memory().check(target, bytes);
    defer_store(warp, i, lane, {source, bytes}, [target, from, bytes] {
      std::memcpy(reinterpret_cast<std::byte*>(target), from, bytes);
    });
  });
  return Next::kAdvance;
}

TensorMap tensor_map_at(Warp& warp, std::uint64_t address, int lane) {
  TensorMap map;
  std::memcpy(&map, warp.generic(lane, address, sizeof map), sizeof map);
  if (map.magic != TensorMap::kMagic) throw Fault("there is no tensor map at the address");
  return map;
}

/// The box of a lane, checked. `map` are the entries of the map's address.
TensorBox box_of(Warp& warp, const Instruction& i, const Slot* map_entries, int lane) {
  const Slot* list = list_of(warp, i);
  const TensorMap map = tensor_map_at(warp, address_at(warp, map_entries, lane), lane);
  const std::size_t dimensions = i.count - kCoordinates;
  if (map.rank != dimensions) {
    throw Fault("a copy of " + std::to_string(dimensions) + " dimensions has a tensor map of " +
                std::to_string(map.rank));
  }
  Coordinates at{};
  for (std::size_t d = 0; d < dimensions; ++d) {
    at[d] = warp.lanes_of<std::int32_t>(list[kCoordinates + d])[lane];
  }
  const TensorBox box(map, at);
  box.check(warp.grid().memory());
  return box;
}

Next run_tensor_load(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  warp.cta().check_global_read(warp.index());
  for_each_lane(lanes, [&](int lane) {
    const TensorBox box = box_of(warp, i, list + kSource, lane);
    const std::vector<Landing> all = landings(warp, i, lane, box.bytes());
    for (const Landing& to : all) {
      check_aligned(to.offset, kTensorAlignment, "the target of a tensor copy");
    }
    defer_landings(warp, i, all, box.bytes(), [box](const Landing& to, Stamp, const VectorClock&) {
      box.load(to.data, to.offset);
    });
  });
  return Next::kAdvance;
}

/// tile::gather4: four rows by their coordinates. The coordinates are a column and the rows; a row
/// outside of the tensor is zeros.
Next run_gather(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  static constexpr std::uint32_t kRows = 4;
  const Slot* list = list_of(warp, i);
  warp.cta().check_global_read(warp.index());
  for_each_lane(lanes, [&](int lane) {
    const TensorMap map = tensor_map_at(warp, address_at(warp, list + kSource, lane), lane);
    if (map.rank != 2 || map.boxes[1] != 1) {
      throw Fault("gather4 needs a tensor map of two dimensions with boxes of one row");
    }
    const auto at = [&](std::size_t k) {
      return warp.lanes_of<std::int32_t>(list[kCoordinates + k])[lane];
    };
    std::vector<TensorBox> rows;
    for (std::uint32_t r = 0; r < kRows; ++r) {
      rows.emplace_back(map, Coordinates{at(0), at(1 + r)});
      rows.back().check(warp.grid().memory());
    }
    const std::uint32_t row_bytes = rows[0].bytes();
    const std::vector<Landing> all = landings(warp, i, lane, kRows * row_bytes);
    for (const Landing& to : all) {
      check_aligned(to.offset, kTensorAlignment, "the target of gather4");
    }
    defer_landings(warp, i, all, kRows * row_bytes,
                   [rows, row_bytes](const Landing& to, Stamp, const VectorClock&) {
                     for (std::uint32_t r = 0; r < kRows; ++r) {
                       rows[r].load(to.data + r * row_bytes, to.offset + r * row_bytes);
                     }
                   });
  });
  return Next::kAdvance;
}

Next run_tensor_store(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  for_each_lane(lanes, [&](int lane) {
    const TensorBox box = box_of(warp, i, list + kTarget, lane);
    const std::uint32_t source = shared_address_at(warp, list + kSource, lane);
    check_aligned(source, kTensorAlignment, "the source of a tensor copy");
    const std::byte* from = warp.cta().own_shared(source, box.bytes());
    warp.cta().check_async_read(source, box.bytes(), warp.index());
    defer_store(warp, i, lane, {source, box.bytes()},
                [box, source, from] { box.store(from, source); });
  });
  return Next::kAdvance;
}

Next run_commit(Warp& warp, const Instruction&, std::uint32_t lanes) {
  warp.bulk_copies().commit(lanes);
  return Next::kAdvance;
}

/// wait_group with and without .read, which are equal here because a copy reads and writes in one
/// step. Value: the number of groups that may stay.
Next run_wait(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  warp.wait_for_group(Agent::kBulkStores, lanes, i.value);
  return Next::kAdvance;
}

/// A prefetch of a tensor map or of a box: has no effect, but the map must be one. List: the map.
Next run_map_prefetch(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const Slot* list = list_of(warp, i);
  for_each_lane(lanes, [&](int lane) { tensor_map_at(warp, address_at(warp, list, lane), lane); });
  return Next::kAdvance;
}

Next run_nothing(Warp&, const Instruction&, std::uint32_t) { return Next::kAdvance; }

void append_nothing(std::size_t entries, std::vector<Slot>* list) {
  list->insert(list->end(), entries, kNoSlot);
}

void append_coordinates(const Statement& s, const Operand& tensor, Builder& b,
                        std::vector<Slot>* list) {
  const std::vector<Operand>& coordinates = tensor.elements.at(1).elements;
  constexpr std::size_t kGathered = 5;  // a column and four rows
  const bool fits = s.has("tile::gather4")
                        ? s.parts.at(4) == "2d" && coordinates.size() == kGathered
                        : s.parts.at(4) == std::to_string(coordinates.size()) + "d";
  if (!fits) throw Fault("the tensor has another number of coordinates");
  for (const Operand& o : coordinates) list->push_back(b.source(o, 4));
}

bool is_multicast(const Statement& s) { return s.has("multicast::cluster"); }

/// shared, [map, {coordinates}], [mbarrier] {, mask} {, policy}  or  [map, {coordinates}], [shared]
void decode_tensor(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("im2col") || s.has("tile::scatter4")) return decode_unknown(s, b, i);
  const bool loads = s.parts.at(5) != "global";
  const bool gathers = s.has("tile::gather4");
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  append_address(b, s.operands.at(1), &list);
  if (loads) {
    append_address(b, s.operands.at(2), &list);
  } else {
    append_nothing(kAddressEntries, &list);
  }
  append_nothing(1, &list);
  list.push_back(is_multicast(s) ? b.source(s.operands.at(3), 2) : kNoSlot);
  append_coordinates(s, s.operands[loads ? 1 : 0], b, &list);
  b.set_list(i, list);
  i->detail =
      static_cast<std::uint32_t>(s.has("cta_group::2") ? BarrierOf::kPair : BarrierOf::kTarget);
  i->run = gathers ? &run_gather : loads ? &run_tensor_load : &run_tensor_store;
}

/// [target], [source], size {, [mbarrier]} {, mask} {, policy}
void decode_block(const Statement& s, Builder& b, Instruction* i) {
  const bool stores = s.parts.at(3) == "global";
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  append_address(b, s.operands.at(1), &list);
  if (stores) {
    append_nothing(kAddressEntries, &list);
  } else {
    append_address(b, s.operands.at(3), &list);
  }
  list.push_back(b.source(s.operands.at(2), 4));
  list.push_back(is_multicast(s) ? b.source(s.operands.at(4), 2) : kNoSlot);
  b.set_list(i, list);
  if (stores) {
    i->run = s.has("cp_mask") ? nullptr : &run_store;
  } else {
    i->run = s.parts.at(4) == "global" ? &run_load : &run_shared_copy;
  }
  if (i->run == nullptr) decode_unknown(s, b, i);
}

void decode_map_prefetch(const Operand& address, Builder& b, Instruction* i) {
  std::vector<Slot> list;
  append_address(b, address, &list);
  b.set_list(i, list);
  i->run = &run_map_prefetch;
}

}  // namespace

void decode_bulk(const Statement& s, Builder& b, Instruction* i) {
  const std::string& what = s.parts.at(3);
  if (what == "tensor") return decode_tensor(s, b, i);
  if (what.starts_with("shared") || what == "global") return decode_block(s, b, i);
  if (what == "commit_group") {
    i->run = &run_commit;
  } else if (what == "wait_group") {
    i->value = s.operands.at(0).value;
    i->run = &run_wait;
  } else if (what == "prefetch" && s.has("tensor")) {
    decode_map_prefetch(s.operands.at(0), b, i);
  } else if (what == "prefetch") {
    i->run = &run_nothing;
  } else {
    decode_unknown(s, b, i);
  }
}

void decode_prefetch(const Statement& s, Builder& b, Instruction* i) {
  if (s.has("tensormap")) return decode_map_prefetch(s.operands.at(0), b, i);
  i->run = &run_nothing;
}

}  // namespace sonicmoe::emulator
