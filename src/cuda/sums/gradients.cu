#include <algorithm>

#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/math/bias.h"
#include "cuda/math/element.cuh"
#include "cuda/metadata/slot_view.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/sums/gradients.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kMostRowBlocks = 16;  // of an expert

/// A view that is filled with zeros.
struct ClearArgs {
  void* data;
  std::int64_t shape[3];
  std::int64_t stride[3];
  std::int32_t bytes;

  /// Zeroes part `block` of `blocks` parts of the view. Called by each of `blocks` one-dimensional
  /// blocks.
  __device__ void clear(std::int64_t block, std::int64_t blocks) const {
    const std::int64_t count = shape[0] * shape[1] * shape[2];
    for (std::int64_t i = block * blockDim.x + threadIdx.x; i < count; i += blocks * blockDim.x) {
      const std::int64_t line = i / shape[2];
      const std::int64_t at =
          line / shape[1] * stride[0] + line % shape[1] * stride[1] + i % shape[2] * stride[2];
      if (bytes == 2) {
        static_cast<std::uint16_t*>(data)[at] = 0;
      } else {
        static_cast<std::uint32_t*>(data)[at] = 0;
      }
    }
  }
};

ClearArgs clear_args(const Tensor& t) {
  ClearArgs a{t.data, {1, 1, 1}, {0, 0, 0}, static_cast<std::int32_t>(dtype_bytes(t.dtype))};
  for (std::int32_t i = 0; i < t.rank; i++) {
    a.shape[3 - t.rank + i] = t.shape[i];
    a.stride[3 - t.rank + i] = t.stride[i];
  }
  return a;
}

/// Sorts the experts by number of rows, largest first. One block for each expert calls it, and
/// writes expert blockIdx.x to its position.
__device__ void rank_expert(const Metadata& m, ExpertRecord* out) {
  const auto experts = static_cast<int>(gridDim.x);
  const auto expert = static_cast<int>(blockIdx.x);
  const std::int32_t rows = m.expert_rows[expert];
  int before = 0;
  for (int first = 0; first < experts; first += kBlock) {
    const int other = first + static_cast<int>(threadIdx.x);
    const std::int32_t others = other < experts ? m.expert_rows[other] : -1;
    before += __syncthreads_count(others > rows || (others == rows && other < expert));
  }
  if (threadIdx.x == 0) out[before] = {expert, m.expert_begin[expert], rows, 0};
}

__global__ void row_lists_kernel(const Metadata m, const SlotView weights, const RowLists lists,
                                 const ClearArgs scores) {
  ptx::wait_for_previous_kernel();
  if (scores.data != nullptr) {
    scores.clear(blockIdx.y * gridDim.x + blockIdx.x, gridDim.x * gridDim.y);
  }
  if (blockIdx.y == 0) rank_expert(m, lists.experts);
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < lists.counter_count; i += kBlock) lists.counters[i] = 0;
  }
  float* out = lists.weights;
  const std::int32_t begin = m.expert_begin[blockIdx.x];
  const std::int32_t rows = m.expert_rows[blockIdx.x];
  for (int i = blockIdx.y * kBlock + threadIdx.x; i < rows; i += gridDim.y * kBlock) {
    const std::int32_t row = begin + i;
    out[row] = weights.data == nullptr ? 1.0f : weights.weight(weights.offset(m.row_slot[row]));
  }
}

struct ScoreKernel {
  const float* parts;
  std::int32_t tiles;
  std::int32_t hidden;
  const void* dout;
  std::int64_t dout_stride;
  Bias b_down;
  SlotView out;
  std::int32_t beside;
};

/// A kernel that runs at the same time as a weight gradient does not wait, by rule 2 of
/// ptx/dependent.cuh: the weight gradient has waited for the kernel that writes `parts`. So no load
/// may be ld.global.nc.
__device__ __forceinline__ void begin_scores(const ScoreKernel& a) {
  if (a.beside == 0) ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
}

/// Keeps rule 4 of ptx/dependent.cuh: a kernel that waits for this kernel then also waits for all
/// kernels before it.
__device__ __forceinline__ void end_scores(const ScoreKernel& a) {
  const bool last = blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y;
  if (a.beside != 0 && last) ptx::wait_for_previous_kernel();
}

