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

/// The caller's scratch.
struct ChoiceScratch {
  KeyColumns columns;
  Softmax* softmax;  // (T)
  std::int64_t bytes;
};

ChoiceScratch scratch_at(void* base, std::int64_t tokens, std::int64_t experts) {
  ChoiceScratch s{};
  s.columns.stride = key_stride_of(tokens);
  s.columns.keys = static_cast<CutKey*>(base);
  const std::int64_t keys = experts * s.columns.stride;  // even: the softmaxes are aligned
  s.softmax = reinterpret_cast<Softmax*>(s.columns.keys + keys);
  s.bytes = std::max(keys * std::int64_t{sizeof(CutKey)} + tokens * std::int64_t{sizeof(Softmax)},
                     tokens * experts * std::int64_t{sizeof(float)});  // the gradient's
  return s;
}

template <class R>
__global__ void __launch_bounds__(kRankThreads) rank_softmax(RouteParams p, ChoiceScratch out) {
  extern __shared__ __align__(16) CutKey tile[];
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
    store_keys<R>(probability, tile + tile_row(row) * kStride);
    if (R::slot() == 0 && first + row < p.tokens) out.softmax[first + row] = s;
  }
  __syncthreads();
  write_columns(p, tile, kStride, out.columns, first);
}

__global__ void __launch_bounds__(kSelectThreads, 2)
    choose_tokens(RouteParams p, ChoiceScratch s, int count, PairsView out) {
  extern __shared__ __align__(16) CutKey keys[];  // the column; then kStretch places
  __shared__ SelectRoom room;
  ptx::wait_for_previous_kernel();
  const int e = blockIdx.x;
  const auto tokens = static_cast<int>(p.tokens);
  const Ranking ranking{Column::stage(s.columns.keys + e * s.columns.stride, tokens, keys),
                        {p.logits, s.softmax, p.score},
                        e};
  std::uint16_t* list = ranking.column.end_of(keys);
  std::int64_t at = static_cast<std::int64_t>(e) * count;
  if (threadIdx.x == 0) {
    out.offsets[e * out.offsets_stride] = at;
    if (e + 1 == static_cast<int>(gridDim.x))
      out.offsets[(e + 1) * out.offsets_stride] = at + count;
  }
  Column::wait_for_copy();
  const Threshold last = select_rows(ranking, count, 0, &room);
  int equal = 0;
  for (int first = 0; first < tokens; first += Column::kStretch) {
    const int kept = list_kept(ranking, last, first, &equal, list);
    for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
      const int token = first + list[i];
      out.set(at + i, token, e);
      out.weight[(at + i) * out.weight_stride] = ranking.p(token);
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
  return scratch_at(nullptr, tokens, experts).bytes;
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, Buffer scratch,
                   const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  const ChoiceScratch s = scratch_at(scratch.data, p.tokens, p.experts);
  const char* what = "launching expert_choice";
  if (p.tokens > 0) {
    with_wide_row(p, [&](auto choice) {
      using R = typename decltype(choice)::R;
      constexpr std::size_t kTile =
          kRankTokens * tile_stride(R::kLanes * R::kValues) * sizeof(CutKey);
      launch_dependent(what, rank_softmax<R>,
                       {blocks_of(p.tokens, kRankTokens), kRankThreads, kTile}, stream, p, s);
    });
  }
  const LaunchShape shape{static_cast<unsigned>(p.experts), kSelectThreads,
                          list_shared_bytes(p.tokens)};
  launch_dependent(what, choose_tokens, shape, stream, p, s,
                   static_cast<int>(std::min(capacity, p.tokens)), view_of(pairs));
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, Buffer scratch, const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  if (p.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  auto* dense = static_cast<float*>(scratch.data);
  spread_gradients(p, pairs, dweight, dense, stream);
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    launch_dependent("launching expert_choice_backward", choice_rows_backward<R>,
                     {blocks_of(p.tokens, rows_of_block<R>(kRowThreads)), kRowThreads}, stream, p,
                     static_cast<const float*>(dense), view_of(dlogits));
  });
}

}  // namespace sonicmoe::cuda
