// The order of accesses to shared and tensor memory, by vector clocks. Two accesses of which one
// writes must be ordered by waits. If they are not, that is a fault, whatever the order in which
// the seed lets them happen.
//
// An agent does one thing after another: the instructions of a warp, its asynchronous operations of
// one kind, or the copies that an mbarrier counts. A stamp is a place in the sequence of an agent.
// A clock holds how far its owner knows each agent to be. Arrivals put a warp's clock into a
// barrier, and successful waits take it from there.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace sonicmoe::emulator {

/// The agents of a warp. Each kind of asynchronous operation is one, numbered as it is issued.
enum class Agent : std::uint32_t {
  kInstructions,
  kCopies,          ///< cp.async
  kBulkStores,      ///< cp.async.bulk from shared to global memory
  kProducts,        ///< wgmma
  kTensorLoads,     ///< tcgen05.ld
  kTensorStores,    ///< tcgen05.st
  kTensorProducts,  ///< tcgen05.mma
  kTensorCopies,    ///< tcgen05.cp
};
inline constexpr std::uint32_t kWarpAgents = 8;

/// The agents of warp w of a cluster begin at w * kWarpAgents; those of mbarriers come behind.
struct Stamp {
  std::uint32_t agent = 0;
  std::uint32_t number = 0;  ///< from 1; 0: nothing has happened
  bool operator==(const Stamp&) const = default;
};

class VectorClock {
 public:
  bool has(Stamp e) const {
    return e.number == 0 || (e.agent < numbers_.size() && numbers_[e.agent] >= e.number);
  }
  void add(Stamp e);
  void merge(const VectorClock& other);
  void clear() { numbers_.clear(); }

 private:
  std::vector<std::uint32_t> numbers_;
};

/// A clock that nobody changes any more.
using ClockCopy = std::shared_ptr<const VectorClock>;

/// What a warp knows. A lane's wait counts for its warp: that __syncwarp is missing is not noticed.
class WarpClock {
 public:
  /// `warp`: its number in the cluster.
  explicit WarpClock(std::uint32_t warp);

  /// Of the next access by an instruction.
  Stamp now() {
    if (is_released_) begin_after_release();
    return last(Agent::kInstructions);
  }
  const VectorClock& known() const { return *known_; }

  /// The next asynchronous operation of the agent.
  Stamp issue(Agent agent);
  /// Of the agent, or the last one issued. `kInstructions`: now.
  Stamp last(Agent agent) const;
  /// The warp has waited for the operations of the agent up to this one.
  void complete(Agent agent, std::uint32_t number);

  /// The arrival at a barrier.
  void release(VectorClock* to) { to->merge(*release()); }
  /// What the warp knows, for an arrival or an asynchronous operation that happens later.
  ClockCopy release() {
    is_released_ = true;
    return known_;
  }
  /// The end of a wait.
  void acquire(const VectorClock& from) { own().merge(from); }

  // Operations on tensor memory are asynchronous: they are ordered behind a wait only by
  // tcgen05.fence::after_thread_sync, and before an arrival by ::before_thread_sync.
  void wait_for_tensor(Agent agent) { tensor_waited_[index(agent)] = issued_[index(agent)]; }
  bool has_waited_for_tensor(Agent agent) const {
    return tensor_waited_[index(agent)] == issued_[index(agent)];
  }
  void fence_before();
  void fence_after() { ordered_ = known_; }
  /// What the next operation on tensor memory is ordered behind.
  VectorClock tensor_order() const;

 private:
  static std::size_t index(Agent agent) { return static_cast<std::size_t>(agent); }
  VectorClock& own();
  void begin_after_release();

  std::uint32_t first_agent_;
  bool is_released_ = false;  ///< since the last access
  std::shared_ptr<VectorClock> known_;
  ClockCopy ordered_;
  std::array<std::uint32_t, kWarpAgents> issued_{};
  std::array<std::uint32_t, kWarpAgents> tensor_waited_{};
};

