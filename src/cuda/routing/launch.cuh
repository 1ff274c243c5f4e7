// Makes kernel parameters from tensors, and chooses the Row for a dtype, E and K.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "cuda/routing/row.cuh"

namespace sonicmoe::cuda {

inline constexpr int kRowWarps = 4;
inline constexpr int kRowThreads = 32 * kRowWarps;

inline LogitsView view_of(const Tensor& t) {
  const std::int64_t per_vector = 16 / dtype_bytes(t.dtype);
  const bool vectors = t.stride[1] == 1 && t.shape[1] % per_vector == 0 &&
                       t.stride[0] % per_vector == 0 &&
                       reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  return {t.data, t.stride[0], t.stride[1], vectors ? 1 : 0, t.dtype};
}

inline RouteParams params_of(const RouteOptions& o, const Tensor& logits) {
  if (logits.dtype != DType::kBF16 && logits.dtype != DType::kF16 && logits.dtype != DType::kF32) {
    throw Error(Status::kUnsupported, std::string("logits is ") + dtype_name(logits.dtype) +
                                          ", routing on CUDA takes bf16, f16 or f32");
  }
  if (logits.shape[1] > kMaxExperts) {
    throw Error(Status::kUnsupported, "experts is " + std::to_string(logits.shape[1]) +
                                          ", routing on CUDA takes at most " +
                                          std::to_string(kMaxExperts));
  }
  if (o.top_k > kMaxTopK) {
    throw Error(Status::kUnsupported, "top_k is " + std::to_string(o.top_k) +
                                          ", routing on CUDA takes at most " +
                                          std::to_string(kMaxTopK));
  }
  if (o.n_group > kMaxGroups) {
    throw Error(Status::kUnsupported, "n_group is " + std::to_string(o.n_group) +
                                          ", routing on CUDA takes at most " +
                                          std::to_string(kMaxGroups));
  }
  RouteParams p{};
  p.logits = view_of(logits);
  p.tokens = logits.shape[0];
  p.experts = static_cast<std::int32_t>(logits.shape[1]);
  p.top_k = static_cast<std::int32_t>(o.top_k);
  p.score = o.score;
  p.renormalize = o.renormalize;
  p.scale = static_cast<float>(o.scale);
  p.bias = static_cast<const float*>(o.bias.data);
  p.bias_stride = o.bias.stride[0];
  p.n_group = static_cast<std::int32_t>(o.n_group);
  p.topk_group = static_cast<std::int32_t>(o.topk_group);
  return p;
}

/// Names a Row and the item that its selection compares.
template <class RowType, class ItemType>
struct RowChoice {
  using R = RowType;
  using Item = ItemType;
};

/// Whether the selection values are the bf16 logits themselves. Then the compared items have 32
/// bits (item_expert), of which 16 are the logit.
inline bool selects_by_word(const RouteParams& p) {
  return p.logits.dtype == DType::kBF16 && !key::pointwise(p.score) && p.n_group == 0;
}

template <class Item, class Body>
void with_narrow_row(const RouteParams& p, const Body& body) {
  if (p.experts <= 64 && p.top_k <= 8) {
    body(RowChoice<Row<8, 8, 8>, Item>{});
  } else if (p.experts <= 128 && p.top_k <= 16) {
    body(RowChoice<Row<16, 8, 16>, Item>{});
  } else if (p.experts <= 256 && p.top_k <= 8) {
    body(RowChoice<Row<32, 8, 8>, Item>{});
  } else if (p.experts <= 256) {
    body(RowChoice<Row<32, 8, 32>, Item>{});
  } else if (p.experts <= 512) {
    body(RowChoice<Row<32, 16, 32>, Item>{});
  } else {
    body(RowChoice<Row<32, 32, 32>, Item>{});
  }
}

/// Calls body(RowChoice) for the logits, E and K.
template <class Body>
void with_row(const RouteParams& p, const Body& body) {
  if (selects_by_word(p)) {
    with_narrow_row<std::uint32_t>(p, body);
  } else {
    with_narrow_row<std::uint64_t>(p, body);
  }
}

template <class Item, class Body>
void with_wide_row(const RouteParams& p, const Body& body) {
  if (p.experts <= 256) {
    body(RowChoice<Row<32, 8, 32>, Item>{});
  } else {
    body(RowChoice<Row<32, 32, 32>, Item>{});
  }
}

/// As with_row, with a warp for every row. Fewer kernels, for launches whose time matters less.
template <class Body>
void with_wide_row(const RouteParams& p, const Body& body) {
  if (selects_by_word(p)) {
    with_wide_row<std::uint32_t>(p, body);
  } else {
    with_wide_row<std::uint64_t>(p, body);
  }
}

/// Rows that a block of `threads` finishes.
template <class R>
constexpr int rows_of_block(int threads) {
  return threads / 32 * R::kRowsPerWarp;
}

inline unsigned blocks_of(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace sonicmoe::cuda
