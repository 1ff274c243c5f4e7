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

/// The partial sums of the same tokens that other ranks have computed (exchange/). The result is
/// then the sum of all ranks' rounded partial sums, in rank order.
struct RankSums {
  const std::uint8_t* rows;  ///< (T, d), contiguous; the sums of rank r begin at r * rank_bytes
  std::int64_t rank_bytes;
  const std::uint64_t* masks;  ///< (T) bit r: rank r has a partial sum of the token
  const std::uint32_t* fault;  ///< not 0: every output is NaN
  std::int32_t own;            ///< the rank whose sum this launch computes
};

/// The output of a sum. With `ranks`, the sum over all ranks; without, this launch's own sum.
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

/// The weight gradient that runs at the same time as a sum.
enum class BesideWhat {
  /// An independent weight gradient (Start) earlier on the same stream. All kernels between it and
  /// the sum must run at the same time as the weight gradient too. The weight gradient must let the
  /// next kernel start only after it has itself waited for the kernel that writes `rows`
  /// (ptx/dependent.cuh, rule 2).
  kPrevious,
  kOtherStream,  ///< a weight gradient on another stream; the sum waits for its own stream
};

/// As sum_rows() without weights, in blocks that are small enough to run on a multiprocessor
/// together with a weight gradient.
void sum_rows_beside(const Device& device, const Problem& problem, const Metadata& metadata,
                     const void* rows, const SumOutput& out, const TokenRange& tokens,
                     BesideWhat beside, cudaStream_t stream);

}  // namespace sonicmoe::cuda