/// An mbarrier's. Waits for a phase also take the clocks of earlier phases.
struct BarrierClock {
  std::uint32_t agent = 0;   ///< the copies that count at the mbarrier, numbered by its phases
  std::uint32_t phases = 0;  ///< that are complete
  Stamp initialised;
  Stamp committed;       ///< the phase of the last arrival by tcgen05.commit
  VectorClock arrived;   ///< of the phase that is open, and of earlier ones
  VectorClock complete;  ///< of complete phases

  /// A copy that counts in the open phase, or a commit that arrives in it.
  Stamp copy() const { return {agent, phases + 1}; }
  void complete_phase();
};

/// The agents of a cluster.
class Agents {
 public:
  Agents(std::uint32_t warps_per_cta, std::uint32_t ctas)
      : warps_per_cta_(warps_per_cta), next_(warps_per_cta * ctas * kWarpAgents) {}
  /// Of an mbarrier by its host address. It may have been initialised before.
  BarrierClock& initialise(const std::byte* mbarrier, Stamp by);
  /// Of an initialised mbarrier.
  BarrierClock& barrier(const std::byte* mbarrier) { return barriers_.at(mbarrier); }
  /// Calls call(mbarrier, clock) for each mbarrier in memory [first, first + bytes).
  template <class Call>
  void for_each_barrier(const std::byte* first, std::size_t bytes, const Call& call) const {
    for (const auto& [mbarrier, clock] : barriers_) {
      if (mbarrier >= first && mbarrier < first + bytes) call(mbarrier, clock);
    }
  }
  std::string name(Stamp stamp) const;

 private:
  std::uint32_t warps_per_cta_;
  std::uint32_t next_;
  std::unordered_map<const std::byte*, BarrierClock> barriers_;
};

/// The last accesses to each unit of a memory: its last write and the reads since then. Units with
/// equal accesses share a number, so that a large access costs a comparison for each unit.
class History {
 public:
  using State = std::uint32_t;  ///< 0: no access yet

  /// `states` has `units` entries, of any value. `place` names a unit.
  History(State* states, std::size_t units, std::string (*place)(std::size_t unit),
          const Agents& agents);

  Stamp last_write(std::size_t unit) const { return accesses_[states_[unit]].write; }
  void forget(std::size_t first, std::size_t count) { std::fill_n(states_ + first, count, 0); }
  /// Forgets accesses that no unit has any more, if there are many. No pass may be in use.
  void tidy() {
    if (accesses_.size() > most_accesses_) drop_unused();
  }

  /// Accesses with one stamp, which knows `known`. Throws Fault if it does not know an earlier
  /// access to the same unit and one of them writes.
  class Pass {
   public:
    Pass(History& history, Stamp by, const VectorClock& known)
        : history_(&history), by_(by), known_(&known) {}
    void read(std::size_t first, std::size_t count) {
      for (State* s = history_->states_ + first; count > 0; --count, ++s) {
        if (*s != from_ && *s != to_) begin_read(s);
        *s = to_;
      }
    }
    void write(std::size_t first, std::size_t count) {
      for (State* s = history_->states_ + first; count > 0; --count, ++s) {
        if (*s != from_ && *s != to_) begin_write(s);
        *s = to_;
      }
    }

   private:
    void begin_read(const State* unit);
    void begin_write(const State* unit);
    [[noreturn]] void refuse(const State* unit, bool writes, Stamp other, bool other_writes) const;

    History* history_;
    Stamp by_;
    const VectorClock* known_;
    State from_ = kNoState;  ///< a state whose check has passed, and what it becomes
    State to_ = kNoState;
  };

 private:
  struct Accesses {
    Stamp write;
    std::vector<Stamp> reads;  ///< at most one of each agent
  };
  /// A state that an access has made of another one.
  struct Step {
    State from = 0;
    Stamp by;
    State to = 0;
  };
  static constexpr std::size_t kSteps = 256;  // that are remembered
  static constexpr State kNoState = ~State{0};

  State after_read(State from, Stamp by);
  State after_write(Stamp by);
  Step& step(State from, Stamp by);
  void drop_unused();

  State* states_;
  std::size_t units_;
  std::string (*place_)(std::size_t);
  const Agents* agents_;
  std::vector<Accesses> accesses_;
  std::size_t most_accesses_;
  std::array<Step, kSteps> steps_{};
};

}  // namespace sonicmoe::emulator
