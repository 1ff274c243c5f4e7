// Load-balancing and z losses on CUDA, and their gradient. Sums are fp64: every block adds up its
// tokens in a fixed order, then one block adds up the blocks' sums.
#include <algorithm>

#include "cuda/device/carver.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/block.cuh"
#include "cuda/metadata/slot_view.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kLossThreads = 256;
constexpr int kLossRegisters = 168;  // of a thread; without a limit ptxas spills on sm_120
constexpr int kSumThreads = 1024;
constexpr std::int64_t kMostBlocks = 256;
constexpr std::int64_t kLeastTokens = 64;  // of a block

/// The sums of every block, in the caller's scratch.
struct LossParts {
  double* probability;  // (blocks, E)
  double* z;            // (blocks)
  std::int32_t* count;  // (blocks, E)
  std::int64_t tokens;  // of a block
  std::int64_t blocks;
  std::int64_t bytes;
};

LossParts parts_at(void* base, std::int64_t tokens, std::int64_t experts) {
  LossParts parts{};
  parts.tokens = std::max(kLeastTokens, (tokens + kMostBlocks - 1) / kMostBlocks);
  parts.blocks = (tokens + parts.tokens - 1) / parts.tokens;
  Carver<alignof(double)> carver(base);
  parts.probability = carver.take<double>(parts.blocks * experts);
  parts.z = carver.take<double>(parts.blocks);
  parts.count = carver.take<std::int32_t>(parts.blocks * experts);
  parts.bytes = carver.used();
  return parts;
}

/// 0 where no expert is available.
__device__ double log_sum(const Softmax& s) {
  return s.inverse > 0.0f ? s.top - log(static_cast<double>(s.inverse)) : 0.0;
}

/// p of the losses: the scores over their sum. The sigmoid is e^x sigmoid(-x). Where all logits are
/// negative, e^x is the softmax times a factor that the division cancels: so small scores do not
/// underflow.
template <class R>
__device__ void loss_probabilities(const RouteParams& p, const R& r, const Softmax& s,
                                   float (&out)[R::kValues]) {
  if (!key::pointwise(p.score)) {
    r.probabilities(p, s, out);
    return;
  }
  const bool large = s.top > 0.0f;
  float sum = 0.0f;
  if (p.score == ScoreMode::kSqrtSoftplus) {
#pragma unroll
    for (int v = 0; v < R::kValues; v++) {
      out[v] = key::sqrt_softplus_part32(r.x[v], s.top);
      sum += out[v];
    }
  } else {
#pragma unroll
    for (int v = 0; v < R::kValues; v++) {
      const float sigmoid = key::sigmoid32(large ? r.x[v] : -r.x[v]);
      out[v] = large ? sigmoid : s(r.x[v]) * sigmoid;
      sum += out[v];
    }
  }
  sum = lanes_sum<R::kLanes>(sum);
  const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
  for (int v = 0; v < R::kValues; v++) out[v] *= factor;
}

/// d ln(score) / d logit of a pointwise score; 1 for the others.
__device__ inline float loss_slope(ScoreMode score, float x) {
  if (score == ScoreMode::kSqrtSoftplus) return key::sqrt_softplus_slope32(x);
  return score == ScoreMode::kSigmoid ? key::sigmoid32(-x) : 1.0f;
}

