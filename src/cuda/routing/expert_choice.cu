// Expert choice on CUDA: softmax over E as columns by expert, then the best tokens of every column.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/routing/pair_gradients.h"
#include "cuda/routing/round_keys.cuh"
#include "cuda/routing/round_lists.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

template <class R>
__global__ void __launch_bounds__(kRankThreads) rank_softmax(RouteParams p, KeyColumns out) {
  extern __shared__ __align__(16) std::uint32_t tile[];
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  ptx::wait_for_previous_kernel();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRankTokens;
#pragma unroll 1
  for (int i = threadIdx.x / 32 * R::kRowsPerWarp; i < kRankTokens;
       i += rows_of_block<R>(kRankThreads)) {
    const int row = i + R::slot_row();
    R r;
    r.load(p, min(first + row, p.tokens - 1));
    Softmax s{};
    float probability[R::kValues];
    r.probabilities(p, probability, &s);
    store_keys<R>(probability, tile + row * kStride);
  }
  __syncthreads();
  write_columns(p, tile, kStride, out, first);
}

__global__ void __launch_bounds__(kSelectThreads)
    choose_tokens(KeyColumns columns, int tokens, int count, PairsView out) {
  extern __shared__ __align__(16) std::uint32_t room[];  // the column; then kStretch places
  __shared__ std::uint32_t bins[RadixSelect::kBins];
  ptx::wait_for_previous_kernel();
  const int e = blockIdx.x;
  const Column column = Column::stage(columns.keys + e * columns.stride, tokens, room);
  auto* list = reinterpret_cast<std::uint16_t*>(column.end_of(room));
  std::int64_t at = static_cast<std::int64_t>(e) * count;
  if (threadIdx.x == 0) {
    out.offsets[e * out.offsets_stride] = at;
    if (e + 1 == static_cast<int>(gridDim.x))
      out.offsets[(e + 1) * out.offsets_stride] = at + count;
  }
  const Threshold last = select_rows(column, count, 0, bins);
  int equal = 0;
  for (int first = 0; first < tokens; first += Column::kStretch) {
    const int kept = list_kept(
        last, [&](int c) { return column.read(first + c * Column::kChunk); }, &equal, list);
    for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
      const int token = first + list[i];
      out.set(at + i, token, e, key::float_of(column.key(token)));
    }
    at += kept;
    __syncthreads();
  }
}

template <class R>
__global__ void __launch_bounds__(kRowThreads)
    choice_rows_backward(RouteParams p, const float* dense, LogitsView dlogits) {
  ptx::wait_for_previous_kernel();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * rows_of_block<R>(kRowThreads) +
                           threadIdx.x / 32 * R::kRowsPerWarp + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  R r;
  r.load(p, token);
  const Softmax s = r.softmax();
  float probability[R::kValues];
  r.probabilities(p, s, probability);
  float gradient[R::kValues];
  float mean = 0.0f;
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    gradient[v] = e < p.experts ? dense[token * p.experts + e] : 0.0f;
    mean += gradient[v] * probability[v];
  }
  mean = lanes_sum<R::kLanes>(mean);
#pragma unroll
  for (int v = 0; v < R::kValues; v++) gradient[v] = probability[v] * (gradient[v] - mean);
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

/// Only softmax over E is asked of the rows; no token chooses.
RouteParams softmax_params(const Tensor& logits) {
  RouteOptions options;
  options.top_k = 1;
  options.score = ScoreMode::kSoftmaxBeforeTopK;
  return params_of(options, logits);
}

}  // namespace

std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts) {
  return experts * key_stride_of(tokens) * 4;  // keys, or gradients (T, E)
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, Buffer scratch,
                   const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  const KeyColumns columns{static_cast<std::uint32_t*>(scratch.data), key_stride_of(p.tokens)};
  const char* what = "launching expert_choice";
  if (p.tokens > 0) {
    with_wide_row(p, logits.dtype, [&](auto choice) {
      using R = typename decltype(choice)::R;
      constexpr std::size_t kTile = kRankTokens * tile_stride(R::kLanes * R::kValues) * 4;
      launch_dependent(what, rank_softmax<R>,
                       {blocks_of(p.tokens, kRankTokens), kRankThreads, kTile}, stream, p, columns);
    });
  }
  const LaunchShape shape{static_cast<unsigned>(p.experts), kSelectThreads,
                          list_shared_bytes(p.tokens)};
  launch_dependent(what, choose_tokens, shape, stream, columns, static_cast<int>(p.tokens),
                   static_cast<int>(std::min(capacity, p.tokens)), view_of(pairs));
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, Buffer scratch, const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  if (p.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  auto* dense = static_cast<float*>(scratch.data);
  spread_gradients(p, pairs, dweight, dense, stream);
  with_wide_row(p, logits.dtype, [&](auto choice) {
    using R = typename decltype(choice)::R;
    launch_dependent("launching expert_choice_backward", choice_rows_backward<R>,
                     {blocks_of(p.tokens, rows_of_block<R>(kRowThreads)), kRowThreads}, stream, p,
                     static_cast<const float*>(dense), view_of(dlogits));
  });
}

}  // namespace sonicmoe::cuda
