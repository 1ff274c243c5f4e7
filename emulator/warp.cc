#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "machine.h"

namespace sonicmoe::emulator {
namespace {

/// Instructions after which a warp lets others run.
constexpr int kTurn = 512;
/// In one of kRandomTurns turns a warp starts with a random fragment, because the fragment that is
/// furthest behind may spin until another fragment has done its work.
constexpr std::uint64_t kRandomTurns = 4;
constexpr int kRandomSteps = 64;

/// A lane, for its special registers.
struct Place {
  const Warp& warp;
  Cta& cta;
  std::uint32_t lane;
  std::uint32_t thread;

  const Launch& launch() const { return cta.cluster().grid().launch(); }
  Dim index() const { return cta.index(); }
  Dim cluster() const { return cta.cluster().index; }
  const Settings& settings() const { return cta.cluster().grid().settings(); }
};

using Special = std::uint32_t (*)(const Place&);

const std::map<std::string, Special, std::less<>>& special_registers() {
  using P = const Place&;
  // Never destroyed: a process may end while one of its grids runs.
  static const auto& table = *new std::map<std::string, Special, std::less<>>{
      {"%tid.x", [](P p) { return p.thread % p.launch().block.x; }},
      {"%tid.y", [](P p) { return p.thread / p.launch().block.x % p.launch().block.y; }},
      {"%tid.z", [](P p) { return p.thread / p.launch().block.x / p.launch().block.y; }},
      {"%ntid.x", [](P p) { return p.launch().block.x; }},
      {"%ntid.y", [](P p) { return p.launch().block.y; }},
      {"%ntid.z", [](P p) { return p.launch().block.z; }},
      {"%ctaid.x", [](P p) { return p.index().x; }},
      {"%ctaid.y", [](P p) { return p.index().y; }},
      {"%ctaid.z", [](P p) { return p.index().z; }},
      {"%nctaid.x", [](P p) { return p.launch().grid.x; }},
      {"%nctaid.y", [](P p) { return p.launch().grid.y; }},
      {"%nctaid.z", [](P p) { return p.launch().grid.z; }},
      {"%clusterid.x", [](P p) { return p.cluster().x; }},
      {"%clusterid.y", [](P p) { return p.cluster().y; }},
      {"%clusterid.z", [](P p) { return p.cluster().z; }},
      {"%nclusterid.x", [](P p) { return p.launch().grid.x / p.launch().cluster.x; }},
      {"%nclusterid.y", [](P p) { return p.launch().grid.y / p.launch().cluster.y; }},
      {"%nclusterid.z", [](P p) { return p.launch().grid.z / p.launch().cluster.z; }},
      {"%cluster_ctaid.x", [](P p) { return p.index().x % p.launch().cluster.x; }},
      {"%cluster_ctaid.y", [](P p) { return p.index().y % p.launch().cluster.y; }},
      {"%cluster_ctaid.z", [](P p) { return p.index().z % p.launch().cluster.z; }},
      {"%cluster_nctaid.x", [](P p) { return p.launch().cluster.x; }},
      {"%cluster_nctaid.y", [](P p) { return p.launch().cluster.y; }},
      {"%cluster_nctaid.z", [](P p) { return p.launch().cluster.z; }},
      {"%cluster_ctarank", [](P p) { return p.cta.rank(); }},
      {"%cluster_nctarank", [](P p) { return p.launch().cluster.count(); }},
      {"%laneid", [](P p) { return p.lane; }},
      {"%warpid", [](P p) { return static_cast<std::uint32_t>(p.warp.index()); }},
      {"%smid",
       [](P p) { return p.index().x % static_cast<std::uint32_t>(p.settings().multiprocessors); }},
      {"%nsmid", [](P p) { return static_cast<std::uint32_t>(p.settings().multiprocessors); }},
      {"%lanemask_eq", [](P p) { return 1u << p.lane; }},
      {"%lanemask_lt", [](P p) { return (1u << p.lane) - 1; }},
      {"%lanemask_le", [](P p) { return (2u << p.lane) - 1; }},
      {"%lanemask_gt", [](P p) { return ~((2u << p.lane) - 1); }},
      {"%lanemask_ge", [](P p) { return ~((1u << p.lane) - 1); }},
      {"%dynamic_smem_size",
       [](P p) { return static_cast<std::uint32_t>(p.launch().dynamic_shared); }},
      {"%total_smem_size", [](P p) { return static_cast<std::uint32_t>(p.cta.shared_bytes()); }},
  };
  return table;
}

Special special_register(const std::string& name) {
  const auto found = special_registers().find(name);
  if (found == special_registers().end()) {
    throw Fault("the emulator does not know the register " + name);
  }
  return found->second;
}

std::uint32_t warps_of_a_cta(const Launch& launch) {
  return (launch.block.count() + kLanes - 1) / kLanes;
}

}  // namespace

Warp::Warp(Cta& cta, int index, std::uint32_t lanes)
    : cta_(cta),
      index_(index),
      live_(lanes),
      file_(Pool<RegisterFile>::pool().take(cta.cluster().grid().launch().program->file_bytes)),
      clock_(cta.rank() * warps_of_a_cta(cta.cluster().grid().launch()) +
             static_cast<std::uint32_t>(index)) {
  const Program& program = *cta.cluster().grid().launch().program;
  local_ = std::make_unique_for_overwrite<std::byte[]>(program.local_bytes * kLanes);
  std::memset(local_.get(), 0xa5, program.local_bytes * kLanes);
  fragments_.push_back({.lanes = lanes});
  preset_file();
}

void Warp::preset_file() {
  const Program& program = *grid().launch().program;
  const bool has_constants = file_->constants_of == program.number;
  file_->constants_of = program.number;
  for (const Preset& p : program.presets) {
    if (has_constants && p.source == Preset::Source::kConstant) continue;
    if (p.bytes == 0) {
      predicate(p.slot) = static_cast<std::uint32_t>(p.bits);
      continue;
    }
    const Special special =
        p.source == Preset::Source::kSpecial ? special_register(p.special) : nullptr;
    std::uint64_t bits = p.bits;
    if (p.source == Preset::Source::kParameters) {
      bits += reinterpret_cast<std::uint64_t>(grid().parameters());
    }
    const std::uint32_t first = static_cast<std::uint32_t>(index_) * kLanes;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
      if (special != nullptr) bits = special(Place{*this, cta_, lane, first + lane});
      std::memcpy(file_->bytes() + p.slot + lane * p.bytes, &bits, p.bytes);
    }
  }
}

