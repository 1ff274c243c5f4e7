// Kernels that begin epochs, announce them to other ranks by flags, and wait for flags.
#include "cuda/device/launch.h"
#include "cuda/exchange/faults.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr unsigned kPause = 100;  // nanoseconds between two reads of a flag

__global__ void __launch_bounds__(32)
    begin_phases_kernel(const __grid_constant__ Peers peers, std::uint32_t phases) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const unsigned phase = threadIdx.x;
  if ((phases >> phase & 1) == 0) return;
  Control* own = peers.control(peers.rank);
  const std::uint32_t epoch = ++own->epochs[phase];
  if (has_fault(peers)) return;
  own->announced[phase] = epoch;
  own->flags[phase][peers.rank] = epoch;
}
static_assert(kPhaseCount <= 32);

__device__ void announce_epoch(const Peers& peers, Phase phase, std::uint32_t epoch) {
  const int r = static_cast<int>(threadIdx.x);
  if (r >= peers.ranks || has_fault(peers)) return;
  ptx::release_system(&peers.control(r)->flags[phase][peers.rank], epoch);
}

__global__ void __launch_bounds__(kMaxRanks)
    announce_kernel(const __grid_constant__ Peers peers, Phase phase) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  if (threadIdx.x == static_cast<unsigned>(peers.rank)) return;
  announce_epoch(peers, phase, peers.control(peers.rank)->epochs[phase]);
}

__global__ void __launch_bounds__(kMaxRanks)
    signal_kernel(const __grid_constant__ Peers peers, Phase phase) {
  __shared__ std::uint32_t epoch;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  if (threadIdx.x == 0) epoch = ++peers.control(peers.rank)->epochs[phase];
  __syncthreads();
  announce_epoch(peers, phase, epoch);
}

/// Whether a flag has reached the epoch. Tests the sign of the difference, so that epochs may
/// overflow.
__device__ bool has_come(const std::uint32_t* flag, std::uint32_t epoch) {
  return static_cast<std::int32_t>(ptx::acquire_system(flag) - epoch) >= 0;
}

/// Whether a product has waited too long for rows (RowArrivals). Then it has used whatever its
/// buffer held.
__device__ bool is_late(const Control* own) {
  return *static_cast<const volatile std::uint32_t*>(&own->late) != 0;
}

/// Thread r waits for rank r if bit r of `from` is set. If one thread finds a fault, all threads
/// return.
__device__ void wait_for_ranks(const Peers& peers, Phase phase, const WaitLimits& limits,
                               std::uint64_t from) {
  __shared__ volatile int first_failed;  // 1 + the thread that gave up first
  const int r = static_cast<int>(threadIdx.x);
  Control* own = peers.control(peers.rank);
  if (r == 0) first_failed = 0;
  __syncthreads();
  if (r >= peers.ranks || (from >> r & 1) == 0 || has_fault(peers)) return;
  const std::uint32_t epoch = *static_cast<const volatile std::uint32_t*>(&own->epochs[phase]);
  const std::uint64_t begin = ptx::nanoseconds();
  while (!has_come(&own->flags[phase][r], epoch)) {
    const std::uint32_t alarm = ptx::acquire_system(&own->alarms[r]);
    const bool late =
        is_late(own) || ptx::nanoseconds() - begin > static_cast<std::uint64_t>(limits.nanoseconds);
    if (alarm != 0 || late) {
      const std::uint32_t code = alarm != 0 ? alarm : FaultCode::pack(kFaultMissing, phase, r);
      give_up(peers, limits, code, alarm != 0 ? r : peers.rank, 0);
      first_failed = 1 + r;
    }
    if (first_failed != 0) return;
    __nanosleep(kPause);
  }
}

/// Waits for the flags first, then for the previous kernel. It may read the epoch before the
/// previous kernel is complete, because an earlier kernel has begun the epoch (wait_for()). It
/// launches the next kernel only after all flags have arrived. Otherwise the next kernel's blocks
/// could fill the GPU while they wait, and a rank on the same GPU that must set a flag could not
/// run. The previous kernel may be a product that waits for rows by itself and was late: that
/// becomes a fault here.
__global__ void __launch_bounds__(kMaxRanks)
    wait_kernel(const __grid_constant__ Peers peers, Phase phase, const WaitLimits limits,
                std::uint64_t from, unsigned* arrival) {
  wait_for_ranks(peers, phase, limits, from);
  if (threadIdx.x == 0 && phase == kPhaseStarted) {
    peers.control(peers.rank)->deadline =
        ptx::nanoseconds() + static_cast<std::uint64_t>(limits.nanoseconds);
  }
  __syncthreads();
  if (threadIdx.x == 0 && phase == kPhaseRouting) {
    // The blocks that make the list of pairs read this word. They would disagree about the fault
    // itself, which a wait on another stream may set meanwhile.
    peers.control(peers.rank)->routing_lost = has_fault(peers) ? 1 : 0;
  }
  if (threadIdx.x == 0 && arrival != nullptr) ptx::release_one(arrival);
  ptx::launch_next_kernel();
  ptx::wait_for_previous_kernel();
  const Control* own = peers.control(peers.rank);
  if (threadIdx.x != 0 || !is_late(own)) return;
  const std::uint32_t missing = FaultCode::pack(kFaultMissing, kPhaseRows, own->late - 1);
  give_up(peers, limits, missing, peers.rank, 0);
}

/// meet()
__global__ void __launch_bounds__(kMaxRanks)
    meet_kernel(const __grid_constant__ Peers peers, const WaitLimits limits) {
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  ptx::wait_for_previous_kernel();
  const Control* own = peers.control(peers.rank);
  wait_for_ranks(peers, kPhaseFree, limits, kAll);
  __syncthreads();
  announce_epoch(peers, kPhaseReady, own->epochs[kPhaseReady]);
  wait_for_ranks(peers, kPhaseReady, limits, kAll);
  __syncthreads();
  announce_epoch(peers, kPhaseStarted, own->epochs[kPhaseStarted]);
  ptx::launch_next_kernel();
}

}  // namespace

void begin_phases(const Device& device, const Peers& peers, std::uint32_t phases,
                  cudaStream_t stream) {
  launch_dependent(device, "launching the epochs of a step", begin_phases_kernel, {1, 32}, stream,
                   peers, phases);
}

void announce_by_kernel(const Device& device, const Peers& peers, Phase phase,
                        cudaStream_t stream) {
  launch_dependent(device, "launching an announcement to other ranks", announce_kernel,
                   {1, kMaxRanks}, stream, peers, phase);
}

void signal(const Device& device, const Peers& peers, Phase phase, cudaStream_t stream) {
  launch_dependent(device, "launching a signal between ranks", signal_kernel, {1, kMaxRanks},
                   stream, peers, phase);
}

void wait_for(const Device& device, const Peers& peers, const Awaited& awaited,
              const WaitLimits& limits, cudaStream_t stream) {
  launch_dependent(device, "launching a wait for other ranks", wait_kernel, {1, kMaxRanks}, stream,
                   peers, awaited.phase, limits, awaited.from, awaited.arrival);
}

void meet(const Device& device, const Peers& peers, const WaitLimits& limits, cudaStream_t stream) {
  launch_dependent(device, "launching the meeting of the ranks", meet_kernel, {1, kMaxRanks},
                   stream, peers, limits);
}

void load_signal_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(begin_phases_kernel),
        reinterpret_cast<const void*>(announce_kernel),
        reinterpret_cast<const void*>(signal_kernel), reinterpret_cast<const void*>(wait_kernel),
        reinterpret_cast<const void*>(meet_kernel)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

}  // namespace sonicmoe::cuda
