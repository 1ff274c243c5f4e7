// From tensors to kernel parameters, and from a dtype and E to the Row that serves them.
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
  return {t.data, t.stride[0], t.stride[1], vectors ? 1 : 0};
}

inline RouteParams params_of(const RouteOptions& o, const Tensor& logits) {
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

/// How a warp's rows are finished: kTogether needs Row::kPasses, kOneByOne has one pass.
enum class Finish { kTogether, kOneByOne };

template <class Logit, class Item, Finish kFinish, class Body>
void with_experts(const RouteParams& p, const Body& body) {
  constexpr int kFew = kFinish == Finish::kTogether ? 8 : 32;
  if (p.experts <= 64 && p.top_k <= 8) {
    body(RowChoice<Row<Logit, 8, 8, 8>, Item>{});
  } else if (p.experts <= 128 && p.top_k <= 16) {
    body(RowChoice<Row<Logit, 16, 8, 16>, Item>{});
  } else if (p.experts <= 256 && p.top_k <= 8) {
    body(RowChoice<Row<Logit, 32, 8, kFew>, Item>{});
  } else if (p.experts <= 256) {
    body(RowChoice<Row<Logit, 32, 8, 32>, Item>{});
  } else if (p.experts <= 512) {
    body(RowChoice<Row<Logit, 32, 16, 32>, Item>{});
  } else {
    body(RowChoice<Row<Logit, 32, 32, 32>, Item>{});
  }
}

[[noreturn]] inline void refuse_logits(DType dtype) {
  throw Error(Status::kUnsupported, std::string("logits is ") + dtype_name(dtype) +
                                        ", routing on CUDA takes bf16, f16 or f32");
}

/// Calls body(RowChoice) for the logits' dtype, E and K. bf16 logits that are themselves the
/// selection value are compared as 16 bits.
template <Finish kFinish, class Body>
void with_row(const RouteParams& p, DType dtype, const Body& body) {
  if (dtype == DType::kF32) {
    with_experts<float, std::uint64_t, kFinish>(p, body);
  } else if (dtype == DType::kF16) {
    with_experts<__half, std::uint64_t, kFinish>(p, body);
  } else if (dtype != DType::kBF16) {
    refuse_logits(dtype);
  } else if (p.score == ScoreMode::kSigmoid || p.n_group > 0) {
    with_experts<__nv_bfloat16, std::uint64_t, kFinish>(p, body);
  } else {
    with_experts<__nv_bfloat16, std::uint32_t, kFinish>(p, body);
  }
}

/// As with_row, where nothing is selected.
template <class Body>
void with_plain_row(const RouteParams& p, DType dtype, const Body& body) {
  RouteParams plain = p;
  plain.score = ScoreMode::kSoftmaxBeforeTopK;
  plain.n_group = 0;
  with_row<Finish::kOneByOne>(plain, dtype, body);
}

/// As with_plain_row, with a warp for every row: fewer kernels where their speed matters less.
template <class Body>
void with_wide_row(const RouteParams& p, DType dtype, const Body& body) {
  const auto by_experts = [&](auto logit) {
    using Logit = decltype(logit);
    if (p.experts <= 256) {
      body(RowChoice<Row<Logit, 32, 8, 32>, std::uint64_t>{});
    } else {
      body(RowChoice<Row<Logit, 32, 32, 32>, std::uint64_t>{});
    }
  };
  if (dtype == DType::kF32) {
    by_experts(float{});
  } else if (dtype == DType::kF16) {
    by_experts(__half{});
  } else if (dtype == DType::kBF16) {
    by_experts(__nv_bfloat16{});
  } else {
    refuse_logits(dtype);
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

/// Throws Error(kCuda) naming `what` if the status or a launch before it failed.
inline void check_launch(const char* what, cudaError_t status = cudaGetLastError()) {
  if (status == cudaSuccess) return;
  throw Error(Status::kCuda,
              std::string("the CUDA runtime refused ") + what + ": " + cudaGetErrorString(status));
}

}  // namespace sonicmoe::cuda
