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

/// Sums of the same tokens that other ranks have computed (exchange/). The result is then the sum
/// over ranks of their rounded sums, in rank order.
struct RankSums {
  const std::uint8_t* rows;  ///< of rank r at r * rank_bytes: (T, d), contiguous
  std::int64_t rank_bytes;
  const std::uint64_t* masks;  ///< (T) bit r: rank r has a sum of the token
  const std::uint32_t* fault;  ///< not 0: every output is NaN
  std::int32_t own;            ///< the rank whose sum this launch computes
};

/// Where sums go. With `ranks` they are added to those of other ranks first.
struct SumOutput {
  SumOutput(const Tensor& t, const RankSums* r = nullptr) : rows(t), ranks(r) {}
  const Tensor& rows;
  const RankSums* ranks;
};

/// out[t] = r(sum over the positions of t, in order, of weight * rows[position_row]) for the tokens
/// of a range. Weights without data count as 1. Tokens without rows get zero.
void sum_rows(const Device& device, const Problem& problem, const Metadata& metadata,
              const void* rows, const Tensor& weights, const SumOutput& out,
              const TokenRange& tokens, cudaStream_t stream);

/// The weight gradient beside which a sum runs.
enum class BesideWhat {
  /// An independent one (Start) of the same stream. That is the previous kernel, or the one before
  /// other kernels that run beside it too. It must let the next kernel start only after its own
  /// wait for the kernel that writes `rows` (ptx/dependent.cuh, rule 2).
  kPrevious,
  kOtherStream,  ///< one of another stream: the sum waits for what is before it on its own
};

/// The same without weights, in blocks that run beside a weight gradient.
void sum_rows_beside(const Device& device, const Problem& problem, const Metadata& metadata,
                     const void* rows, const SumOutput& out, const TokenRange& tokens,
                     BesideWhat beside, cudaStream_t stream);

}  // namespace sonicmoe::cuda
