#include <cuda_runtime.h>

#include <vector>

#include "core/backend_table.h"
#include "cuda/device/device.h"
#include "verify/device.h"

namespace sonicmoe::verify {
namespace {

using cuda::check_cuda;

/// The router serves every dtype except fp64; for products the backend is asked.
bool serves(const Case& c, const Exec& exec) {
  const Problem& p = c.problem;
  if (c.subject == Subject::kRoute || c.subject == Subject::kTokenRound) {
    return p.dtype != DType::kF64;
  }
  if (c.subject == Subject::kUnpack) return !c.cpu_only;
  return !c.cpu_only && c.layout != Layout::kReversed &&
         backend_table(exec.backend).refusal(p, exec).empty();
}

class StreamClock final : public Clock {
 public:
  explicit StreamClock(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {}
  ~StreamClock() override {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  std::size_t mark() override {
    if (used_ == events_.size()) {
      cudaEvent_t event = nullptr;
      check_cuda(cudaEventCreate(&event), "cudaEventCreate");
      events_.push_back(event);
    }
    check_cuda(cudaEventRecord(events_[used_], stream_), "cudaEventRecord");
    return used_++;
  }
  double seconds(std::size_t from, std::size_t to) override {
    float milliseconds = 0.0f;
    check_cuda(cudaEventSynchronize(events_[to]), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&milliseconds, events_[from], events_[to]),
               "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }
  void restart() override { used_ = 0; }

 private:
  cudaStream_t stream_;
  std::vector<cudaEvent_t> events_;
  std::size_t used_ = 0;
};

}  // namespace

Memory device_memory() {
  Memory memory;
  memory.allocate = [](std::int64_t bytes) {
    void* address = nullptr;
    check_cuda(cudaMalloc(&address, static_cast<std::size_t>(bytes)), "cudaMalloc");
    return address;
  };
  memory.release = [](void* address) { cudaFree(address); };
  memory.upload = [](void* to, const void* from, std::int64_t bytes) {
    check_cuda(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice),
               "copying to the device");
  };
  memory.download = [](void* to, const void* from, std::int64_t bytes) {
    check_cuda(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost),
               "copying from the device");
  };
  return memory;
}

Implementation cuda_implementation(const Exec& exec) {
  Implementation implementation = public_api(exec);
  implementation.memory = device_memory();
  implementation.serves = [exec](const Case& c) { return serves(c, exec); };
  return implementation;
}

DeviceInfo device_info() {
  cudaDeviceProp properties{};
  int ordinal = 0;
  std::size_t free = 0, total = 0;
  check_cuda(cudaGetDevice(&ordinal), "cudaGetDevice");
  check_cuda(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return {properties.name, static_cast<std::int64_t>(free)};
}

std::unique_ptr<Clock> stream_clock(void* stream) { return std::make_unique<StreamClock>(stream); }

}  // namespace sonicmoe::verify