/// dS without a bias: a thread sums the partial dot products of a row.
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    score_parts_kernel(const Metadata m, const ScoreKernel a) {
  begin_scores(a);
  const std::int32_t begin = m.expert_begin[blockIdx.x];
  const std::int32_t rows = m.expert_rows[blockIdx.x];
#pragma unroll 4
  for (int i = blockIdx.y * kBesideThreads + threadIdx.x; i < rows;
       i += gridDim.y * kBesideThreads) {
    const std::int64_t row = begin + i;
    float parts = 0.0f;
    for (int t = 0; t < a.tiles; t++) parts += a.parts[row * a.tiles + t];
    a.out.weight(a.out.offset(m.row_slot[row])) = parts;
  }
  end_scores(a);
}

/// dS with a bias: a warp for each row. The lanes compute parts of <dO, b2> and add them in a fixed
/// order.
template <class Element>
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    scores_kernel(const Metadata m, const ScoreKernel a) {
  begin_scores(a);
  const int expert = blockIdx.x;
  const std::int32_t begin = m.expert_begin[expert];
  const std::int32_t rows = m.expert_rows[expert];
  const int lane = threadIdx.x & 31;
  const int warp = (blockIdx.y * kBesideThreads + threadIdx.x) / 32;
  const auto* bias = static_cast<const Element*>(a.b_down.data) + expert * a.b_down.expert_stride;
  for (int i = warp; i < rows; i += gridDim.y * kBesideThreads / 32) {
    const std::int64_t row = begin + i;
    float sum = 0.0f;
    const auto* dout = static_cast<const Element*>(a.dout) + m.row_token[row] * a.dout_stride;
#pragma unroll 2
    for (int c = lane; c < a.hidden; c += 32) {
      sum = fmaf(static_cast<float>(dout[c]), static_cast<float>(bias[c * a.b_down.column_stride]),
                 sum);
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane != 0) continue;
    float parts = 0.0f;
    for (int t = 0; t < a.tiles; t++) parts += a.parts[row * a.tiles + t];
    a.out.weight(a.out.offset(m.row_slot[row])) = parts + sum;
  }
  end_scores(a);
}

struct ColumnOut {
  void* data;
  std::int64_t strides[2];
  std::int32_t floats;  // 1: fp32, 0: elements
};

ColumnOut column_out(const Tensor& t) {
  return {t.data, {t.stride[0], t.stride[1]}, t.dtype == DType::kF32 ? 1 : 0};
}

struct ColumnKernel {
  const void* source;
  std::int64_t row_stride;
  const std::int32_t* index;
  const float* weights;
  ColumnOut out[2];
  std::int32_t columns;
  std::int32_t alternate;  // 1: even columns go to out[0], odd ones to out[1]
  std::int32_t accumulate;
};

/// Sums 64 columns over the rows of an expert. The threads are 8 across and 32 down; each sums 8
/// columns over every 32nd row.
template <class Element>
__global__ void columns_kernel(const Metadata m, const __grid_constant__ ColumnKernel a) {
  __shared__ float sums[32][65];
  const int expert = blockIdx.y;
  const std::int32_t begin = m.expert_begin[expert];
  const std::int32_t rows = m.expert_rows[expert];
  const int down = threadIdx.x >> 3;
  const int column = blockIdx.x * 64 + (threadIdx.x & 7) * 8;
  float sum[8] = {};
  for (int i = down; i < rows && column < a.columns; i += 32) {
    const std::int32_t row = begin + i;
    const std::int64_t from = a.index != nullptr ? a.index[row] : row;
    const float weight = a.weights != nullptr ? a.weights[row] : 1.0f;
    const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const Element*>(a.source) +
                                                    from * a.row_stride + column);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      sum[2 * w] = fmaf(weight, Pair<Element>::low(words[w]), sum[2 * w]);
      sum[2 * w + 1] = fmaf(weight, Pair<Element>::high(words[w]), sum[2 * w + 1]);
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j++) sums[down][(threadIdx.x & 7) * 8 + j] = sum[j];
  __syncthreads();
  const int c = blockIdx.x * 64 + threadIdx.x;
  if (threadIdx.x >= 64 || c >= a.columns || (a.accumulate != 0 && rows == 0)) return;
  float total = 0.0f;
  for (int r = 0; r < 32; r++) total += sums[r][threadIdx.x];
  const ColumnOut& to = a.out[a.alternate != 0 ? c & 1 : 0];
  if (to.data == nullptr) return;
  const std::int64_t at = expert * to.strides[0] + (a.alternate != 0 ? c / 2 : c) * to.strides[1];
  if (to.floats == 0) {
    static_cast<Element*>(to.data)[at] = static_cast<Element>(total);
  } else {
    float* out = static_cast<float*>(to.data) + at;
    *out = a.accumulate != 0 ? *out + total : total;
  }
}

