// Kernels that send rows, partial sums and gradients of routing weights to other ranks, and that
// add the partial sums that have arrived. A warp copies a row by 16-byte accesses. Each lane has
// kPieces accesses in flight, so that a few multiprocessors use the whole bandwidth of the link.
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/exchange/announce.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/sums/rank_sums.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kPushThreads = 1024;
constexpr int kPieces = 8;

struct PushParams {
  const std::uint8_t* rows;
  std::int64_t stride;  // bytes
  std::int32_t chunks;  // chunks of 16 bytes in a row
  std::int64_t count;   // rows
  std::int64_t max_tokens;
};

/// The chunks of a row that a lane copies in one round.
struct Pieces {
  uint4 piece[kPieces];

  __device__ __forceinline__ void load(const uint4* row, int first, int chunks) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      if (first + 32 * i < chunks) piece[i] = row[first + 32 * i];
    }
  }
  __device__ __forceinline__ void store(uint4* row, int first, int chunks) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      if (first + 32 * i < chunks) row[first + 32 * i] = piece[i];
    }
  }
};

/// Calls copy(i) for the rows i below `count`, then announces the phase to the ranks in `to`. Warps
/// take rows from a counter, because they do not all start at the same time: a block starts when a
/// product leaves a multiprocessor free.
template <class Copy>
__device__ __forceinline__ void push_all(const Peers& peers, Phase phase, std::uint64_t to,
                                         std::int64_t count, const Copy& copy) {
  if (__syncthreads_or(has_fault(peers)) != 0) return;
  PushProgress* progress = &peers.control(peers.rank)->push;
  const auto take = [&] {
    unsigned taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(&progress->taken, 1u);
    return static_cast<std::int64_t>(__shfl_sync(~0u, taken, 0));
  };
  for (std::int64_t i = take(); i < count;) {
    const std::int64_t next = take();  // before the copy, which hides the atomic's latency
    copy(i);
    i = next;
  }
  announce_at_end(peers, phase, to, progress);
}

/// Sends rows of x or dout. A warp reads a row once and writes it to all ranks in the row's mask.
__global__ void __launch_bounds__(kPushThreads)
    push_rows_kernel(const __grid_constant__ Peers peers, const PushParams p,
                     const std::uint64_t* masks, const RowTarget target) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t bytes = static_cast<std::int64_t>(p.chunks) * 16;
  push_all(peers, target.phase, ~std::uint64_t{0}, p.count, [&](std::int64_t t) {
    const std::uint64_t mask = masks[t] & ~(std::uint64_t{1} << peers.rank);
    if (mask == 0) return;
    const auto* from = reinterpret_cast<const uint4*>(p.rows + t * p.stride);
    for (int first = lane; first < p.chunks; first += 32 * kPieces) {
      Pieces pieces;
      pieces.load(from, first, p.chunks);
      for (std::uint64_t left = mask; left != 0; left &= left - 1) {
        const int r = __ffsll(static_cast<long long>(left)) - 1;
        const std::int64_t row = peers.place(peers.rank, r) * p.max_tokens + t;
        pieces.store(peers.at<uint4>(r, target.offset + row * bytes), first, p.chunks);
      }
    }
  });
}

/// Sends the partial sums of the rank at `place`.
__global__ void __launch_bounds__(kPushThreads)
    push_partials_kernel(const __grid_constant__ Peers peers, const PushParams p,
                         const std::int32_t* token_offsets, const TokenPart part,
                         std::int32_t place, std::int64_t offset) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t bytes = static_cast<std::int64_t>(p.chunks) * 16;
  const int r = (peers.rank + place) % peers.ranks;
  const std::int64_t count = token_offsets == nullptr ? 0 : part.count;
  push_all(peers, part.phase, std::uint64_t{1} << r, count, [&](std::int64_t i) {
    const std::int64_t t = part.first + i;
    const std::int64_t row = place * p.max_tokens + t;
    if (token_offsets[row] == token_offsets[row + 1]) return;
    const auto* from = reinterpret_cast<const uint4*>(p.rows + row * p.stride);
    auto* to = peers.at<uint4>(r, offset + (peers.rank * p.max_tokens + t) * bytes);
    for (int first = lane; first < p.chunks; first += 32 * kPieces) {
      Pieces pieces;
      pieces.load(from, first, p.chunks);
      pieces.store(to, first, p.chunks);
    }
  });
}

constexpr int kOwnWarps = 8;

/// copy_own_rows(), one warp for each row.
__global__ void __launch_bounds__(32 * kOwnWarps)
    copy_own_rows_kernel(const RowSource source, uint4* to) {
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kOwnWarps + threadIdx.x / 32;
  if (t >= source.rows) return;
  const auto chunks = static_cast<std::int32_t>(source.hidden / 8);
  const auto* from = reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(source.data) +
                                                    t * source.stride);
  for (int first = static_cast<int>(threadIdx.x) % 32; first < chunks; first += 32 * kPieces) {
    Pieces pieces;
    pieces.load(from, first, chunks);
    pieces.store(to + t * chunks, first, chunks);
  }
}

