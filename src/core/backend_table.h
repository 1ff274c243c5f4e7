// The CUDA backend as the core sees it: a table of the functions of backend.h, or nothing. Which of
// the two definitions of cuda_backend() is linked is the build's choice (cuda_absent.cc without
// nvcc), so the core has no conditional compilation.
#pragma once

#include "core/backend.h"

namespace sonicmoe {

/// An entry that is null has no CUDA kernel yet and is refused by name.
struct CudaBackend {
  /// What smoe_device_open returns: an immutable handle, given back to device_close.
  void* (*device_open)(std::int32_t ordinal) = nullptr;
  void (*device_close)(void* device) = nullptr;

  decltype(&cpu::moe_sizes) moe_sizes = nullptr;
  decltype(&cpu::moe_forward) moe_forward = nullptr;
  decltype(&cpu::moe_backward) moe_backward = nullptr;
  decltype(&cpu::grouped_gemm) grouped_gemm = nullptr;
  decltype(&cpu::grouped_gemm_k) grouped_gemm_k = nullptr;
  decltype(&cpu::route) route = nullptr;
  decltype(&cpu::route_backward) route_backward = nullptr;
  decltype(&cpu::round_scratch_bytes) round_scratch_bytes = nullptr;
  decltype(&cpu::token_round) token_round = nullptr;
  decltype(&cpu::token_round_backward) token_round_backward = nullptr;
  decltype(&cpu::expert_choice) expert_choice = nullptr;
  decltype(&cpu::expert_choice_backward) expert_choice_backward = nullptr;
  decltype(&cpu::router_losses) router_losses = nullptr;
  decltype(&cpu::router_losses_backward) router_losses_backward = nullptr;
};

/// Null in a build without CUDA.
const CudaBackend* cuda_backend();

/// The function that serves exec: the CPU's own, or the table's entry.
template <class F>
F* serve(const Exec& exec, const char* name, F* cpu_function, F* CudaBackend::* entry) {
  if (exec.backend == Backend::kCpu) return cpu_function;
  const CudaBackend* cuda = cuda_backend();
  if (cuda == nullptr || cuda->*entry == nullptr) {
    throw Error(Status::kUnsupported, std::string("backend is cuda, must be cpu for ") + name +
                                          ": this version has no CUDA kernel for it");
  }
  return cuda->*entry;
}

}  // namespace sonicmoe