template <class R>
__global__ void __maxnreg__(kLossRegisters)
    loss_parts(RouteParams p, SlotView ids, LossParts parts) {
  constexpr int kAll = R::kLanes * R::kValues;
  __shared__ double sums[kAll];
  __shared__ double z_sum;
  __shared__ int seen[kAll];
  ptx::wait_for_previous_kernel();
  for (int e = threadIdx.x; e < kAll; e += kLossThreads) {
    sums[e] = 0.0;
    seen[e] = 0;
  }
  if (threadIdx.x == 0) z_sum = 0.0;
  __syncthreads();
  const std::int64_t begin = blockIdx.x * parts.tokens;
  const std::int64_t end = min(p.tokens, begin + parts.tokens);
  double sum[R::kValues] = {};
  double z = 0.0;
  constexpr int kRows = 32 / R::kLanes;  // of a warp
  for (std::int64_t at = begin; at < end; at += kLossThreads / R::kLanes) {
    const std::int64_t row = at + threadIdx.x / 32 * kRows + threadIdx.x % 32 / R::kLanes;
    const bool mine = row < end;
    R r;
    r.load(p, mine ? row : begin);
    const Softmax s = r.softmax();
    float probability[R::kValues];
    loss_probabilities(p, r, s, probability);
#pragma unroll
    for (int v = 0; v < R::kValues; v++) sum[v] += mine ? probability[v] : 0.0f;
    const double lse = log_sum(s);
    z += mine ? lse * lse : 0.0;
  }
#pragma unroll
  for (int d = R::kLanes; d < 32; d *= 2) {
    z += __shfl_xor_sync(kAllLanes, z, d);
    for (int v = 0; v < R::kValues; v++) sum[v] += __shfl_xor_sync(kAllLanes, sum[v], d);
  }
  for (int w = 0; w < kLossThreads / 32; w++) {
    if (static_cast<int>(threadIdx.x) / 32 == w && threadIdx.x % 32 < R::kLanes) {
#pragma unroll
      for (int v = 0; v < R::kValues; v++) sums[R::first() + v] += sum[v];
      if (threadIdx.x % 32 == 0) z_sum += z;
    }
    __syncthreads();
  }
  const auto slots = static_cast<int>(end - begin) * p.top_k;
  for (int i = threadIdx.x; i < slots; i += kLossThreads) {
    const int e = ids.expert(ids.offset(begin + i / p.top_k, i % p.top_k), p.experts);
    if (e >= 0) atomicAdd(&seen[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kLossThreads) {
    parts.probability[static_cast<std::int64_t>(blockIdx.x) * p.experts + e] = sums[e];
    parts.count[static_cast<std::int64_t>(blockIdx.x) * p.experts + e] = seen[e];
  }
  if (threadIdx.x == 0) parts.z[blockIdx.x] = z_sum;
}

struct LossOutputs {
  float* values;
  std::int64_t* counts;
  std::int64_t value_stride;
  std::int64_t count_stride;
};

/// One block adds up the parts of all blocks in a fixed order. Group g of `groups` groups of
/// threads adds parts g, g + groups, ...; then the sums of the groups are added.
__global__ void __launch_bounds__(kSumThreads)
    sum_losses(LossParts parts, LossOutputs out, double tokens, int experts, int top_k) {
  __shared__ double sums[kSumThreads];
  __shared__ int counts[kSumThreads];
  ptx::wait_for_previous_kernel();
  const int groups = kSumThreads / experts;
  const int e = static_cast<int>(threadIdx.x) % experts;
  double sum = 0.0;
  int count = 0;
  const bool active = static_cast<int>(threadIdx.x) < groups * experts;
  for (std::int64_t b = threadIdx.x / experts; active && b < parts.blocks; b += groups) {
    sum += parts.probability[b * experts + e];
    count += parts.count[b * experts + e];
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  __syncthreads();
  double balance = 0.0;
  if (static_cast<int>(threadIdx.x) < experts) {
    for (int g = 1; g < groups; g++) {
      sum += sums[g * experts + threadIdx.x];
      count += counts[g * experts + threadIdx.x];
    }
    out.counts[threadIdx.x * out.count_stride] = count;
    balance = count * sum;
  }
  double z = 0.0;
  for (std::int64_t b = threadIdx.x; b < parts.blocks; b += kSumThreads) z += parts.z[b];
  balance = block_sum<kSumThreads>(balance);
  z = block_sum<kSumThreads>(z);
  if (threadIdx.x != 0) return;
  const bool any = tokens > 0.0;
  const double pairs = tokens * top_k;
  out.values[0] = any ? static_cast<float>(experts * balance / pairs / tokens) : 0.0f;
  out.values[out.value_stride] = any ? static_cast<float>(z / tokens) : 0.0f;
}

struct LossGradients {
  const float* dvalues;
  const std::int64_t* counts;
  std::int64_t value_stride;
  std::int64_t count_stride;
};

template <class R>
__global__ void __launch_bounds__(kRowThreads)
    loss_rows_backward(RouteParams p, LossGradients in, LogitsView dlogits) {
  constexpr int kRows = 32 / R::kLanes;
  ptx::wait_for_previous_kernel();
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * (kRowThreads / R::kLanes) +
                           threadIdx.x / 32 * kRows + threadIdx.x % 32 / R::kLanes;
  const std::int64_t token = min(row, p.tokens - 1);
  const auto tokens = static_cast<double>(p.tokens);
  const double per_token = in.dvalues[0] * p.experts / (tokens * p.top_k) / tokens;
  R r;
  r.load(p, token);
  const Softmax s = r.softmax();
  // In fp64: with logits of 1e38 fp32 would overflow, and infinity times a p of 0 would be NaN.
  const double through = in.dvalues[in.value_stride] * 2.0 * log_sum(s) / tokens;
  float dp[R::kValues];
  float gradient[R::kValues];
  float probability[R::kValues];
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    const std::int64_t count = e < p.experts ? in.counts[e * in.count_stride] : 0;
    dp[v] = static_cast<float>(per_token * static_cast<double>(count));
    gradient[v] = static_cast<float>(through * s(r.x[v]));
  }
  loss_probabilities(p, r, s, probability);
  float mean = 0.0f;
#pragma unroll
  for (int v = 0; v < R::kValues; v++) mean += dp[v] * probability[v];
  mean = lanes_sum<R::kLanes>(mean);
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    gradient[v] += probability[v] * (dp[v] - mean) * loss_slope(p.score, r.x[v]);
  }
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

}  // namespace

std::int64_t router_losses_scratch_bytes(std::int64_t tokens, std::int64_t experts) {
  return parts_at(nullptr, tokens, experts).bytes;
}

void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, Buffer scratch, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  const auto stream = stream_of(exec);
  const LossParts parts = parts_at(scratch.data, p.tokens, p.experts);
  const char* what = "launching the router's losses";
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    if (parts.blocks == 0) return;
    launch_dependent(device_of(exec), what, loss_parts<R>,
                     {static_cast<unsigned>(parts.blocks), kLossThreads}, stream, p, slot_view(ids),
                     parts);
  });
  const LossOutputs outputs{static_cast<float*>(out.values.data),
                            static_cast<std::int64_t*>(out.tokens_per_expert.data),
                            out.values.stride[0], out.tokens_per_expert.stride[0]};
  launch_dependent(device_of(exec), what, sum_losses, {1, kSumThreads}, stream, parts, outputs,
                   static_cast<double>(p.tokens), p.experts, p.top_k);
}

void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  const LossGradients in{static_cast<const float*>(dvalues.data),
                         static_cast<const std::int64_t*>(tokens_per_expert.data),
                         dvalues.stride[0], tokens_per_expert.stride[0]};
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    launch_dependent(device_of(exec), "launching the gradient of the router's losses",
                     loss_rows_backward<R>,
                     {blocks_of(p.tokens, kRowThreads / R::kLanes), kRowThreads}, stream_of(exec),
                     p, in, view_of(dlogits));
  });
}

}  // namespace sonicmoe::cuda
