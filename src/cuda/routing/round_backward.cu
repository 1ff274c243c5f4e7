// Gradient of token rounding on CUDA. Writes the gradients of the pairs to a (T, E) matrix, then
// computes the gradients of the logits, row by row.
#include "cuda/device/launch.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/pair_gradients.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kScatterThreads = 256;

struct PairGradients {
  const std::int32_t* token;
  const std::int32_t* expert;
  const float* dweight;
  std::int64_t token_stride;
  std::int64_t expert_stride;
  std::int64_t dweight_stride;
  std::int64_t capacity;
};

__global__ void __launch_bounds__(kScatterThreads)
    scatter_pairs(PairGradients in, std::int64_t tokens, int experts, float* dense) {
  ptx::wait_for_previous_kernel();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kScatterThreads + threadIdx.x;
  if (i >= in.capacity) return;
  const std::int32_t t = in.token[i * in.token_stride];
  const std::int32_t e = in.expert[i * in.expert_stride];
  if (t < 0 || t >= tokens || e < 0 || e >= experts) return;
  dense[static_cast<std::int64_t>(t) * experts + e] = in.dweight[i * in.dweight_stride];
}

template <class R, class Item>
__global__ void __launch_bounds__(kRowThreads)
    round_rows_backward(RouteParams p, const float* dense, LogitsView dlogits) {
  extern __shared__ __align__(8) std::uint32_t shared[];
  ptx::wait_for_previous_kernel();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * rows_of_block<R>(kRowThreads) +
                           threadIdx.x / 32 * R::kRowsPerWarp + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  const float* dpairs = dense + token * p.experts;
  Softmax all{};
  Item mine = 0;
  R r;
  read_row<R>(p, token, R::template smem_of<Item>(shared, p.n_group), 0, &mine,
              [&](const auto& row) {
                r = row();
                all = r.softmax();
              });
  const int id = item_expert(mine);
  const float x = logit_at(p.logits, token, id);
  const float raw = R::raw_score(p, R::score_softmax(p, all, x), id, x);
  const SlotGradient through = slot_gradient<R>(p, id, x, raw, id < 0 ? 0.0f : dpairs[id]);

  float dp[R::kValues];
  float gradient[R::kValues];
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    dp[v] = e < p.experts ? dpairs[e] * p.scale : 0.0f;
    gradient[v] = 0.0f;
  }
#pragma unroll 2
  for (int k = 0; k < p.top_k; k++) {
    const int own = R::from_slot(id, k) - R::first();  // value of this lane
    const float value = R::from_slot(through.slot, k);
#pragma unroll
    for (int v = 0; v < R::kValues; v++) {
      gradient[v] += own == v ? value : 0.0f;
      dp[v] = own == v ? 0.0f : dp[v];
    }
  }
  float probability[R::kValues];  // computed again: kept, they would spill
  r.probabilities(p, all, probability);
  float mean = 0.0f;
#pragma unroll
  for (int v = 0; v < R::kValues; v++) mean += dp[v] * probability[v];
  mean = lanes_sum<R::kLanes>(mean) + through.mean;
  if (p.score == ScoreMode::kSqrtSoftplus) {
#pragma unroll
    for (int v = 0; v < R::kValues; v++) {
      gradient[v] += dp[v] * (probability[v] * key::sqrt_softplus_slope32(r.x[v]));
    }
  } else {
#pragma unroll
    for (int v = 0; v < R::kValues; v++) {
      gradient[v] += p.score == ScoreMode::kSigmoid
                         ? dp[v] * probability[v] * (1.0f - probability[v])
                         : probability[v] * (dp[v] - mean);
    }
  }
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

}  // namespace

void spread_gradients(const RouteParams& p, const Pairs& pairs, const Tensor& dweight, float* dense,
                      const Exec& exec) {
  const auto stream = stream_of(exec);
  const PairGradients in{static_cast<const std::int32_t*>(pairs.token.data),
                         static_cast<const std::int32_t*>(pairs.expert.data),
                         static_cast<const float*>(dweight.data),
                         pairs.token.stride[0],
                         pairs.expert.stride[0],
                         dweight.stride[0],
                         pairs.token.shape[0]};
  check_cuda(cudaMemsetAsync(dense, 0, p.tokens * p.experts * sizeof(float), stream),
             "clearing gradients");
  if (in.capacity > 0) {
    launch_dependent(device_of(exec), "launching the gradients of pairs", scatter_pairs,
                     {blocks_of(in.capacity, kScatterThreads), kScatterThreads}, stream, in,
                     p.tokens, p.experts, dense);
  }
}

void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, Buffer scratch,
                          const Exec& exec) {
  const RouteParams p = params_of(options.route, logits);
  if (p.tokens == 0) return;
  float* dense = gradient_scratch(scratch.data, p.tokens, p.experts).dense;
  spread_gradients(p, pairs, dweight, dense, exec);
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    using Item = typename decltype(choice)::Item;
    constexpr int kRows = rows_of_block<R>(kRowThreads);
    const std::size_t shared = R::template smem_bytes<Item>(kRowThreads, p.n_group);
    launch_dependent(device_of(exec), "launching token_round_backward",
                     round_rows_backward<R, Item>,
                     {blocks_of(p.tokens, kRows), kRowThreads, shared}, stream_of(exec), p,
                     static_cast<const float*>(dense), view_of(dlogits));
  });
}

}  // namespace sonicmoe::cuda
