// The state of a running grid: clusters of CTAs of warps, their memories and barriers.
//
// One thread of the host runs a grid. Warps take turns in a random order, which a seed determines.
// Copies that hardware makes asynchronously happen at a random later time, at the latest when the
// program waits for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "clocks.h"
#include "dependent_launch.h"
#include "lane_copies.h"
#include "pool.h"
#include "program.h"
#include "tensor_memory.h"

namespace sonicmoe::emulator {

struct Dim {
  std::uint32_t x = 1, y = 1, z = 1;
  std::uint32_t count() const { return x * y * z; }
};

struct Launch {
  const Program* program = nullptr;
  Dim grid, block, cluster;
  std::size_t dynamic_shared = 0;
  std::vector<std::byte> parameters;  ///< Program::parameter_bytes of them
};

struct Settings {
  int multiprocessors = 4;
  std::size_t shared_bytes = 227 * 1024;  ///< of a multiprocessor
  int multiprocessor_threads = 2048;
  std::uint64_t seed = 1;
  double patience_s = 60;  ///< a grid without progress for so many seconds has a deadlock
};

/// Which global memory exists. Several grids and the host use it at once.
class GlobalMemory {
 public:
  virtual ~GlobalMemory() = default;
  /// Throws Fault unless [address, address + bytes) lies in one live allocation.
  virtual void check(std::uint64_t address, std::size_t bytes) const = 0;
};

// Generic addresses: a window each for shared and local memory, anything else is global. Within the
// shared window, and in 32-bit shared addresses, the bits from kRankShift on name a CTA of the
// cluster, rank + 1; zero is the CTA that runs.
inline constexpr std::uint64_t kSharedWindow = 0x0100'0000'0000'0000;
inline constexpr std::uint64_t kLocalWindow = 0x0200'0000'0000'0000;
inline constexpr std::uint64_t kWindowMask = 0xff00'0000'0000'0000;
inline constexpr int kRankShift = 24;
inline constexpr std::uint32_t kOffsetMask = (1u << kRankShift) - 1;

class Cta;
class Cluster;
class Grid;

/// Lanes that stand at the same instruction.
struct Fragment {
  std::uint32_t lanes = 0;
  std::uint32_t pc = 0;
  bool waits = false;        ///< its last instruction returned kWait or kYield in this turn
  std::int64_t ticket = -1;  ///< of a barrier at which it has arrived
  std::uint32_t last = 0;    ///< place of its last instruction that waited or yielded
};

/// The result of a warp's turn.
enum class Turn {
  kNothing,  ///< every fragment waits
  kPolled,   ///< it tested a condition that does not hold yet, or gave its turn back
  kBusy,     ///< it has used the whole turn
};

class Warp {
 public:
  Warp(Cta& cta, int index, std::uint32_t lanes);
  Warp(const Warp&) = delete;
  Warp& operator=(const Warp&) = delete;

  /// Runs until every fragment waits, has yielded or the turn is over.
  Turn run_turn();
  bool is_done() const { return live_ == 0; }
  std::string where() const;  ///< for messages: the places of its fragments

  Cta& cta() { return cta_; }
  inline Grid& grid();
  inline const Program& program();
  int index() const { return index_; }
  std::uint32_t live() const { return live_; }  ///< lanes that have not exited
  Fragment& fragment() { return fragments_[current_]; }

  template <class T>
  T* lanes_of(Slot slot) {
    return reinterpret_cast<T*>(file_->bytes() + slot);
  }
  std::uint32_t& predicate(Slot slot) { return *lanes_of<std::uint32_t>(slot); }
  /// Local memory of a lane; throws Fault outside of it.
  std::byte* local(int lane, std::uint64_t offset, std::size_t bytes);
  /// The host address of a generic address, checked. `lane` is for local memory.
  std::byte* generic(int lane, std::uint64_t address, std::size_t bytes);

  /// For instructions that a set of lanes runs together: whether all lanes of `members` that have
  /// not exited stand here. If not, the handler returns kWait.
  bool has_all(std::uint32_t members) const { return (members & live_ & ~lanes_here()) == 0; }
  std::uint32_t lanes_here() const { return fragments_[current_].lanes; }

  void jump(std::uint32_t lanes, std::uint32_t target);  ///< other lanes go on behind the branch
  void exit(std::uint32_t lanes);

  WarpClock& clock() { return clock_; }
  /// wait_group of the copies, bulk copies or products: all groups of the lanes but the last
  /// `keep`.
  void wait_for_group(Agent agent, std::uint32_t lanes, std::int64_t keep);