std::byte* Warp::local(int lane, std::uint64_t offset, std::size_t bytes) {
  const std::size_t size = grid().launch().program->local_bytes;
  if (offset + bytes > size) throw Fault("local memory is accessed out of bounds");
  return local_.get() + lane * size + offset;
}

std::byte* Warp::generic(int lane, std::uint64_t address, std::size_t bytes) {
  const std::uint64_t window = address & kWindowMask;
  if (window == kSharedWindow) return cta_.shared(static_cast<std::uint32_t>(address), bytes);
  if (window == kLocalWindow) return local(lane, address & ~kWindowMask, bytes);
  const auto parameters = reinterpret_cast<std::uint64_t>(grid().parameters());
  const bool is_parameter =
      address >= parameters && address + bytes <= parameters + grid().launch().parameters.size();
  if (!is_parameter) grid().memory().check(address, bytes);
  return reinterpret_cast<std::byte*>(address);
}

std::uint32_t Warp::guarded(const Instruction& instruction) const {
  if (instruction.guard == kNoSlot) return kAllLanes;
  std::uint32_t bits;
  std::memcpy(&bits, file_->bytes() + instruction.guard, sizeof bits);
  return instruction.guard_negated ? ~bits : bits;
}

/// Joins fragments at the same place.
void Warp::join_fragments() {
  for (std::size_t i = 0; i < fragments_.size(); ++i) {
    for (std::size_t j = fragments_.size() - 1; j > i; --j) {
      Fragment& a = fragments_[i];
      const Fragment& b = fragments_[j];
      if (a.pc != b.pc || a.ticket != -1 || b.ticket != -1) continue;
      a.lanes |= b.lanes;
      a.waits = false;
      fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(j));
    }
  }
}

/// Makes the fragment that is furthest behind the current one, of those that do not wait. False if
/// all wait.
bool Warp::choose_hindmost() {
  if (fragments_.size() > 1) join_fragments();
  stop_ = std::numeric_limits<std::uint32_t>::max();
  bool found = false;
  for (std::size_t i = 0; i < fragments_.size(); ++i) {
    if (fragments_[i].waits || (found && fragments_[i].pc > fragments_[current_].pc)) continue;
    current_ = i;
    found = true;
  }
  for (const Fragment& f : fragments_) {
    if (found && f.pc > fragments_[current_].pc) stop_ = std::min(stop_, f.pc);
  }
  return found;
}

