// Expert choice on CUDA: softmax over E and marks by expert, then the best tokens of every expert.
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/kept_set.cuh"
#include "cuda/routing/pair_gradients.cuh"
#include "cuda/routing/round_lists.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

/// The caller's scratch.
struct ChoiceScratch {
  TokenSoftmaxes* softmaxes;  // (T)
  TileMarks* marks;           // (E, tiles)
  KeptTokens kept;
  std::int64_t bytes;
};

ChoiceScratch scratch_at(void* base, std::int64_t tokens, std::int64_t experts) {
  ChoiceScratch s{};
  ScratchCarver carver(base);
  s.softmaxes = carver.take<TokenSoftmaxes>(tokens);
  s.kept = kept_tokens(tokens);
  s.marks = carver.take<TileMarks>(experts * s.kept.tiles);
  carve_kept(&carver, experts, &s.kept);
  s.bytes = carver.used();
  return s;
}

template <class R>
__global__ void __launch_bounds__(RankTile::kThreads)
    rank_softmax(RouteParams p, ChoiceScratch out) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  const TileSmem<R, RankTile> tile(shared);
  tile.clear();
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kTileTokens +
                             threadIdx.x / 32 * RankTile::kWarpTokens;
  static_assert(R::kRowsPerWarp == 1);
  std::uint32_t best[R::kValues / 2] = {};
#pragma unroll 1
  for (int i = 0; i < RankTile::kWarpTokens && first + i < p.tokens; i++) {
    R r;
    r.load(p, first + i);
    const Softmax s = r.softmax();
    float probability[R::kValues];
    r.probabilities(p, s, probability);
#pragma unroll
    for (int v = 0; v < R::kValues; v += 2) {
      best[v / 2] = __vmaxu2(best[v / 2], two_cuts(probability[v], probability[v + 1]));
    }
    if (R::slot() == 0) out.softmaxes[first + i] = {s, s, 1.0f};
  }
  tile.store_best(best);
  __syncthreads();
  tile.write_all(p.experts, out.marks, out.kept.tiles);
}

PairScores scores_of(const RouteParams& p, const ChoiceScratch& s) {
  return {p.logits, s.softmaxes, p.score, p.renormalize, p.scale};
}

__global__ void __launch_bounds__(kSearchThreads, 2)
    choose_tokens(PairScores scores, ChoiceScratch s, int tokens, int count) {
  __shared__ SelectSmem smem;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = blockIdx.x;
  const KeptSet t{{s.marks + e * s.kept.tiles, scores, e, tokens}, s.kept.of(e), &smem};
  keep_chosen(t);  // begins with no token, because no token chose an expert
  if (count > 0) t.toggle(Side::kOthers, count);
  t.finish(count);
}

__global__ void __launch_bounds__(kListThreads)
    list_choices(PairScores scores, const TileMarks* marks, KeptTokens kept, PairsView out) {
  ptx::wait_for_previous_kernel();
  list_range(scores, marks, kept, out);
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
  float gradient[R::kValues];
  float mean = 0.0f;
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    probability[v] = s(r.x[v]);
    gradient[v] = e < p.experts ? dense[token * p.experts + e] : 0.0f;
    mean += gradient[v] * probability[v];
  }
  mean = lanes_sum<R::kLanes>(mean);
#pragma unroll
  for (int v = 0; v < R::kValues; v++) gradient[v] = probability[v] * (gradient[v] - mean);
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

/// Options under which rows compute softmax over E; no token chooses an expert.
RouteParams softmax_params(const Tensor& logits) {
  RouteOptions options;
  options.top_k = 1;
  options.score = ScoreMode::kSoftmaxBeforeTopK;
  return params_of(options, logits);
}

}  // namespace

std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts) {
  return std::max(scratch_at(nullptr, tokens, experts).bytes,
                  gradient_scratch(nullptr, tokens, experts).bytes);
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, Buffer scratch,
                   const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  const auto stream = stream_of(exec);
  const ChoiceScratch s = scratch_at(scratch.data, p.tokens, p.experts);
  const char* what = "launching expert_choice";
  if (p.tokens > 0) {
    with_wide_row(p, [&](auto choice) {
      using R = typename decltype(choice)::R;
      launch_dependent(
          device_of(exec), what, rank_softmax<R>,
          {blocks_of(p.tokens, kTileTokens), RankTile::kThreads, TileSmem<R, RankTile>::kBytes},
          stream, p, s);
    });
  }
  const PairScores scores = scores_of(p, s);
  const auto experts = static_cast<unsigned>(p.experts);
  launch_dependent(device_of(exec), what, choose_tokens, {experts, kSearchThreads}, stream, scores,
                   s, static_cast<int>(p.tokens), static_cast<int>(std::min(capacity, p.tokens)));
  launch_dependent(device_of(exec), what, list_choices,
                   {dim3(experts, s.kept.range_count), kListThreads}, stream, scores,
                   static_cast<const TileMarks*>(s.marks), s.kept, view_of(pairs));
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, Buffer scratch, const Exec& exec) {
  const RouteParams p = softmax_params(logits);
  if (p.tokens == 0) return;
  float* dense = gradient_scratch(scratch.data, p.tokens, p.experts).dense;
  spread_gradients(p, pairs, dweight, dense, exec);
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    launch_dependent(device_of(exec), "launching expert_choice_backward", choice_rows_backward<R>,
                     {blocks_of(p.tokens, rows_of_block<R>(kRowThreads)), kRowThreads},
                     stream_of(exec), p, static_cast<const float*>(dense), view_of(dlogits));
  });
}

}  // namespace sonicmoe::cuda