__global__ void clear_kernel(const ClearArgs a) { a.clear(blockIdx.x, gridDim.x); }

/// A grid of (experts, blocks of an expert), in which a block has about `rows` rows.
dim3 expert_grid(const Problem& p, std::int64_t rows, std::int64_t most = kMostRowBlocks) {
  const std::int64_t blocks = row_capacity(p) / p.experts / rows;
  return dim3(static_cast<unsigned>(p.experts),
              static_cast<unsigned>(std::clamp<std::int64_t>(blocks, 1, most)));
}

}  // namespace

void make_row_lists(const Device& device, const Problem& problem, const Metadata& metadata,
                    const Tensor& weights, const RowLists& lists, const Tensor& dweights,
                    cudaStream_t stream) {
  launch_dependent(device, "launching the row lists", row_lists_kernel,
                   {expert_grid(problem, kBlock / 2), kBlock}, stream, metadata, slot_view(weights),
                   lists, clear_args(dweights));
}

void finish_scores(const Device& device, const Problem& problem, const Metadata& metadata,
                   const ScoreGrad& args, cudaStream_t stream) {
  const ScoreKernel a{args.parts,
                      args.tiles,
                      static_cast<std::int32_t>(problem.hidden),
                      args.dout.data,
                      args.dout.stride[0],
                      {args.b_down.data, args.b_down.stride[0], args.b_down.stride[1]},
                      slot_view(args.out),
                      args.beside ? 1 : 0};
  const auto kernel = args.b_down.data == nullptr     ? score_parts_kernel
                      : problem.dtype == DType::kBF16 ? scores_kernel<__nv_bfloat16>
                                                      : scores_kernel<__half>;
  // While a product runs, only few blocks run at the same time. So each block gets many rows: the
  // start of a block then costs less per row. Alone and with a bias, a block gets one row for each
  // warp: with 32 rows for each warp a layer of gpt-oss-20b took 900 us instead of about 50 (H100).
  const bool spreads = args.b_down.data != nullptr && !args.beside;
  const std::int64_t rows = args.b_down.data == nullptr ? 4 * kBesideThreads
                            : spreads                   ? kBesideThreads / 32
                                                        : kBesideThreads;
  constexpr std::int64_t kMostBlocks = 65535;
  launch_dependent(
      device, "launching the gradient of the scores", kernel,
      {expert_grid(problem, rows, spreads ? kMostBlocks : kMostRowBlocks), kBesideThreads}, stream,
      metadata, a);
}

void sum_columns(const Problem& problem, const Metadata& metadata, const ColumnSum& args,
                 cudaStream_t stream) {
  const bool alternate = args.odd != nullptr;
  const Tensor& shaped = alternate && args.out.data == nullptr ? *args.odd : args.out;
  const auto columns = static_cast<std::int32_t>(shaped.shape[1] * (alternate ? 2 : 1));
  const ColumnKernel a{args.source,
                       args.row_stride,
                       args.index,
                       args.weights,
                       {column_out(args.out), alternate ? column_out(*args.odd) : ColumnOut{}},
                       columns,
                       alternate ? 1 : 0,
                       args.mode == GradMode::kAccumulate ? 1 : 0};
  const auto kernel =
      problem.dtype == DType::kBF16 ? columns_kernel<__nv_bfloat16> : columns_kernel<__half>;
  const dim3 grid(static_cast<unsigned>((columns + 63) / 64),
                  static_cast<unsigned>(problem.experts));
  launch("launching the gradient of a bias", kernel, grid, kBlock, stream, metadata, a);
}

void clear(const Tensor& t, cudaStream_t stream) {
  const ClearArgs a = clear_args(t);
  const std::int64_t count = a.shape[0] * a.shape[1] * a.shape[2];
  if (count == 0) return;
  const auto grid =
      static_cast<unsigned>(std::min<std::int64_t>((count + kBlock - 1) / kBlock, 4096));
  launch("launching a clear", clear_kernel, grid, kBlock, stream, a);
}

}  // namespace sonicmoe::cuda
