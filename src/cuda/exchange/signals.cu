#include "cuda/exchange/faults.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr unsigned kPause = 100;  // nanoseconds between two looks at a flag

__global__ void __launch_bounds__(kMaxRanks)
    signal_kernel(const __grid_constant__ Peers peers, Phase phase) {
  __shared__ std::uint32_t epoch;
  Control* own = peers.control(peers.rank);
  if (threadIdx.x == 0) epoch = ++own->epochs[phase];
  __syncthreads();
  const int r = static_cast<int>(threadIdx.x);
  if (r >= peers.ranks || has_fault(peers)) return;
  ptx::release_system(&peers.control(r)->flags[phase][peers.rank], epoch);
}

/// Epochs are compared by their difference, so that they may overflow.
__device__ bool has_come(const std::uint32_t* flag, std::uint32_t epoch) {
  return static_cast<std::int32_t>(ptx::acquire_system(flag) - epoch) >= 0;
}

/// Thread r waits for rank r.
__global__ void __launch_bounds__(kMaxRanks)
    wait_kernel(const __grid_constant__ Peers peers, Phase phase, const WaitLimits limits) {
  __shared__ volatile int first_failed;  // 1 + the thread that gave up first
  const int r = static_cast<int>(threadIdx.x);
  Control* own = peers.control(peers.rank);
  if (r == 0) first_failed = 0;
  __syncthreads();
  if (r >= peers.ranks || has_fault(peers)) return;
  const std::uint32_t epoch = own->epochs[phase];
  const std::uint64_t begin = ptx::nanoseconds();
  while (!has_come(&own->flags[phase][r], epoch)) {
    const std::uint32_t alarm = ptx::acquire_system(&own->alarms[r]);
    const bool late = ptx::nanoseconds() - begin > static_cast<std::uint64_t>(limits.nanoseconds);
    if (alarm != 0 || late) {
      const std::uint32_t code = alarm != 0 ? alarm : FaultCode::pack(kFaultMissing, phase, r);
      give_up(peers, limits, code, alarm != 0 ? r : peers.rank, 0);
      first_failed = 1 + r;
    }
    if (first_failed != 0) return;
    __nanosleep(kPause);
  }
}

}  // namespace

void signal(const Peers& peers, Phase phase, cudaStream_t stream) {
  signal_kernel<<<1, kMaxRanks, 0, stream>>>(peers, phase);
  check_cuda(cudaGetLastError(), "launching a signal between ranks");
}

void wait_for(const Peers& peers, Phase phase, const WaitLimits& limits, cudaStream_t stream) {
  wait_kernel<<<1, kMaxRanks, 0, stream>>>(peers, phase, limits);
  check_cuda(cudaGetLastError(), "launching a wait for other ranks");
}

void load_signal_kernels() {
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, signal_kernel), "loading a kernel");
  check_cuda(cudaFuncGetAttributes(&attributes, wait_kernel), "loading a kernel");
}

}  // namespace sonicmoe::cuda