  std::int64_t cluster_phase = -1;  ///< phase of barrier.cluster in which the warp has arrived
  /// Copies that the lanes have issued and not waited for. cp.async and bulk copies have separate
  /// groups.
  LaneCopies& copies() { return copies_; }
  LaneCopies& bulk_copies() { return bulk_copies_; }
  /// Products of wgmma that the warp has issued and not waited for.
  LaneCopies& products() { return products_; }
  /// What the warp does with tensor memory.
  TensorWarp tensor;

 private:
  void preset_file();
  void join_fragments();
  bool choose_hindmost();
  bool choose_any();
  bool run_fragment(int* left);
  std::uint32_t guarded(const Instruction& instruction) const;

  Cta& cta_;
  int index_;
  std::uint32_t live_;
  Pooled<RegisterFile> file_;
  std::unique_ptr<std::byte[]> local_;
  std::vector<Fragment> fragments_;
  std::size_t current_ = 0;
  std::uint32_t stop_ = 0;  ///< place of the next fragment, where the current one may join it
  std::uint64_t turns_ = 0;
  LaneCopies copies_;
  LaneCopies bulk_copies_;
  LaneCopies products_;
  WarpClock clock_;
};

/// bar.sync and bar.arrive: one of the sixteen barriers of a CTA.
struct NamedBarrier {
  std::int64_t phase = 0;
  std::uint32_t arrived = 0;   ///< threads
  std::uint32_t expected = 0;  ///< 0: every thread of the CTA that is alive
  std::uint32_t count = 0;     ///< bar.red: threads of this phase whose predicate holds
  std::uint32_t result = 0;    ///< the count of the last complete phase
  VectorClock clock_arrived;   ///< of the warps that have arrived, in all phases
  VectorClock clock_complete;  ///< of complete phases
};

class Cta {
 public:
  Cta(Cluster& cluster, std::uint32_t rank, Dim index);

  Cluster& cluster() { return cluster_; }
  std::uint32_t rank() const { return rank_; }
  Dim index() const { return index_; }
  std::size_t shared_bytes() const { return shared_bytes_; }
  /// Throws Fault outside of this CTA's shared memory.
  std::byte* own_shared(std::uint32_t offset, std::size_t bytes) {
    if (std::size_t{offset} + bytes > shared_bytes_) refuse_shared(offset);
    return shared_->bytes() + offset;
  }
  /// The host address of shared memory of any CTA of the cluster, by a 32-bit address.
  std::byte* shared(std::uint32_t address, std::size_t bytes) {
    return owner(address).own_shared(address & kOffsetMask, bytes);
  }
  Cta& owner(std::uint32_t address) {  ///< of a 32-bit shared address
    return address >> kRankShift == 0 ? *this : other_owner(address >> kRankShift);
  }

  // Ordinary instructions access shared memory by the generic proxy, asynchronous copies and
  // products by the async proxy. Between a write by one proxy and a read by the other the program
  // needs a fence.proxy.async of the writing or of the reading warp.
  void note_write(std::uint32_t offset, std::size_t bytes, int warp) {
    const SharedMemory::Write write{++shared_->time, warp};
    const std::size_t last = (offset + bytes - 1) / SharedMemory::kGranule;
    for (std::size_t i = offset / SharedMemory::kGranule; i <= last; ++i) {
      shared_->writes[i] = write;
    }
  }
  void note_async_write(std::uint32_t offset, std::size_t bytes);
  void note_proxy_fence(int warp);
  /// Throws Fault if an asynchronous read by `warp` meets a write without such a fence. A negative
  /// `warp` has no fences.
  void check_async_read(std::uint32_t offset, std::size_t bytes, int warp) const;
  /// Throws Fault if a bulk copy may not read global memory yet. If the grid may overlap with the
  /// previous one, it needs a griddepcontrol.wait of the CTA or a fence.proxy.async of the warp:
  /// earlier kernels wrote by the generic proxy.
  void check_global_read(int warp) const;

  History& history() { return history_; }  ///< of its shared memory
  void tidy_histories() {
    history_.tidy();
    if (tensor_ != nullptr) tensor_->history().tidy();
  }
  /// The accesses to this CTA's tensor memory and the memory itself, which exists from the first
  /// use.
  TensorMemory& tensor();
  /// Throws Fault if a CTA may not end so.
  void check_end();
  /// Turns that pass before its warps begin.
  std::uint64_t late_turns = 0;

  bool has_launched_next = false;  ///< griddepcontrol.launch_dependents
  bool has_waited = false;         ///< griddepcontrol.wait has returned
  std::array<NamedBarrier, 16> barriers;
  std::vector<std::unique_ptr<Warp>> warps;
  std::uint32_t threads_alive() const;
  bool is_done() const;

 private:
  [[noreturn]] void refuse_shared(std::uint32_t offset) const;
  void check_commits();
  Cta& other_owner(std::uint32_t name);

