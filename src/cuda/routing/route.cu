// Top-k on CUDA, and its gradient: a warp, or a part of one, for each token.
#include "cuda/routing/launch.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

/// The (T, K) outputs, or inputs of the gradient.
struct SlotsView {
  void* ids;
  std::int64_t id_stride[2];
  float* weights;
  std::int64_t weight_stride[2];
  std::int32_t wide;  ///< 1: ids are i64

  __device__ void set_id(std::int64_t t, int k, int id) const {
    const std::int64_t i = t * id_stride[0] + k * id_stride[1];
    if (wide != 0) {
      static_cast<std::int64_t*>(ids)[i] = id;
    } else {
      static_cast<std::int32_t*>(ids)[i] = id;
    }
  }
  /// Compared as 64 bits; -1 where no expert is named.
  __device__ int id(std::int64_t t, int k, int experts) const {
    const std::int64_t i = t * id_stride[0] + k * id_stride[1];
    const std::int64_t e = wide != 0 ? static_cast<const std::int64_t*>(ids)[i]
                                     : static_cast<const std::int32_t*>(ids)[i];
    return e < 0 || e >= experts ? -1 : static_cast<int>(e);
  }
  __device__ float& weight(std::int64_t t, int k) const {
    return weights[t * weight_stride[0] + k * weight_stride[1]];
  }
};

SlotsView slots_of(const Tensor& ids, const Tensor& weights) {
  return {ids.data,
          {ids.stride[0], ids.stride[1]},
          static_cast<float*>(weights.data),
          {weights.stride[0], weights.stride[1]},
          ids.dtype == DType::kI64 ? 1 : 0};
}

/// The row of this thread's lanes; rows past the last repeat it and must not be written.
template <class R>
__device__ std::int64_t row_of_warp() {
  const int group = threadIdx.x / R::kLanes;
  return static_cast<std::int64_t>(blockIdx.x) * (kRowThreads / R::kLanes) + group;
}

template <class R, class Item>
__global__ void __launch_bounds__(kRowThreads) route_rows(RouteParams p, SlotsView out) {
  extern __shared__ std::uint32_t groups[];
  const std::int64_t row = row_of_warp<R>();
  const std::int64_t token = min(row, p.tokens - 1);
  R r;
  r.load(p, token);
  Softmax all{};
  if (p.score == ScoreMode::kSoftmaxBeforeTopK) all = r.softmax();
  int ids[R::kSlots];
  r.template select<Item>(p, groups + threadIdx.x / R::kLanes * R::group_words(p.n_group), ids);
  float slot_x[R::kSlots];
#pragma unroll
  for (int s = 0; s < R::kSlots; s++) slot_x[s] = R::reload(p, token, ids[s]);
  float raw[R::kSlots];
  float weights[R::kSlots];
  R::raw_scores(p, all, ids, slot_x, raw);
  R::weigh(p, ids, raw, weights);
#pragma unroll
  for (int s = 0; s < R::kSlots; s++) {
    const int k = s * R::kLanes + R::lane();
    if (k >= p.top_k || row >= p.tokens) continue;
    out.set_id(token, k, ids[s]);
    out.weight(token, k) = weights[s];
  }
}

template <class R>
__global__ void __launch_bounds__(kRowThreads)
    route_rows_backward(RouteParams p, SlotsView in, LogitsView dlogits) {
  const std::int64_t row = row_of_warp<R>();
  const std::int64_t token = min(row, p.tokens - 1);
  R r;
  Softmax all{};
  if (p.score == ScoreMode::kSoftmaxBeforeTopK) {
    r.load(p, token);
    all = r.softmax();
  }
  int ids[R::kSlots];
  float slot_x[R::kSlots];
  float raw[R::kSlots];
  float d[R::kSlots];
#pragma unroll
  for (int s = 0; s < R::kSlots; s++) {
    const int k = s * R::kLanes + R::lane();
    ids[s] = k < p.top_k ? in.id(token, k, p.experts) : -1;
    slot_x[s] = R::reload(p, token, ids[s]);
    d[s] = ids[s] < 0 ? 0.0f : in.weight(token, k);
  }
  R::raw_scores(p, all, ids, slot_x, raw);
  const SlotGradient through = slot_gradient<R>(p, ids, raw, d);
  float gradient[R::kValues];
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    gradient[v] = p.score == ScoreMode::kSoftmaxBeforeTopK ? -through.mean * all(r.x[v]) : 0.0f;
  }
#pragma unroll
  for (int s = 0; s < R::kSlots; s++) {
#pragma unroll 1
    for (int i = 0; i < R::kLanes && s * R::kLanes + i < p.top_k; i++) {
      const int place = R::from_lane(ids[s], i) - R::first();
      const float value = R::from_lane(d[s], i);
#pragma unroll
      for (int v = 0; v < R::kValues; v++) gradient[v] += place == v ? value : 0.0f;
    }
  }
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  with_row(p, logits.dtype, [&](auto choice) {
    using R = typename decltype(choice)::R;
    using Item = typename decltype(choice)::Item;
    constexpr int kRows = kRowThreads / R::kLanes;
    const std::size_t shared = R::group_words(p.n_group) * kRows * sizeof(std::uint32_t);
    route_rows<R, Item><<<blocks_of(p.tokens, kRows), kRowThreads, shared,
                          static_cast<cudaStream_t>(exec.stream)>>>(p, slots_of(ids, weights));
  });
  check_launch("the launch of route");
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  with_plain_row(p, logits.dtype, [&](auto choice) {
    using R = typename decltype(choice)::R;
    constexpr int kRows = kRowThreads / R::kLanes;
    route_rows_backward<R>
        <<<blocks_of(p.tokens, kRows), kRowThreads, 0, static_cast<cudaStream_t>(exec.stream)>>>(
            p, slots_of(ids, dweights), view_of(dlogits));
  });
  check_launch("the launch of route_backward");
}

}  // namespace sonicmoe::cuda
