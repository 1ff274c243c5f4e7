// Rows and partial sums between ranks. A warp moves a row by 16-byte accesses, kPieces of them in
// flight in each lane, so that few multiprocessors fill the link.
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/exchange/faults.cuh"
#include "cuda/math/element.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kPushThreads = 1024;
constexpr int kPushWarps = kPushThreads / 32;
constexpr int kPieces = 8;

struct PushParams {
  const std::uint8_t* rows;
  std::int64_t stride;  // bytes
  std::int32_t chunks;  // of 16 bytes, of a row
  std::int64_t count;   // rows
  std::int64_t max_tokens;
};

/// Lane `lane`'s chunks of a round, from one row.
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

__device__ __forceinline__ std::int64_t first_warp() {
  return static_cast<std::int64_t>(blockIdx.x) * kPushWarps + threadIdx.x / 32;
}
__device__ __forceinline__ std::int64_t warps() {
  return static_cast<std::int64_t>(gridDim.x) * kPushWarps;
}

/// Each row is read once, whatever the number of ranks that it goes to.
__global__ void __launch_bounds__(kPushThreads)
    push_rows_kernel(const __grid_constant__ Peers peers, const PushParams p,
                     const std::uint64_t* masks, std::int64_t offset) {
  if (has_fault(peers)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t bytes = static_cast<std::int64_t>(p.chunks) * 16;
  for (std::int64_t t = first_warp(); t < p.count; t += warps()) {
    const std::uint64_t mask = masks[t] & ~(std::uint64_t{1} << peers.rank);
    if (mask == 0) continue;
    const auto* from = reinterpret_cast<const uint4*>(p.rows + t * p.stride);
    for (int first = lane; first < p.chunks; first += 32 * kPieces) {
      Pieces pieces;
      pieces.load(from, first, p.chunks);
      for (std::uint64_t left = mask; left != 0; left &= left - 1) {
        const int r = __ffsll(static_cast<long long>(left)) - 1;
        const std::int64_t row = peers.place(peers.rank, r) * p.max_tokens + t;
        pieces.store(peers.at<uint4>(r, offset + row * bytes), first, p.chunks);
      }
    }
  }
}

/// Rows go to the ranks in turn, starting behind this one, so that no rank gets all at once.
__global__ void __launch_bounds__(kPushThreads)
    push_partials_kernel(const __grid_constant__ Peers peers, const PushParams p,
                         const std::uint8_t* has_row, std::int64_t offset) {
  if (has_fault(peers)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t bytes = static_cast<std::int64_t>(p.chunks) * 16;
  const int others = peers.ranks - 1;
  for (std::int64_t i = first_warp(); i < p.max_tokens * others; i += warps()) {
    const std::int64_t t = i / others;
    const int r = static_cast<int>((peers.rank + 1 + i % others) % peers.ranks);
    const std::int64_t row = peers.place(r, peers.rank) * p.max_tokens + t;
    if (has_row[row] == 0) continue;
    const auto* from = reinterpret_cast<const uint4*>(p.rows + row * p.stride);
    auto* to = peers.at<uint4>(r, offset + (peers.rank * p.max_tokens + t) * bytes);
    for (int first = lane; first < p.chunks; first += 32 * kPieces) {
      Pieces pieces;
      pieces.load(from, first, p.chunks);
      pieces.store(to, first, p.chunks);
    }
  }
}

__global__ void __launch_bounds__(kPushThreads)
    push_score_grads_kernel(const __grid_constant__ Peers peers, const PairList list,
                            const float* grads, std::int64_t max_tokens, std::int64_t offset) {
  if (has_fault(peers)) return;  // the list may also have rows that were never written
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kPushThreads + threadIdx.x;
       row < list.rows; row += static_cast<std::int64_t>(gridDim.x) * kPushThreads) {
    const std::int32_t token = list.token[row];
    if (token < 0) continue;
    const auto r = (peers.rank + static_cast<int>(token / max_tokens)) % peers.ranks;
    peers.at<float>(r, offset)[list.slot[row]] = grads[row];
  }
}

struct SumParams {
  const std::uint8_t* own;   // (max_tokens, d)
  const std::uint8_t* sent;  // (W, max_tokens, d)
  const std::uint64_t* masks;
  std::uint16_t* out;
  std::int64_t out_stride;  // elements
  std::int64_t tokens;
  std::int64_t max_tokens;
  std::int32_t chunks;
};

template <class Element>
__device__ __forceinline__ void add_chunk(float (&sum)[8], const uint4& v) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] += Pair<Element>::low(words[i]);
    sum[2 * i + 1] += Pair<Element>::high(words[i]);
  }
}