/// Makes any fragment that does not wait the current one.
bool Warp::choose_any() {
  join_fragments();
  stop_ = std::numeric_limits<std::uint32_t>::max();
  const std::size_t first = grid().random()() % fragments_.size();
  for (std::size_t i = 0; i < fragments_.size(); ++i) {
    current_ = (first + i) % fragments_.size();
    if (!fragments_[current_].waits) return true;
  }
  return false;
}

/// Runs the current fragment until it waits, diverges or meets another one. False: nothing ran.
bool Warp::run_fragment(int* left) {
  const std::vector<Instruction>& code = grid().launch().program->code;
  bool ran = false;
  while (*left > 0) {
    --*left;
    Fragment& f = fragments_[current_];
    if (f.pc >= code.size()) throw Fault("the code ends without a return");
    const Instruction& i = code[f.pc];
    const std::uint32_t lanes = f.lanes & guarded(i);
    if (lanes == 0) {
      ++f.pc;
    } else {
      switch (i.run(*this, i, lanes)) {
        case Next::kAdvance:
          ++fragments_[current_].pc;
          break;
        case Next::kYield:
          f.last = f.pc++;
          f.waits = true;
          return true;
        case Next::kWait:
          f.last = f.pc;
          f.waits = true;
          return ran;
        case Next::kJumped:
          return true;
      }
    }
    ran = true;
    if (fragments_[current_].pc >= stop_) return true;
  }
  return ran;
}

Turn Warp::run_turn() {
  if (turns_ < cta_.late_turns) {
    ++turns_;
    return Turn::kBusy;
  }
  cta_.tidy_histories();
  for (Fragment& f : fragments_) f.waits = false;
  const bool at_random = ++turns_ % kRandomTurns == 0 && fragments_.size() > 1;
  bool ran = false;
  int left = kTurn;
  try {
    if (at_random && choose_any()) {
      int few = kRandomSteps;
      ran = run_fragment(&few);
    }
    while (left > 0 && live_ != 0 && choose_hindmost()) ran = run_fragment(&left) || ran;
  } catch (const Fault& fault) {
    throw Fault(std::string(fault.what()) + " (" + where() + ")");
  }
  return left == 0 ? Turn::kBusy : ran ? Turn::kPolled : Turn::kNothing;
}

void Warp::jump(std::uint32_t lanes, std::uint32_t target) {
  Fragment& f = fragments_[current_];
  const std::uint32_t stay = f.lanes & ~lanes;
  const std::uint32_t behind = f.pc + 1;
  f = {.lanes = lanes, .pc = target};
  if (stay != 0) fragments_.push_back({.lanes = stay, .pc = behind});
}

void Warp::exit(std::uint32_t lanes) {
  Fragment& f = fragments_[current_];
  live_ &= ~lanes;
  f.lanes &= ~lanes;
  ++f.pc;
  grid().note_progress();
  if (f.lanes == 0) {
    fragments_.erase(fragments_.begin() + static_cast<std::ptrdiff_t>(current_));
    current_ = 0;
  }
}

void Warp::wait_for_group(Agent agent, std::uint32_t lanes, std::int64_t keep) {
  LaneCopies& copies = agent == Agent::kCopies       ? copies_
                       : agent == Agent::kBulkStores ? bulk_copies_
                                                     : products_;
  copies.wait(lanes, keep);
  clock_.complete(agent, copies.oldest().value_or(clock_.last(agent).number + 1) - 1);
}

std::string Warp::where() const {
  const Program& program = *cta_.cluster().grid().launch().program;
  std::string text = "CTA " + std::to_string(cta_.index().x) + ", warp " + std::to_string(index_);
  for (const Fragment& f : fragments_) {
    char lanes[16];
    std::snprintf(lanes, sizeof lanes, "%08x", f.lanes);
    const std::uint32_t at = f.waits ? f.last : f.pc;
    text += std::string("; lanes ") + lanes + " at ";
    text += at < program.code.size()
                ? program.texts[at] + ", PTX line " + std::to_string(program.code[at].line)
                : "the end";
  }
  return text;
}

}  // namespace sonicmoe::emulator
