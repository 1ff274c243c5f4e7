// Instructions that exchange values between the lanes of a warp: shfl, vote, match, redux, elect,
// activemask.
#include <algorithm>
#include <bit>

#include "lanes.h"

namespace sonicmoe::emulator {
namespace {

/// The value that a lane reads from a lane that does not take part.
constexpr std::uint32_t kGarbage = 0xdeadbeef;

/// Whether every lane that `lanes` name in their member masks stands here. Throws Fault if a lane
/// is no member of its own mask.
bool is_gathered(Warp& warp, Slot masks, std::uint32_t lanes) {
  std::uint32_t members = 0;
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t mask = warp.lanes_of<std::uint32_t>(masks)[lane];
    if ((mask >> lane & 1) == 0) throw Fault("a lane is missing from its own member mask");
    members |= mask;
  });
  return warp.has_all(members);
}

enum class Shuffle : std::uint32_t { kUp, kDown, kButterfly, kIndex };

struct ShuffleSource {
  int lane;
  bool in_range;
};

ShuffleSource shuffle_source(Shuffle mode, int lane, std::uint32_t b, std::uint32_t c) {
  const int offset = static_cast<int>(b & 31);
  const int clamp = static_cast<int>(c & 31);
  const int segment = static_cast<int>(c >> 8 & 31);
  const int last = (lane & segment) | (clamp & ~segment);
  const int first = lane & segment;
  ShuffleSource s{};
  switch (mode) {
    case Shuffle::kUp:
      s.lane = lane - offset;
      s.in_range = s.lane >= last;
      break;
    case Shuffle::kDown:
      s.lane = lane + offset;
      s.in_range = s.lane <= last;
      break;
    case Shuffle::kButterfly:
      s.lane = lane ^ offset;
      s.in_range = s.lane <= last;
      break;
    case Shuffle::kIndex:
      s.lane = first | (offset & ~segment);
      s.in_range = s.lane <= last;
      break;
  }
  if (!s.in_range) s.lane = lane;
  return s;
}

/// Slots: value, predicate, source, b, c, member mask.
Next run_shuffle(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!is_gathered(warp, i.slots[5], lanes)) return Next::kWait;
  std::array<std::uint32_t, kLanes> before;
  std::copy_n(warp.lanes_of<std::uint32_t>(i.slots[2]), kLanes, before.begin());
  for_each_lane(lanes, [&](int lane) {
    const ShuffleSource s = shuffle_source(static_cast<Shuffle>(i.detail), lane,
                                           warp.lanes_of<std::uint32_t>(i.slots[3])[lane],
                                           warp.lanes_of<std::uint32_t>(i.slots[4])[lane]);
    const bool present = (lanes >> s.lane & 1) != 0;
    if (i.slots[0] != kNoSlot) {
      warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = present ? before[s.lane] : kGarbage;
    }
    write_predicate_bit(warp, i.slots[1], lane, s.in_range);
  });
  return Next::kAdvance;
}

/// d or d|p into two slots.
void decode_targets(const Operand& o, Builder& b, Instruction* i) {
  if (o.kind == Operand::Kind::kPair) {
    i->slots[0] = b.target(o.elements[0]);
    i->slots[1] = b.target(o.elements[1]);
  } else {
    i->slots[0] = b.target(o);
  }
}

void decode_shuffle(const Statement& s, Builder& b, Instruction* i) {
  if (!s.has("sync")) throw Fault("shfl without .sync is not emulated");
  decode_targets(s.operands.at(0), b, i);
  for (int k = 1; k <= 4; ++k) i->slots[k + 1] = b.source(s.operands.at(k), 4);
  i->detail = static_cast<std::uint32_t>(s.has("up")     ? Shuffle::kUp
                                         : s.has("down") ? Shuffle::kDown
                                         : s.has("bfly") ? Shuffle::kButterfly
                                                         : Shuffle::kIndex);
  i->run = &run_shuffle;
}

enum class Vote : std::uint32_t { kAny, kAll, kUniform, kBallot };

/// Slots: target, -, predicate, member mask. The value says whether the predicate is negated.
Next run_vote(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!is_gathered(warp, i.slots[3], lanes)) return Next::kWait;
  const std::uint32_t bits =
      i.value != 0 ? ~warp.predicate(i.slots[2]) : warp.predicate(i.slots[2]);
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t members = warp.lanes_of<std::uint32_t>(i.slots[3])[lane] & lanes;
    const std::uint32_t set = bits & members;
    switch (static_cast<Vote>(i.detail)) {
      case Vote::kBallot:
        warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = set;
        break;
      case Vote::kAny:
        write_predicate_bit(warp, i.slots[0], lane, set != 0);
        break;
      case Vote::kAll:
        write_predicate_bit(warp, i.slots[0], lane, set == members);
        break;
      case Vote::kUniform:
        write_predicate_bit(warp, i.slots[0], lane, set == members || set == 0);
        break;
    }
  });
  return Next::kAdvance;
}

void decode_vote(const Statement& s, Builder& b, Instruction* i) {
  if (!s.has("sync")) throw Fault("vote without .sync is not emulated");
  i->slots[0] = b.target(s.operands.at(0));
  i->slots[2] = b.source(s.operands.at(1), 0);
  i->slots[3] = b.source(s.operands.at(2), 4);
  i->value = s.operands[1].negated;
  i->detail = static_cast<std::uint32_t>(s.has("any")   ? Vote::kAny
                                         : s.has("all") ? Vote::kAll
                                         : s.has("uni") ? Vote::kUniform
                                                        : Vote::kBallot);
  i->run = &run_vote;
}