/// A thread adds one chunk of token blockIdx.x, which gets zero if it has no rows. Blocks are small
/// enough to run beside a weight gradient (kBesideThreads).
template <class Element>
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    sum_partials_kernel(const __grid_constant__ Peers peers, const SumParams p) {
  const std::int64_t t = blockIdx.x;
  const auto chunk = static_cast<std::int32_t>(blockIdx.y * kBesideThreads + threadIdx.x);
  if (chunk >= p.chunks) return;
  const std::int64_t offset = (t * p.chunks + chunk) * 16;
  const std::int64_t rank_bytes = p.max_tokens * p.chunks * 16;
  float sum[8] = {};
  for (std::uint64_t left = p.masks[t]; left != 0; left &= left - 1) {
    const int r = __ffsll(static_cast<long long>(left)) - 1;
    const std::uint8_t* rows = r == peers.rank ? p.own : p.sent + r * rank_bytes;
    add_chunk<Element>(sum, *reinterpret_cast<const uint4*>(rows + offset));
  }
  uint4 total = {Pair<Element>::pack(sum[0], sum[1]), Pair<Element>::pack(sum[2], sum[3]),
                 Pair<Element>::pack(sum[4], sum[5]), Pair<Element>::pack(sum[6], sum[7])};
  if (has_fault(peers)) total = {~0u, ~0u, ~0u, ~0u};  // NaN
  *reinterpret_cast<uint4*>(p.out + t * p.out_stride + chunk * 8) = total;
}

PushParams push_params(const RowSource& s, const ExchangeShape& shape) {
  return {static_cast<const std::uint8_t*>(s.data), s.stride * 2,
          static_cast<std::int32_t>(s.hidden / 8), s.rows, shape.max_tokens};
}

}  // namespace

void push_rows(const Peers& peers, const ExchangeShape& shape, const RowSource& source,
               std::int64_t offset, int multiprocessors, cudaStream_t stream) {
  if (source.rows == 0) return;
  const auto* masks = peers.own<std::uint64_t>(exchange_layout(shape).rank_masks);
  push_rows_kernel<<<multiprocessors, kPushThreads, 0, stream>>>(peers, push_params(source, shape),
                                                                 masks, offset);
  check_cuda(cudaGetLastError(), "launching the exchange of rows");
}

void push_partials(const Peers& peers, const ExchangeShape& shape, const RowSource& source,
                   const std::uint8_t* has_row, int multiprocessors, cudaStream_t stream) {
  if (peers.ranks == 1) return;
  push_partials_kernel<<<multiprocessors, kPushThreads, 0, stream>>>(
      peers, push_params(source, shape), has_row, exchange_layout(shape).partials);
  check_cuda(cudaGetLastError(), "launching the exchange of partial sums");
}

void push_score_grads(const Peers& peers, const ExchangeShape& shape, const PairList& list,
                      const float* grads, cudaStream_t stream) {
  if (list.rows == 0) return;
  const auto blocks = static_cast<unsigned>(
      std::min<std::int64_t>((list.rows + kPushThreads - 1) / kPushThreads, 64));
  push_score_grads_kernel<<<blocks, kPushThreads, 0, stream>>>(peers, list, grads, shape.max_tokens,
                                                               exchange_layout(shape).score_grads);
  check_cuda(cudaGetLastError(), "launching the exchange of gradients of routing weights");
}

void sum_partials(const Peers& peers, const ExchangeShape& shape, const void* own,
                  const Tensor& out, cudaStream_t stream) {
  const ExchangeLayout layout = exchange_layout(shape);
  const SumParams params{static_cast<const std::uint8_t*>(own),
                         peers.own<std::uint8_t>(layout.partials),
                         peers.own<std::uint64_t>(layout.rank_masks),
                         static_cast<std::uint16_t*>(out.data),
                         out.stride[0],
                         out.shape[0],
                         shape.max_tokens,
                         static_cast<std::int32_t>(out.shape[1] / 8)};
  if (params.tokens == 0) return;
  const dim3 grid(static_cast<unsigned>(params.tokens),
                  static_cast<unsigned>((params.chunks + kBesideThreads - 1) / kBesideThreads));
  const auto kernel =
      out.dtype == DType::kBF16 ? sum_partials_kernel<__nv_bfloat16> : sum_partials_kernel<__half>;
  kernel<<<grid, kBesideThreads, 0, stream>>>(peers, params);
  check_cuda(cudaGetLastError(), "launching the sum of partial sums");
}

void load_row_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel : {reinterpret_cast<const void*>(push_rows_kernel),
                             reinterpret_cast<const void*>(push_partials_kernel),
                             reinterpret_cast<const void*>(push_score_grads_kernel),
                             reinterpret_cast<const void*>(sum_partials_kernel<__nv_bfloat16>),
                             reinterpret_cast<const void*>(sum_partials_kernel<__half>)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

}  // namespace sonicmoe::cuda
