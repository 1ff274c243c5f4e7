// The harness on the device: every case that CUDA serves.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "core/backend_table.h"
#include "cuda/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {
namespace {

void must(cudaError_t status, const char* what) { cuda::check_cuda(status, what); }

Memory device_memory() {
  Memory memory;
  memory.allocate = [](std::int64_t bytes) {
    void* address = nullptr;
    must(cudaMalloc(&address, static_cast<std::size_t>(bytes)), "cudaMalloc");
    return address;
  };
  memory.release = [](void* address) { cudaFree(address); };
  memory.upload = [](void* to, const void* from, std::int64_t bytes) {
    must(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice), "upload");
  };
  memory.download = [](void* to, const void* from, std::int64_t bytes) {
    must(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost), "download");
  };
  return memory;
}

bool serves(const Case& c) {
  const Problem& p = c.problem;
  const bool dtype = p.dtype == DType::kBF16 || p.dtype == DType::kF16;
  return dtype && !c.cpu_only && p.hidden % 8 == 0 && p.width % 8 == 0 &&
         c.layout != Layout::kPaired && c.layout != Layout::kReversed;
}

Implementation cuda_implementation(const cuda::Device* device) {
  Exec exec;
  exec.backend = Backend::kCuda;
  exec.device = device;
  Implementation implementation = public_api(exec);
  implementation.memory = device_memory();
  implementation.serves = serves;
  if (cuda_backend()->grouped_gemm == nullptr) implementation.grouped_gemm = nullptr;
  if (cuda_backend()->grouped_gemm_k == nullptr) implementation.grouped_gemm_k = nullptr;
  return implementation;
}

// SONICMOE_FILTER names a part of the cases, SONICMOE_EXTENT=full asks for all of them.
TEST(Cuda, PassesTheHarness) {
  const cuda::Device* device = cuda::open_device(0);
  VerifyOptions options;
  const char* filter = std::getenv("SONICMOE_FILTER");
  const char* extent = std::getenv("SONICMOE_EXTENT");
  if (filter != nullptr) options.filter = filter;
  if (extent != nullptr && std::string(extent) == "full") options.extent = Extent::kFull;
  std::size_t failed = 0;
  double worst = 0.0;
  const auto progress = [&](const CaseResult& r, std::size_t, std::size_t) {
    worst = std::max(worst, r.worst_ratio());
    if (r.passed()) return;
    if (++failed <= 40) {
      std::cout << r.name << ": " << fault_name(r.fault) << ": " << r.message << std::endl;
    }
  };
  const auto results = verify(options, cuda_implementation(device), progress);
  std::cout << results.size() << " cases, " << failed << " failed, worst ratio " << worst
            << std::endl;
  EXPECT_GT(results.size(), 0u);
  EXPECT_EQ(failed, 0u);
  cuda::close_device(device);
}

}  // namespace
}  // namespace sonicmoe::verify