  Cluster& cluster_;
  std::uint32_t rank_;
  Dim index_;
  std::size_t shared_bytes_;
  Pooled<SharedMemory> shared_;
  std::vector<std::uint64_t> fences_;  ///< time of each warp's last one
  std::uint64_t start_;                ///< SharedMemory::time before this CTA
  std::unique_ptr<TensorMemory> tensor_;
  History history_;
};

/// Accesses with one stamp to the shared memory of a CTA. Throws Fault for those that are not
/// ordered.
class SharedPass {
 public:
  SharedPass(Cta& cta, Stamp by, const VectorClock& known) : pass_(cta.history(), by, known) {}
  /// Of an instruction of the warp that has the clock. now() comes first: known() may change by it.
  SharedPass(Cta& cta, WarpClock& clock) : pass_{cta.history(), clock.now(), clock.known()} {}
  void read(std::uint32_t offset, std::size_t bytes) {
    pass_.read(offset / SharedMemory::kUnit, units(offset, bytes));
  }
  void write(std::uint32_t offset, std::size_t bytes) {
    pass_.write(offset / SharedMemory::kUnit, units(offset, bytes));
  }

 private:
  static std::size_t units(std::uint32_t offset, std::size_t bytes) {
    return (offset + bytes - 1) / SharedMemory::kUnit - offset / SharedMemory::kUnit + 1;
  }
  History::Pass pass_;
};

class Cluster {
 public:
  Cluster(Grid& grid, Dim index);
  Grid& grid() { return grid_; }
  bool is_done() const;

  Dim index;
  std::vector<std::unique_ptr<Cta>> ctas;
  Agents agents;
  std::int64_t phase = 0;      ///< of barrier.cluster
  std::uint32_t arrived = 0;   ///< threads
  VectorClock clock_arrived;   ///< of the warps that have arrived, in all phases
  VectorClock clock_complete;  ///< of complete phases

 private:
  Grid& grid_;
};

class Grid {
 public:
  Grid(const Launch& launch, const Settings& settings, const GlobalMemory& memory,
       Neighbours neighbours = {});

  /// Runs the grid to its end. Throws Fault, which names the kernel, the instruction and its line
  /// in the PTX text.
  void run();

  const Launch& launch() const { return launch_; }
  const Settings& settings() const { return settings_; }
  const GlobalMemory& memory() const { return memory_; }
  std::mt19937_64& random() { return random_; }
  const std::byte* parameters() const { return launch_.parameters.data(); }

  /// Called after every event that may let a waiting warp go on.
  void note_progress() { ++progress_; }
  bool previous_is_complete() const;
  /// Whether the grid may begin before the previous one is complete.
  bool may_overlap() const { return neighbours_.previous_is_complete != nullptr; }
  /// Notes that the CTA has run griddepcontrol.launch_dependents or has ended. The last CTA lets
  /// the next kernel start.
  void launch_next(Cta& cta);
  /// Finishes the copy at a random later time, at the latest when the grid ends.
  void defer(CopyTask copy) { pending_.push_back(std::move(copy)); }

 private:
  void start_clusters();
  void retire_clusters();
  void finish_pending();
  void run_some_pending();
  [[noreturn]] void report_deadlock();

  const Launch& launch_;
  const Settings& settings_;
  const GlobalMemory& memory_;
  const Neighbours neighbours_;
  std::mt19937_64 random_;
  std::uint32_t next_cluster_ = 0;
  std::uint32_t launched_next_ = 0;  // CTAs
  std::vector<std::unique_ptr<Cluster>> resident_;
  std::vector<CopyTask> pending_;
  std::uint64_t progress_ = 0;
  bool has_waited_ = false;  // a CTA that has ended: griddepcontrol.wait
};

Grid& Warp::grid() { return cta_.cluster().grid(); }
const Program& Warp::program() { return *grid().launch().program; }

/// mbarrier objects: 8 bytes of shared memory of a CTA of the cluster, in a format of the
/// emulator's own. Functions throw Fault if the object is not initialised.
namespace mbarrier {
void init(std::byte* at, std::uint32_t count);
void invalidate(std::byte* at);
void expect(std::byte* at, std::uint32_t bytes);
/// `bytes` of copies have arrived. Throws Fault if the count leaves its range.
void complete(Cluster& cluster, std::byte* at, std::uint32_t bytes);
void arrive(Cluster& cluster, std::byte* at, std::uint32_t count);
/// One more arrival is needed in this phase: cp.async.mbarrier.arrive without .noinc.
void expect_arrival(std::byte* at);
/// Whether the phase with this parity is complete.
bool is_complete(const std::byte* at, std::uint32_t parity);
/// The clock of an initialised object. Throws Fault unless `known` has the initialisation.
BarrierClock& clock_of(Cluster& cluster, std::byte* at, const VectorClock& known);
}  // namespace mbarrier

}  // namespace sonicmoe::emulator
