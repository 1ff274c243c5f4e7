// Top-k on CUDA, and its gradient: a warp, or a part of one, for each token.
#include "cuda/device/launch.h"
#include "cuda/device/resident.cuh"
#include "cuda/metadata/slot_view.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

/// The first row of this thread's warp.
template <class R>
__device__ std::int64_t first_row() {
  return static_cast<std::int64_t>(blockIdx.x) * rows_of_block<R>(kRowThreads) +
         threadIdx.x / 32 * R::kRowsPerWarp;
}

template <class R, class Item>
__global__ void __launch_bounds__(kRowThreads,
                                  resident_blocks(R::kValues == 8 && sizeof(Item) == 4 ? 16 : 1,
                                                  kRowThreads))
    route_rows(RouteParams p, SlotView ids, SlotView weights) {
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
    read_row<R>(p, token, R::template smem_of<Item>(shared, p.n_group), pass, &mine,
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
  ids.set_expert(ids.offset(token, R::slot()), id);
  weights.weight(weights.offset(token, R::slot())) = weight;
}

/// A warp zeroes `rows` rows.
__device__ void clear_rows(const LogitsView& out, std::int64_t first, int rows, int experts) {
  const int lane = threadIdx.x % 32;
  const int bytes = out.dtype == DType::kF32 ? 4 : 2;
  auto* data = static_cast<std::uint8_t*>(out.data) + first * out.row_stride * bytes;
  int length = experts;
  if (out.vectors != 0 && out.row_stride == experts) {  // the rows are contiguous
    length *= rows;
    rows = 1;
  }
  for (int r = 0; r < rows; r++, data += out.row_stride * bytes) {
    if (out.vectors != 0) {
      for (int i = lane; i < length * bytes / 16; i += 32) {
        reinterpret_cast<uint4*>(data)[i] = uint4{};
      }
    } else if (bytes == 4) {
      for (int e = lane; e < length; e += 32) {
        reinterpret_cast<float*>(data)[e * out.column_stride] = 0.0f;
      }
    } else {
      for (int e = lane; e < length; e += 32) {
        reinterpret_cast<std::uint16_t*>(data)[e * out.column_stride] = 0;
      }
    }
  }
}

/// Only chosen experts have a gradient: rows are zeroed, then every slot stores the gradient of its
/// expert. kWidth lanes hold the slots of a token.
template <int kWidth>
__global__ void __launch_bounds__(kRowThreads, resident_blocks(16, kRowThreads))
    route_slots_backward(RouteParams p, SlotView ids, SlotView dweights, LogitsView dlogits) {
  using R = Row<kWidth, 8, kWidth>;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t first = first_row<R>();
  if (first >= p.tokens) return;
  const std::int64_t row = first + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  const bool slot = R::slot() < p.top_k;
  const int id = slot ? ids.expert(ids.offset(token, R::slot()), p.experts) : -1;
  const float dweight = slot ? dweights.weight(dweights.offset(token, R::slot())) : 0.0f;
  clear_rows(dlogits, first, static_cast<int>(min(p.tokens - first, std::int64_t{R::kRowsPerWarp})),
             p.experts);
  const float x = logit_at(p.logits, token, id);
  const float raw = R::raw_score(p, R::score_softmax(p, Softmax{}, x), id, x);
  const SlotGradient through = slot_gradient<R>(p, id, x, raw, id < 0 ? 0.0f : dweight);
  // Two slots may name one expert: the first of them stores the sum.
  float sum = 0.0f;
  bool mine = id >= 0 && row < p.tokens;
#pragma unroll 2
  for (int k = 0; k < p.top_k; k++) {
    const bool same = R::from_slot(id, k) == id;
    const float value = R::from_slot(through.slot, k);
    if (same) sum += value;
    if (same && k < R::slot()) mine = false;
  }
  __syncwarp();  // the rows are zeroed
  if (mine) store_logit(dlogits, token, id, sum);
}

/// The gradient of routing by softmax over all E, which gives every expert a gradient.
template <class R>
__global__ void __launch_bounds__(kRowThreads)
    route_rows_backward(RouteParams p, SlotView ids, SlotView dweights, LogitsView dlogits) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t row = first_row<R>() + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  R r;
  r.load(p, token);
  const Softmax all = r.softmax();
  const int id = R::slot() < p.top_k ? ids.expert(ids.offset(token, R::slot()), p.experts) : -1;
  const float x = logit_at(p.logits, token, id);
  const float raw = R::raw_score(p, all, id, x);
  const float dweight = id < 0 ? 0.0f : dweights.weight(dweights.offset(token, R::slot()));
  const SlotGradient through = slot_gradient<R>(p, id, x, raw, dweight);
  float gradient[R::kValues];
#pragma unroll
  for (int v = 0; v < R::kValues; v++) gradient[v] = -through.mean * all(r.x[v]);
#pragma unroll 2
  for (int k = 0; k < p.top_k; k++) {
    const int own = R::from_slot(id, k) - R::first();  // value of this lane
    const float value = R::from_slot(through.slot, k);
#pragma unroll
    for (int v = 0; v < R::kValues; v++) gradient[v] += own == v ? value : 0.0f;
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
    const std::size_t shared = R::template smem_bytes<Item>(kRowThreads, p.n_group);
    constexpr int kRows = rows_of_block<R>(kRowThreads);
    launch_dependent(device_of(exec), "launching route", route_rows<R, Item>,
                     {blocks_of(p.tokens, kRows), kRowThreads, shared}, stream_of(exec), p,
                     slot_view(ids), slot_view(weights));
  });
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  const RouteParams p = params_of(options, logits);
  if (p.tokens == 0) return;
  const auto launch = [&](auto* kernel, int rows_of_warp) {
    launch_dependent(device_of(exec), "launching route_backward", kernel,
                     {blocks_of(p.tokens, kRowWarps * rows_of_warp), kRowThreads}, stream_of(exec),
                     p, slot_view(ids), slot_view(dweights), view_of(dlogits));
  };
  if (p.score == ScoreMode::kSoftmaxBeforeTopK) {
    with_wide_row(p, [&](auto choice) {
      using R = typename decltype(choice)::R;
      launch(route_rows_backward<R>, R::kRowsPerWarp);
    });
  } else if (p.top_k <= 8) {
    launch(route_slots_backward<8>, 4);
  } else if (p.top_k <= 16) {
    launch(route_slots_backward<16>, 2);
  } else {
    launch(route_slots_backward<32>, 1);
  }
}

}  // namespace sonicmoe::cuda
