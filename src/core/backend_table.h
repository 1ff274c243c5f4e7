// The CUDA backend as the core sees it: a table of the functions of backend.h, or nothing. Which of
// the two definitions of cuda_backend() is linked is the build's choice (cuda_absent.cc without
// nvcc), so the core has no conditional compilation.
#pragma once

#include <string>
#include <type_traits>
#include <vector>

#include "core/backend.h"

namespace sonicmoe {

/// A product of the layer and the tile of the engine that it runs on, in words.
struct TileChoice {
  const char* kernel;
  std::string tile;
};

/// An entry that is null has no CUDA kernel yet and is refused by name.
struct CudaBackend {
  /// What smoe_device_open returns: an immutable handle, given back to device_close.
  void* (*device_open)(std::int32_t ordinal) = nullptr;
  void (*device_close)(void* device) = nullptr;

  /// The tiles of a problem whose gate and up are apart. Needs no device.
  std::vector<TileChoice> (*layer_tiles)(const Problem& problem) = nullptr;

  decltype(&cpu::moe_sizes) moe_sizes = nullptr;
  decltype(&cpu::h_rows) h_rows = nullptr;
  decltype(&cpu::moe_forward) moe_forward = nullptr;
  decltype(&cpu::moe_backward) moe_backward = nullptr;
  decltype(&cpu::grouped_gemm) grouped_gemm = nullptr;
  decltype(&cpu::grouped_gemm_k) grouped_gemm_k = nullptr;
  std::int64_t (*grouped_gemm_scratch_bytes)(std::int64_t rows, std::int64_t experts) = nullptr;
  decltype(&cpu::route) route = nullptr;
  decltype(&cpu::route_backward) route_backward = nullptr;
  decltype(&cpu::round_scratch_bytes) round_scratch_bytes = nullptr;
  decltype(&cpu::token_round) token_round = nullptr;
  decltype(&cpu::token_round_backward) token_round_backward = nullptr;
  // The CPU needs no scratch for these.
  std::int64_t (*expert_choice_scratch_bytes)(std::int64_t tokens, std::int64_t experts) = nullptr;
  void (*expert_choice)(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                        Buffer scratch, const Exec& exec) = nullptr;
  void (*expert_choice_backward)(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                                 const Tensor& dlogits, Buffer scratch, const Exec& exec) = nullptr;
  std::int64_t (*router_losses_scratch_bytes)(std::int64_t tokens, std::int64_t experts) = nullptr;
  void (*router_losses)(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                        const RouterLosses& out, Buffer scratch, const Exec& exec) = nullptr;
  decltype(&cpu::router_losses_backward) router_losses_backward = nullptr;
};

/// Null in a build without CUDA.
const CudaBackend* cuda_backend();

/// The function that serves exec: the CPU's own, or the table's entry.
template <class F>
F* serve(const Exec& exec, const char* name, std::type_identity_t<F>* cpu_function,
         F* CudaBackend::* entry) {
  if (exec.backend == Backend::kCpu) return cpu_function;
  const CudaBackend* cuda = cuda_backend();
  if (cuda == nullptr || cuda->*entry == nullptr) {
    throw Error(Status::kUnsupported, std::string("backend is cuda, must be cpu for ") + name +
                                          ": this version has no CUDA kernel for it");
  }
  return cuda->*entry;
}

}  // namespace sonicmoe
