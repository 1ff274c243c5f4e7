// What the harness judges: the public entry points as functions, and the memory they work on.
#pragma once

#include <functional>
#include <string>

#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"
#include "verify/oracle.h"

namespace sonicmoe::verify {

/// Memory of the device under test. Addresses are aligned to 256 bytes or more.
struct Memory {
  std::function<void*(std::int64_t bytes)> allocate;
  std::function<void(void* address)> release;
  /// Host to device, before anything that the implementation is asked for later.
  std::function<void(void* to, const void* from, std::int64_t bytes)> upload;
  /// Device to host, after everything that the implementation was asked for before.
  std::function<void(void* to, const void* from, std::int64_t bytes)> download;
};
Memory host_memory();

struct Case;

/// A backend as the harness sees it: the public signatures with their Exec bound. An empty function
/// is a part that this backend does not have; its cases are skipped.
struct Implementation {
  std::string name;
  Memory memory;
  std::function<Sizes(const Problem&, Pass)> moe_sizes;
  std::function<void(const Problem&, const ForwardArgs&)> moe_forward;
  std::function<void(const Problem&, const BackwardArgs&)> moe_backward;
  std::function<void(const GroupedGemm&)> grouped_gemm;
  std::function<void(const GroupedGemmK&)> grouped_gemm_k;
  /// Scratch of either, by R and E; empty: none.
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
  /// Which cases this backend promises to serve; empty: all of them.
  std::function<bool(const Case&)> serves;
};

/// The library's public functions with this Exec, on host memory.
Implementation public_api(const Exec& exec);

/// The oracle behind the public signatures, on host memory. In the precision of the tensors
/// (kSame) it is what the harness must accept.
Implementation oracle_implementation(oracle::Precision precision);

}  // namespace sonicmoe::verify
