// Sums over a token's rows: O with the routing weights, dX without.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/metadata/metadata.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

struct TokenRange {
  std::int64_t first;
  std::int64_t count;
};

/// out[t] = r(sum over the positions of t, in order, of weight * rows[position_row]) for the tokens
/// of a range. Weights without data count as 1. Tokens without rows get zero.
void sum_rows(const Device& device, const Problem& problem, const Metadata& metadata,
              const void* rows, const Tensor& weights, const Tensor& out, const TokenRange& tokens,
              cudaStream_t stream);

/// The same without weights, beside an independent weight gradient (Start).
/// That is the previous kernel, or the one before other kernels that run beside it too. It must let
/// the next kernel start only after its own wait for the kernel that writes `rows`
/// (ptx/dependent.cuh, rule 2).
void sum_rows_beside(const Device& device, const Problem& problem, const Metadata& metadata,
                     const void* rows, const Tensor& out, const TokenRange& tokens,
                     cudaStream_t stream);

}  // namespace sonicmoe::cuda
