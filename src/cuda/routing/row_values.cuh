// Parts of a row of logits: the view of its memory, one logit, the items that selection compares,
// and sums over the lanes that hold a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/score.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxGroups = 256;  // by the shared memory of select()

/// A matrix of logits or of their gradients.
struct LogitsView {
  void* data;
  std::int64_t row_stride;
  std::int64_t column_stride;
  std::int32_t vectors;  ///< 1: a lane may load and store its elements 16 bytes at a time
  DType dtype;           ///< bf16, f16 or f32
};

/// RouteOptions and the logits, as an argument of kernels.
struct RouteParams {
  LogitsView logits;
  std::int64_t tokens;
  std::int32_t experts;
  std::int32_t top_k;
  ScoreMode score;
  std::int32_t renormalize;
  float scale;
  const float* bias;
  std::int64_t bias_stride;
  std::int32_t n_group;
  std::int32_t topk_group;
};

template <class Logit>
__device__ float widen(std::uint32_t bits);
template <>
__device__ inline float widen<__nv_bfloat16>(std::uint32_t bits) {
  return key::float_of(bits << 16);
}
template <>
__device__ inline float widen<__half>(std::uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
template <class Logit>
__device__ Logit narrow(float v);
template <>
__device__ inline float narrow<float>(float v) {
  return v;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ inline __half narrow<__half>(float v) {
  return __float2half_rn(v);
}

/// Two bf16 of a word to fp32. The compiler's own conversion takes twice the operations.
__device__ inline float2 two_floats(std::uint32_t word) {
  return {key::float_of(word << 16), key::float_of(word & 0xffff0000u)};
}

/// Two 16-bit logits of a word as routing sees them: key::clean() for both at once.
template <class Logit>
__device__ float2 clean_two(std::uint32_t word);
template <>
__device__ inline float2 clean_two<__nv_bfloat16>(std::uint32_t word) {
  const __nv_bfloat162 lowest = __float2bfloat162_rn(key::minus_infinity());
  const __nv_bfloat162 largest = __float2bfloat162_rn(key::kLargestBF16);
  __nv_bfloat162 two = *reinterpret_cast<const __nv_bfloat162*>(&word);
  two = __hmin2(__hmax2(two, lowest), largest);  // the maximum drops a NaN
  return two_floats(*reinterpret_cast<const std::uint32_t*>(&two));
}
template <>
__device__ inline float2 clean_two<__half>(std::uint32_t word) {
  const __half2 lowest = __float2half2_rn(key::minus_infinity());
  const __half2 largest = __float2half2_rn(key::kLargestF16);
  const __half2 two = *reinterpret_cast<const __half2*>(&word);
  return __half22float2(__hmin2(__hmax2(two, lowest), largest));
}

/// One logit, as routing sees it; -inf for expert -1.
__device__ inline float logit_at(const LogitsView& logits, std::int64_t token, int expert) {
  if (expert < 0) return key::minus_infinity();
  const std::int64_t at = token * logits.row_stride + expert * logits.column_stride;
  if (logits.dtype == DType::kF32) {
    return key::clean(static_cast<const float*>(logits.data)[at], key::kLargestF32);
  }
  const std::uint32_t bits = static_cast<const std::uint16_t*>(logits.data)[at];
  return logits.dtype == DType::kF16 ? key::clean(widen<__half>(bits), key::kLargestF16)
                                     : key::clean(widen<__nv_bfloat16>(bits), key::kLargestBF16);
}

/// Returns the expert of an item, -1 for an unavailable expert. An item is an expert as selection
/// compares it: larger is better, no two available experts are equal, and unavailable ones are
/// smaller.
///
///   | item                 | upper half                        | lower half      |
///   | u64                  | order bits of the selection value | inverted expert |
///   | u32, for bf16 logits | upper 16 order bits, plus 1       | inverted expert |
///
/// With equal upper halves the lower expert number is better. The upper half of a u32 is 0 for NaN,
/// whose order bits are all ones.
template <class Item>
__device__ int item_expert(Item item) {
  if constexpr (sizeof(Item) == 4) {
    return item >> 16 > (key::kUnavailable >> 16) + 1 ? static_cast<int>(~item & 0xffffu) : -1;
  } else {
    return item >> 32 > key::kUnavailable ? static_cast<int>(~static_cast<std::uint32_t>(item))
                                          : -1;
  }
}

/// The bf16 logit in an item of 32 bits; -inf for an unavailable expert.
__device__ inline float item_logit(std::uint32_t item) {
  const std::uint32_t order = (item - 0x10000u) & 0xffff0000u;
  const std::uint32_t bits = key::bits_of(key::from_order_bits(order)) & 0xffff0000u;
  return item_expert(item) >= 0 ? key::float_of(bits) : key::minus_infinity();
}
/// The logit of a slot's item.
__device__ inline float slot_logit(const RouteParams&, std::int64_t, std::uint32_t item) {
  return item_logit(item);
}
__device__ inline float slot_logit(const RouteParams& p, std::int64_t token, std::uint64_t item) {
  return logit_at(p.logits, token, item_expert(item));
}

template <int kLanes>
__device__ std::uint32_t lanes_max(std::uint32_t v) {
  if constexpr (kLanes == 32) {
    return __reduce_max_sync(kAllLanes, v);
  } else {
    for (int d = 1; d < kLanes; d *= 2) v = max(v, __shfl_xor_sync(kAllLanes, v, d));
    return v;
  }
}
template <int kLanes>
__device__ std::uint64_t lanes_max(std::uint64_t v) {
  const auto high = static_cast<std::uint32_t>(v >> 32);
  const std::uint32_t best = lanes_max<kLanes>(high);
  const std::uint32_t low = lanes_max<kLanes>(high == best ? static_cast<std::uint32_t>(v) : 0u);
  return static_cast<std::uint64_t>(best) << 32 | low;
}
template <int kLanes>
__device__ float lanes_max(float v) {
  for (int d = 1; d < kLanes; d *= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}
template <int kLanes>
__device__ float lanes_sum(float v) {
  for (int d = 1; d < kLanes; d *= 2) v = key::add32(v, __shfl_xor_sync(kAllLanes, v, d));
  return v;
}

/// A row's softmax: p = exp32(x - top) * inverse; inverse is 0 where nothing is available.
struct Softmax {
  float top;
  float inverse;
  __device__ float operator()(float x) const {
    return inverse == 0.0f ? 0.0f : key::mul32(key::exp32(x - top), inverse);
  }
};

/// The score of a logit; `s` is the softmax of other modes than the pointwise ones.
__device__ inline float score_of(ScoreMode score, const Softmax& s, float x) {
  return key::pointwise(score) ? key::pointwise_score(score, x) : s(x);
}

}  // namespace sonicmoe::cuda
