// The public entry points of a backend as functions, and its memory: the input of the harness.
#pragma once

#include <functional>
#include <string>

#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"
#include "verify/oracle.h"

namespace sonicmoe::verify {

/// Memory of the device under test. Addresses are aligned to 256 bytes or more.
struct Memory {
  std::function<void*(std::int64_t bytes)> allocate;
  std::function<void(void* address)> release;
  /// Host to device; complete before any later call of the implementation.
  std::function<void(void* to, const void* from, std::int64_t bytes)> upload;
  /// Device to host; waits for all earlier calls of the implementation.
  std::function<void(void* to, const void* from, std::int64_t bytes)> download;
};
Memory host_memory();

struct Case;

/// The public functions of a backend with their Exec bound. If quantize_weights, grouped_gemm,
/// grouped_gemm_k, route, token_round or unpack_weights is empty, its cases are skipped. If
/// moe_backward is empty, cases of the layer run without backward.
struct Implementation {
  std::string name;
  Memory memory;
  std::function<Sizes(const Problem&, Pass)> moe_sizes;
  std::function<void(const Problem&, const Weights&, const Buffer&)> quantize_weights;
  std::function<void(const Problem&, const ForwardArgs&)> moe_forward;
  std::function<void(const Problem&, const BackwardArgs&)> moe_backward;
  std::function<void(const GroupedGemm&)> grouped_gemm;
  std::function<void(const GroupedGemmK&)> grouped_gemm_k;
  /// Scratch bytes of grouped_gemm and grouped_gemm_k, from R and E; empty: they need none.
  std::function<std::int64_t(std::int64_t, std::int64_t)> grouped_gemm_scratch;
  std::function<void(const RouteOptions&, const Tensor& logits, const Tensor& ids,
                     const Tensor& weights)>
      route;
  std::function<void(const RouteOptions&, const Tensor& logits, const Tensor& ids,
                     const Tensor& dweights, const Tensor& dlogits)>
      route_backward;
  std::function<std::int64_t(const RoundOptions&, std::int64_t tokens, std::int64_t experts)>
      round_scratch_bytes;
  std::function<void(const RoundOptions&, const Tensor& logits, const Pairs&, Buffer scratch)>
      token_round;
  std::function<void(const RoundOptions&, const Tensor& logits, const Pairs&, const Tensor& dweight,
                     const Tensor& dlogits, Buffer scratch)>
      token_round_backward;
  std::function<void(const PackedWeights&, const Tensor& out)> unpack_weights;
  /// Whether the backend serves a case; empty: it serves all.
  std::function<bool(const Case&)> serves;
};

/// The bytes that H must take.
std::int64_t kept_h_bytes(const Problem& problem);

/// The library's public functions with this Exec, on host memory.
Implementation public_api(const Exec& exec);

/// The oracle with the public signatures, on host memory. The harness must accept it in the
/// tensors' own precision (kSame).
Implementation oracle_implementation(oracle::Precision precision);

}  // namespace sonicmoe::verify