/// Slots: mask, predicate, value, member mask.
template <class T, bool kAll>
Next run_match(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!is_gathered(warp, i.slots[3], lanes)) return Next::kWait;
  const T* values = warp.lanes_of<T>(i.slots[2]);
  std::array<std::uint32_t, kLanes> equal{};
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t members = warp.lanes_of<std::uint32_t>(i.slots[3])[lane] & lanes;
    for_each_lane(members, [&](int other) {
      equal[lane] |= std::uint32_t{values[other] == values[lane]} << other;
    });
    if (kAll && equal[lane] != members) equal[lane] = 0;
  });
  for_each_lane(lanes, [&](int lane) {
    if (i.slots[0] != kNoSlot) warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = equal[lane];
    write_predicate_bit(warp, i.slots[1], lane, equal[lane] != 0);
  });
  return Next::kAdvance;
}

void decode_match(const Statement& s, Builder& b, Instruction* i) {
  const bool wide = s.parts.back() == "b64";
  decode_targets(s.operands.at(0), b, i);
  i->slots[2] = b.source(s.operands.at(1), wide ? 8 : 4);
  i->slots[3] = b.source(s.operands.at(2), 4);
  if (s.has("all")) {
    i->run = wide ? &run_match<std::uint64_t, true> : &run_match<std::uint32_t, true>;
  } else {
    i->run = wide ? &run_match<std::uint64_t, false> : &run_match<std::uint32_t, false>;
  }
}

struct Add {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a + b; }
};
struct And {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a & b; }
};
struct Or {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a | b; }
};
struct Xor {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a ^ b; }
};
template <class T>
struct Min {
  T operator()(T a, T b) const { return std::min(a, b); }
};
template <class T>
struct Max {
  T operator()(T a, T b) const { return std::max(a, b); }
};

/// Slots: target, -, value, member mask.
template <class T, class Operation>
Next run_reduction(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!is_gathered(warp, i.slots[3], lanes)) return Next::kWait;
  std::array<T, kLanes> result{};
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t members = warp.lanes_of<std::uint32_t>(i.slots[3])[lane] & lanes;
    const T* values = warp.lanes_of<T>(i.slots[2]);
    T sum = values[std::countr_zero(members)];
    for_each_lane(members & (members - 1),
                  [&](int other) { sum = Operation{}(sum, values[other]); });
    result[lane] = sum;
  });
  for_each_lane(lanes, [&](int lane) { warp.lanes_of<T>(i.slots[0])[lane] = result[lane]; });
  return Next::kAdvance;
}

void decode_reduction(const Statement& s, Builder& b, Instruction* i) {
  const bool is_signed = s.parts.back() == "s32";
  i->slots[0] = b.target(s.operands.at(0));
  i->slots[2] = b.source(s.operands.at(1), 4);
  i->slots[3] = b.source(s.operands.at(2), 4);
  const auto choose = [&](const char* name, Handler for_unsigned, Handler for_signed) {
    if (s.has(name)) i->run = is_signed ? for_signed : for_unsigned;
  };
  using U = std::uint32_t;
  using S = std::int32_t;
  choose("add", &run_reduction<U, Add>, &run_reduction<U, Add>);
  choose("and", &run_reduction<U, And>, &run_reduction<U, And>);
  choose("or", &run_reduction<U, Or>, &run_reduction<U, Or>);
  choose("xor", &run_reduction<U, Xor>, &run_reduction<U, Xor>);
  choose("min", &run_reduction<U, Min<U>>, &run_reduction<S, Min<S>>);
  choose("max", &run_reduction<U, Max<U>>, &run_reduction<S, Max<S>>);
  if (i->run == nullptr) decode_unknown(s, b, i);
}

/// Slots: leader, predicate, member mask.
Next run_elect(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  if (!is_gathered(warp, i.slots[2], lanes)) return Next::kWait;
  for_each_lane(lanes, [&](int lane) {
    const std::uint32_t members = warp.lanes_of<std::uint32_t>(i.slots[2])[lane] & lanes;
    const int leader = std::countr_zero(members);
    if (i.slots[0] != kNoSlot) {
      warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = static_cast<std::uint32_t>(leader);
    }
    write_predicate_bit(warp, i.slots[1], lane, lane == leader);
  });
  return Next::kAdvance;
}

void decode_elect(const Statement& s, Builder& b, Instruction* i) {
  decode_targets(s.operands.at(0), b, i);
  i->slots[2] = b.source(s.operands.at(1), 4);
  i->run = &run_elect;
}

Next run_active(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  for_each_lane(lanes, [&](int lane) { warp.lanes_of<std::uint32_t>(i.slots[0])[lane] = lanes; });
  return Next::kAdvance;
}

void decode_active(const Statement& s, Builder& b, Instruction* i) {
  i->slots[0] = b.target(s.operands.at(0));
  i->run = &run_active;
}

}  // namespace

void add_lane_opcodes(OpcodeTable& table) {
  table["shfl"] = &decode_shuffle;
  table["vote"] = &decode_vote;
  table["match"] = &decode_match;
  table["redux"] = &decode_reduction;
  table["elect"] = &decode_elect;
  table["activemask"] = &decode_active;
}

}  // namespace sonicmoe::emulator
