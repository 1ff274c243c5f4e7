// Top-k on CUDA, and its gradient: a warp, or a part of one, for each token.
#include "cuda/launch.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/routing.h"
#include "cuda/routing/slots.cuh"

namespace sonicmoe::cuda {
namespace {

/// The first row of this thread's warp.
template <class R>
__device__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * rows_of_block<R>(kRowThreads) +
         threadIdx.x / 32 * R::kRowsPerWarp;
}

template <class R, class Item>
__global__ void __launch_bounds__(kRowThreads, R::kValues == 8 && sizeof(Item) == 4 ? 16 : 1)
    route_rows(RouteParams p, SlotsView out) {
  extern __shared__ __align__(8) std::uint32_t shared[];
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t first = first_row<R>();
  Softmax all{};
  Item mine = 0;
#pragma unroll 1
  for (int pass = 0; pass < R::kPasses; pass++) {
    const std::int64_t token = min(first + R::read_row(pass), p.tokens - 1);
    Softmax own{};
    read_row<R>(p, token, R::template room_of<Item>(shared, p.n_group), pass, &mine,
                [&](const auto& row) {
                  if (p.score == ScoreMode::kSoftmaxBeforeTopK) own = row().softmax();
                });
    if (R::in_pass(pass)) all = own;
  }
  const std::int64_t row = first + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  const int id = item_expert(mine);
  const float x = slot_logit(p, token, mine);
  const float raw = R::raw_score(p, R::score_softmax(p, all, x), id, x);
  const float weight = R::weigh(p, id, raw);
  if (R::slot() >= p.top_k || row >= p.tokens) return;
  out.set_id(token, R::slot(), id);
  out.weight(token, R::slot()) = weight;
}

template <class R>
__global__ void __launch_bounds__(kRowThreads)
    route_rows_backward(RouteParams p, SlotsView in, LogitsView dlogits) {
  const std::int64_t row = first_row<R>() + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  R r;
  Softmax all{};
  if (p.score == ScoreMode::kSoftmaxBeforeTopK) {
    r.load(p, token);
    all = r.softmax();
  }
  const int id = R::slot() < p.top_k ? in.id(token, R::slot(), p.experts) : -1;
  const float x = logit_at(p.logits, token, id);
  const float raw = R::raw_score(p, R::score_softmax(p, all, x), id, x);
  const float dweight = id < 0 ? 0.0f : in.weight(token, R::slot());
  const SlotGradient through = slot_gradient<R>(p, id, raw, dweight);
  float gradient[R::kValues];
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    gradient[v] = p.score == ScoreMode::kSoftmaxBeforeTopK ? -through.mean * all(r.x[v]) : 0.0f;
  }
#pragma unroll 2
  for (int k = 0; k < p.top_k; k++) {
    const int place = R::from_slot(id, k) - R::first();
    const float value = R::from_slot(through.slot, k);
#pragma unroll
    for (int v = 0; v < R::kValues; v++) gradient[v] += place == v ? value : 0.0f;
  }
  if (row < p.tokens) store_gradient<R>(dlogits, token, p.experts, gradient);
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  with_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    using Item = typename decltype(choice)::Item;
    const std::size_t shared = R::template room_bytes<Item>(kRowThreads, p.n_group);
    constexpr int kRows = rows_of_block<R>(kRowThreads);
    launch_dependent("launching route", route_rows<R, Item>,
                     {blocks_of(p.tokens, kRows), kRowThreads, shared},
                     static_cast<cudaStream_t>(exec.stream), p, slots_of(ids, weights));
  });
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  with_wide_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    constexpr int kRows = rows_of_block<R>(kRowThreads);
    route_rows_backward<R>
        <<<blocks_of(p.tokens, kRows), kRowThreads, 0, static_cast<cudaStream_t>(exec.stream)>>>(
            p, slots_of(ids, dweights), view_of(dlogits));
  });
  check_launch("the launch of route_backward");
}

}  // namespace sonicmoe::cuda
