#include "clocks.h"

#include <algorithm>

#include "program.h"

namespace sonicmoe::emulator {
namespace {

/// Different accesses after which those that no unit has any more are dropped.
constexpr std::size_t kManyAccesses = 4096;

}  // namespace

void VectorClock::add(Stamp e) {
  if (e.agent >= numbers_.size()) numbers_.resize(e.agent + 1);
  numbers_[e.agent] = std::max(numbers_[e.agent], e.number);
}

void VectorClock::merge(const VectorClock& other) {
  if (numbers_.size() < other.numbers_.size()) numbers_.resize(other.numbers_.size());
  for (std::size_t i = 0; i < other.numbers_.size(); ++i) {
    numbers_[i] = std::max(numbers_[i], other.numbers_[i]);
  }
}

WarpClock::WarpClock(std::uint32_t warp)
    : first_agent_(warp * kWarpAgents), known_(std::make_shared<VectorClock>()), ordered_(known_) {
  begin_after_release();
}

/// Clocks that were copied stay as they are.
VectorClock& WarpClock::own() {
  if (known_.use_count() > 1) known_ = std::make_shared<VectorClock>(*known_);
  return *known_;
}

Stamp WarpClock::issue(Agent agent) {
  ++issued_[index(agent)];
  return last(agent);
}

Stamp WarpClock::last(Agent agent) const {
  return {first_agent_ + static_cast<std::uint32_t>(agent), issued_[index(agent)]};
}

void WarpClock::complete(Agent agent, std::uint32_t number) {
  const Stamp done{last(agent).agent, number};
  if (!known_->has(done)) own().add(done);
}

/// Whoever has got the clock does not know later accesses: they have another number.
void WarpClock::begin_after_release() {
  is_released_ = false;
  issue(Agent::kInstructions);
  own().add(last(Agent::kInstructions));
}

void WarpClock::fence_before() {
  for (const Agent agent : {Agent::kTensorLoads, Agent::kTensorStores}) {
    complete(agent, tensor_waited_[index(agent)]);
  }
}

VectorClock WarpClock::tensor_order() const {
  VectorClock order = *ordered_;
  for (const Agent agent : {Agent::kTensorLoads, Agent::kTensorStores}) {
    order.add({last(agent).agent, tensor_waited_[index(agent)]});
  }
  order.add(last(Agent::kInstructions));
  return order;
}

void BarrierClock::complete_phase() {
  ++phases;
  arrived.add({agent, phases});
  complete.merge(arrived);
}

BarrierClock& Agents::initialise(const std::byte* mbarrier, Stamp by) {
  const auto [place, is_new] = barriers_.try_emplace(mbarrier);
  BarrierClock& clock = place->second;
  if (is_new) clock.agent = next_++;
  clock.initialised = by;
  clock.committed = {};
  clock.arrived.clear();
  clock.complete.clear();
  return clock;
}

std::string Agents::name(Stamp stamp) const {
  static constexpr const char* kOperations[kWarpAgents] = {"",
                                                           "cp.async of ",
                                                           "a bulk store of ",
                                                           "wgmma of ",
                                                           "tcgen05.ld of ",
                                                           "tcgen05.st of ",
                                                           "tcgen05.mma of ",
                                                           "tcgen05.cp of "};
  const std::uint32_t warp = stamp.agent / kWarpAgents;
  if (std::any_of(barriers_.begin(), barriers_.end(),
                  [&](const auto& b) { return b.second.agent == stamp.agent; })) {
    return "an asynchronous copy";
  }
  return kOperations[stamp.agent % kWarpAgents] + std::string("warp ") +
         std::to_string(warp % warps_per_cta_) + " of CTA " +
         std::to_string(warp / warps_per_cta_) + " of the cluster";
}

History::History(State* states, std::size_t units, std::string (*place)(std::size_t),
                 const Agents& agents)
    : states_(states),
      units_(units),
      place_(place),
      agents_(&agents),
      accesses_(1),
      most_accesses_(kManyAccesses) {
  std::fill_n(states, units, 0);
}

void History::Pass::refuse(const State* unit, bool writes, Stamp other, bool other_writes) const {
  const Agents& agents = *history_->agents_;
  throw Fault(history_->place_(static_cast<std::size_t>(unit - history_->states_)) + " is " +
              (writes ? "written" : "read") + " by " + agents.name(by_) +
              ", which has not waited for the " + (other_writes ? "write" : "read") + " by " +
              agents.name(other));
}

void History::Pass::begin_read(const State* unit) {
  const Accesses& before = history_->accesses_[*unit];
  if (!known_->has(before.write)) refuse(unit, false, before.write, true);
  from_ = *unit;
  to_ = history_->after_read(from_, by_);
}

void History::Pass::begin_write(const State* unit) {
  const Accesses& before = history_->accesses_[*unit];
  if (!known_->has(before.write)) refuse(unit, true, before.write, true);
  for (const Stamp& read : before.reads) {
    if (!known_->has(read)) refuse(unit, true, read, false);
  }
  from_ = *unit;
  to_ = history_->after_write(by_);
}

History::Step& History::step(State from, Stamp by) {
  return steps_[(from * 31 + by.agent * 7 + by.number) % kSteps];
}

History::State History::after_read(State from, Stamp by) {
  Step& known = step(from, by);
  if (known.from == from && known.by == by) return known.to;
  const std::vector<Stamp>& reads = accesses_[from].reads;
  const auto same =
      std::find_if(reads.begin(), reads.end(), [&](const Stamp& e) { return e.agent == by.agent; });
  if (same != reads.end() && same->number >= by.number) return from;
  Accesses after = accesses_[from];
  if (same != reads.end()) {
    after.reads[static_cast<std::size_t>(same - reads.begin())] = by;
  } else {
    after.reads.push_back(by);
  }
  accesses_.push_back(std::move(after));
  known = {from, by, static_cast<State>(accesses_.size() - 1)};
  return known.to;
}

/// A write does not depend on the state before it.
History::State History::after_write(Stamp by) {
  Step& known = step(kNoState, by);
  if (known.from == kNoState && known.by == by) return known.to;
  accesses_.push_back({by, {}});
  known = {kNoState, by, static_cast<State>(accesses_.size() - 1)};
  return known.to;
}

void History::drop_unused() {
  std::vector<State> renumbered(accesses_.size(), kNoState);
  std::vector<Accesses> kept(1);
  renumbered[0] = 0;
  for (std::size_t i = 0; i < units_; ++i) {
    State& to = renumbered[states_[i]];
    if (to == kNoState) {
      to = static_cast<State>(kept.size());
      kept.push_back(std::move(accesses_[states_[i]]));
    }
    states_[i] = to;
  }
  accesses_ = std::move(kept);
  most_accesses_ = std::max(kManyAccesses, 2 * accesses_.size());
  steps_ = {};
}

}  // namespace sonicmoe::emulator