/// Sends the gradient of each pair's routing weight and announces kPhaseScores. Blocks are small
/// enough to run on a multiprocessor together with a block of a weight gradient.
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    push_score_grads_kernel(const __grid_constant__ Peers peers, const PairList list,
                            const float* grads, std::int64_t max_tokens, std::int64_t offset) {
  if (__syncthreads_or(has_fault(peers)) != 0) return;  // the list may not have been written
#pragma unroll 4
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kBesideThreads + threadIdx.x;
       row < list.rows; row += static_cast<std::int64_t>(gridDim.x) * kBesideThreads) {
    const std::int32_t token = list.token[row];
    if (token < 0) continue;
    const auto r = (peers.rank + static_cast<int>(token / max_tokens)) % peers.ranks;
    peers.at<float>(r, offset)[list.slot[row]] = grads[row];
  }
  announce_at_end(peers, kPhaseScores, ~std::uint64_t{0}, &peers.control(peers.rank)->push_scores);
}

struct SumParams {
  RankSums sums;
  std::uint16_t* out;
  std::int64_t out_stride;  // elements
  std::int32_t chunks;
};

/// Each thread adds the partial sums of one chunk of token blockIdx.x. Without partial sums the
/// result is 0. Blocks are small enough to run on a multiprocessor together with a block of a
/// weight gradient.
template <class Element>
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    sum_partials_kernel(const SumParams p) {
  const std::int64_t t = blockIdx.x;
  const auto chunk = static_cast<std::int32_t>(blockIdx.y * kBesideThreads + threadIdx.x);
  if (chunk >= p.chunks) return;
  const std::int64_t at = (t * p.chunks + chunk) * 16;
  const SumOverRanks sum{p.sums};
  const TokenRanks ranks = sum.ranks_of(t);
  const auto others = sum.load<uint4>(ranks, at);
  const uint4 total = sum.add<Element>(others, ranks, at, uint4{});
  *reinterpret_cast<uint4*>(p.out + t * p.out_stride + chunk * 8) =
      sum.fault() ? nan_chunk<uint4>() : total;
}

PushParams push_params(const RowSource& s, const ExchangeShape& shape) {
  return {static_cast<const std::uint8_t*>(s.data), s.stride * 2,
          static_cast<std::int32_t>(s.hidden / 8), s.rows, shape.max_tokens};
}

}  // namespace

void push_rows(const Peers& peers, const ExchangeShape& shape, const RowSource& source,
               const RowTarget& target, int multiprocessors, cudaStream_t stream) {
  const auto* masks = peers.own<std::uint64_t>(exchange_layout(shape).rank_masks);
  launch("launching the exchange of rows", push_rows_kernel, static_cast<unsigned>(multiprocessors),
         kPushThreads, stream, peers, push_params(source, shape), masks, target);
}

void copy_own_rows(const Peers& peers, const RowSource& source, std::int64_t offset,
                   cudaStream_t stream) {
  if (source.rows == 0) return;
  const auto blocks = static_cast<unsigned>((source.rows + kOwnWarps - 1) / kOwnWarps);
  launch("launching the copy of a rank's own rows", copy_own_rows_kernel, blocks, 32 * kOwnWarps,
         stream, source, peers.own<uint4>(offset));
}

void push_partials(const Peers& peers, const ExchangeShape& shape, const PartialSource& source,
                   int multiprocessors, cudaStream_t stream) {
  const RowSource rows{source.data, source.hidden, shape.ranks * shape.max_tokens, source.hidden};
  launch("launching the exchange of partial sums", push_partials_kernel,
         static_cast<unsigned>(multiprocessors), kPushThreads, stream, peers,
         push_params(rows, shape), source.token_offsets, source.part, source.place,
         exchange_layout(shape).partials);
}

void push_score_grads(const Peers& peers, const ExchangeShape& shape, const PairList& list,
                      const float* grads, cudaStream_t stream) {
  if (list.rows == 0) return;
  constexpr std::int64_t kRows = 8 * kBesideThreads;  // of a block
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((list.rows + kRows - 1) / kRows, 1024));
  launch("launching the exchange of gradients of routing weights", push_score_grads_kernel, blocks,
         kBesideThreads, stream, peers, list, grads, shape.max_tokens,
         exchange_layout(shape).score_grads);
}

RankSums other_sums(const Peers& peers, const ExchangeShape& shape, std::int64_t hidden) {
  const ExchangeLayout layout = exchange_layout(shape);
  return {peers.own<std::uint8_t>(layout.partials),
          shape.max_tokens * hidden * dtype_bytes(shape.dtype),
          peers.own<std::uint64_t>(layout.rank_masks), &peers.own<Control>(layout.control)->fault,
          peers.rank};
}

void sum_partials(const Peers& peers, const ExchangeShape& shape, const Tensor& out,
                  cudaStream_t stream) {
  if (out.shape[0] == 0) return;
  const SumParams params{other_sums(peers, shape, out.shape[1]),
                         static_cast<std::uint16_t*>(out.data), out.stride[0],
                         static_cast<std::int32_t>(out.shape[1] / 8)};
  const dim3 grid(static_cast<unsigned>(out.shape[0]),
                  static_cast<unsigned>((params.chunks + kBesideThreads - 1) / kBesideThreads));
  const auto kernel =
      out.dtype == DType::kBF16 ? sum_partials_kernel<__nv_bfloat16> : sum_partials_kernel<__half>;
  launch("launching the sum of partial sums", kernel, grid, kBesideThreads, stream, params);
}

void load_row_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(push_rows_kernel),
                             reinterpret_cast<const void*>(copy_own_rows_kernel),
                             reinterpret_cast<const void*>(push_partials_kernel),
                             reinterpret_cast<const void*>(push_score_grads_kernel),
                             reinterpret_cast<const void*>(sum_partials_kernel<__nv_bfloat16>),
                             reinterpret_cast<const void*>(sum_partials_kernel<__half>)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

}  // namespace sonicmoe::cuda
