// One token's logits over the lanes of a warp: values, sums, selection, weights.
//
// kLanes lanes share a row (32 / kLanes rows a warp); each holds kValues consecutive experts, so
// that the tree of core/selection_key.h is: pairs within a lane, then shuffles over 1, 2, 4, ...
// lanes. All 32 lanes take part in every call; rows past the last are repeated and not written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/selection_key.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kMaxTopK = 32;
inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxGroups = 256;  // shared memory of select()

/// A matrix of logits or of their gradients.
struct LogitsView {
  void* data;
  std::int64_t row_stride;
  std::int64_t column_stride;
  std::int32_t vectors;  ///< 1: kValues elements of a lane may be moved 16 bytes at a time
};

/// RouteOptions as the kernels see them.
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
__device__ float widen(Logit v);
template <>
__device__ inline float widen<float>(float v) {
  return v;
}
template <>
__device__ inline float widen<__nv_bfloat16>(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
template <>
__device__ inline float widen<__half>(__half v) {
  return __half2float(v);
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
template <class Logit>
inline constexpr float kLargest = key::kLargestF32;
template <>
inline constexpr float kLargest<__nv_bfloat16> = key::kLargestBF16;
template <>
inline constexpr float kLargest<__half> = key::kLargestF16;

/// What is compared in selection: larger is better, and no two experts are equal.
/// u32: the upper 16 order bits of a bf16 logit; u64: all 32. The rest is the expert, lower better.
template <class Item>
__device__ Item make_item(std::uint32_t order, int expert) {
  if constexpr (sizeof(Item) == 4) {
    return (order & 0xffff0000u) | (0xffffu - static_cast<std::uint32_t>(expert));
  } else {
    return static_cast<Item>(order) << 32 | (0xffffffffu - static_cast<std::uint32_t>(expert));
  }
}
/// The expert of an item, or -1 if it is not available.
template <class Item>
__device__ int item_expert(Item item) {
  if constexpr (sizeof(Item) == 4) {
    return item >> 16 > key::kUnavailable >> 16 ? static_cast<int>(0xffffu - (item & 0xffffu)) : -1;
  } else {
    return item >> 32 > key::kUnavailable
               ? static_cast<int>(0xffffffffu - static_cast<std::uint32_t>(item))
               : -1;
  }
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

template <class LogitType, int kLaneCount, int kValueCount>
struct Row {
  using Logit = LogitType;
  static constexpr int kLanes = kLaneCount;
  static constexpr int kValues = kValueCount;
  static constexpr int kRowsPerWarp = 32 / kLanes;
  /// Slots of the top K that a lane holds: slot k lies in lane k % kLanes, register k / kLanes.
  static constexpr int kSlots = kMaxTopK / kLanes;

  float x[kValues];

  static __device__ int lane() { return threadIdx.x % kLanes; }
  static __device__ int first() { return lane() * kValues; }
  /// The value that a lane of this row holds.
  template <class T>
  static __device__ T from_lane(T v, int source) {
    return __shfl_sync(kAllLanes, v, source, kLanes);
  }

  __device__ void load(const RouteParams& p, std::int64_t token) {
    const Logit* row = static_cast<const Logit*>(p.logits.data) + token * p.logits.row_stride;
    if (p.logits.vectors != 0) {
      constexpr int kPerVector = 16 / sizeof(Logit);
#pragma unroll
      for (int v = 0; v < kValues; v += kPerVector) {
        uint4 bytes{};
        if (first() + v < p.experts) bytes = *reinterpret_cast<const uint4*>(row + first() + v);
        const Logit* values = reinterpret_cast<const Logit*>(&bytes);
#pragma unroll
        for (int i = 0; i < kPerVector; i++) x[v + i] = widen(values[i]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kValues; v++) {
        const int e = first() + v;
        x[v] = e < p.experts ? widen(row[e * p.logits.column_stride]) : 0.0f;
      }
    }
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      x[v] = first() + v < p.experts ? key::clean(x[v], kLargest<Logit>) : key::minus_infinity();
    }
  }

  /// One logit again, by the lane that needs it; -inf for expert -1.
  static __device__ float reload(const RouteParams& p, std::int64_t token, int expert) {
    if (expert < 0) return key::minus_infinity();
    const Logit* row = static_cast<const Logit*>(p.logits.data) + token * p.logits.row_stride;
    return key::clean(widen(row[expert * p.logits.column_stride]), kLargest<Logit>);
  }

  __device__ Softmax softmax() const {
    float top = x[0];
#pragma unroll
    for (int v = 1; v < kValues; v++) top = fmaxf(top, x[v]);
    top = lanes_max<kLanes>(top);
    if (!(top > key::minus_infinity())) top = 0.0f;  // every exponential is then 0
    float e[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) e[v] = key::exp32(x[v] - top);
#pragma unroll
    for (int d = 1; d < kValues; d *= 2) {
#pragma unroll
      for (int v = 0; v < kValues; v += 2 * d) e[v] = key::add32(e[v], e[v + d]);
    }
    const float sum = lanes_sum<kLanes>(e[0]);
    return {top, sum > 0.0f ? key::div32(1.0f, sum) : 0.0f};
  }

  /// p of every expert of this lane: softmax, or the sigmoid for sigmoid routing.
  __device__ void probabilities(const RouteParams& p, const Softmax& s, float* out) const {
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      out[v] = p.score == ScoreMode::kSigmoid ? key::sigmoid32(x[v]) : s(x[v]);
    }
  }

  /// Chooses K experts: slot k's expert, or -1. `groups` is shared memory of this row
  /// (group_words() words) where n_group > 0.
  template <class Item>
  __device__ void select(const RouteParams& p, std::uint32_t* groups, int (&ids)[kSlots]) const {
    float value[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) value[v] = x[v];
    if (sizeof(Item) == 8 && p.score == ScoreMode::kSigmoid) {
#pragma unroll
      for (int v = 0; v < kValues; v++) {
        const int e = first() + v;
        const float bias = p.bias != nullptr && e < p.experts ? p.bias[e * p.bias_stride] : 0.0f;
        value[v] = key::biased(x[v], key::sigmoid32(x[v]), bias);
      }
    }
    if (sizeof(Item) == 8 && p.n_group > 0) keep_best_groups(p, groups, value);
    Item item[kValues];
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      item[v] = make_item<Item>(key::order_bits(value[v]), first() + v);
    }
    sort_descending(item);
#pragma unroll
    for (int r = 0; r < kSlots; r++) {
      Item mine = 0;
#pragma unroll 1
      for (int i = 0; i < kLanes && r * kLanes + i < p.top_k; i++) {
        const Item best = lanes_max<kLanes>(item[0]);
        if (lane() == i) mine = best;
        if (item[0] == best) {
#pragma unroll
          for (int v = 0; v + 1 < kValues; v++) item[v] = item[v + 1];
          item[kValues - 1] = 0;
        }
      }
      ids[r] = item_expert(mine);
    }
  }

  /// Scores of the slots before renormalisation and scale; 0 for empty ones.
  static __device__ void raw_scores(const RouteParams& p, const Softmax& all,
                                    const int (&ids)[kSlots], const float (&slot_x)[kSlots],
                                    float (&raw)[kSlots]) {
    Softmax s = all;
    if (p.score == ScoreMode::kSoftmaxAfterTopK) s = slots_softmax(slot_x);
#pragma unroll
    for (int r = 0; r < kSlots; r++) {
      const float score = p.score == ScoreMode::kSigmoid ? key::sigmoid32(slot_x[r]) : s(slot_x[r]);
      raw[r] = ids[r] < 0 ? 0.0f : score;
    }
  }

  /// Sum over the K slots, by the tree.
  static __device__ float slots_sum(const float (&v)[kSlots]) {
    float part[kSlots];
#pragma unroll
    for (int r = 0; r < kSlots; r++) part[r] = lanes_sum<kLanes>(v[r]);
#pragma unroll
    for (int d = 1; d < kSlots; d *= 2) {
#pragma unroll
      for (int r = 0; r < kSlots; r += 2 * d) part[r] = key::add32(part[r], part[r + d]);
    }
    return part[0];
  }

  static __device__ Softmax slots_softmax(const float (&slot_x)[kSlots]) {
    float top = slot_x[0];
#pragma unroll
    for (int r = 1; r < kSlots; r++) top = fmaxf(top, slot_x[r]);
    top = lanes_max<kLanes>(top);
    if (!(top > key::minus_infinity())) top = 0.0f;
    float e[kSlots];
#pragma unroll
    for (int r = 0; r < kSlots; r++) e[r] = key::exp32(slot_x[r] - top);
    const float sum = slots_sum(e);
    return {top, sum > 0.0f ? key::div32(1.0f, sum) : 0.0f};
  }

  static __device__ void weigh(const RouteParams& p, const int (&ids)[kSlots],
                               const float (&raw)[kSlots], float (&weights)[kSlots]) {
    const float sum = p.renormalize != 0 ? key::add32(slots_sum(raw), 1e-20f) : 1.0f;
#pragma unroll
    for (int r = 0; r < kSlots; r++) {
      const float share = p.renormalize != 0 ? key::div32(raw[r], sum) : raw[r];
      weights[r] = ids[r] < 0 ? 0.0f : key::mul32(share, p.scale);
    }
  }

  /// Words of shared memory that select() needs for a row.
  static __host__ __device__ int group_words(int n_group) {
    return n_group > 0 ? kLanes * kValues + 2 * n_group : 0;
  }

 private:
  // The lanes of a row look at its groups through shared memory: groups need not match lanes.
  static __device__ void keep_best_groups(const RouteParams& p, std::uint32_t* groups,
                                          float (&value)[kValues]) {
    auto* values = reinterpret_cast<float*>(groups);
    std::uint32_t* order = groups + kLanes * kValues;
    std::uint32_t* keep = order + p.n_group;
    const int size = p.experts / p.n_group;
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kValues; v++) values[first() + v] = value[v];
    __syncwarp();
    for (int g = lane(); g < p.n_group; g += kLanes) {
      float best = key::minus_infinity();
      float second = best;
      for (int e = g * size; e < (g + 1) * size; e++) {
        const float v = values[e];
        second = v > best ? best : fmaxf(second, v);
        best = fmaxf(best, v);
      }
      order[g] = key::order_bits(size == 1 ? best : key::group_value(best, second));
    }
    __syncwarp();
    for (int g = lane(); g < p.n_group; g += kLanes) {
      int before = 0;
      for (int h = 0; h < p.n_group; h++) {
        before += order[h] > order[g] || (order[h] == order[g] && h < g) ? 1 : 0;
      }
      keep[g] = before < p.topk_group ? 1 : 0;
    }
    __syncwarp();
#pragma unroll
    for (int v = 0; v < kValues; v++) {
      const int e = first() + v;
      if (e < p.experts && keep[e / size] == 0) value[v] = key::minus_infinity();
    }
  }

  // Bitonic: the indices are known at compile time, so the items stay in registers.
  template <class Item>
  static __device__ void sort_descending(Item (&item)[kValues]) {
#pragma unroll
    for (int run = 2; run <= kValues; run *= 2) {
#pragma unroll
      for (int d = run / 2; d > 0; d /= 2) {
#pragma unroll
        for (int v = 0; v < kValues; v++) {
          if ((v & d) != 0) continue;
          const Item a = item[v];
          const Item b = item[v + d];
          const bool descending = (v & run) == 0;
          item[v] = descending ? max(a, b) : min(a, b);
          item[v + d] = descending ? min(a, b) : max(a, b);
        }
      }
    }
  }
};

/// Gradient of the weights, slot by slot.
struct SlotGradient {
  float mean;  ///< sum of d(raw) * raw; softmax over all E subtracts mean * p everywhere
};

/// dweights -> what each slot adds to its logit (in place), and the mean for kSoftmaxBeforeTopK.
template <class R>
__device__ SlotGradient slot_gradient(const RouteParams& p, const int (&ids)[R::kSlots],
                                      const float (&raw)[R::kSlots], float (&d)[R::kSlots]) {
  float part[R::kSlots];
  float sum = 1.0f;
  float through_sum = 0.0f;
#pragma unroll
  for (int r = 0; r < R::kSlots; r++) d[r] = ids[r] < 0 ? 0.0f : d[r] * p.scale;
  if (p.renormalize != 0) {
    sum = R::slots_sum(raw) + 1e-20f;
#pragma unroll
    for (int r = 0; r < R::kSlots; r++) part[r] = d[r] * (raw[r] / sum);
    through_sum = R::slots_sum(part);
  }
#pragma unroll
  for (int r = 0; r < R::kSlots; r++) {
    d[r] = ids[r] < 0 ? 0.0f : (d[r] - through_sum) / sum;
    part[r] = d[r] * raw[r];
  }
  const float mean = R::slots_sum(part);
#pragma unroll
  for (int r = 0; r < R::kSlots; r++) {
    float factor = d[r];
    if (p.score == ScoreMode::kSigmoid) factor *= 1.0f - raw[r];
    if (p.score == ScoreMode::kSoftmaxAfterTopK) factor -= mean;
    d[r] = ids[r] < 0 ? 0.0f : raw[r] * factor;
  }
  return {p.score == ScoreMode::kSoftmaxBeforeTopK ? mean : 0.0f};
}

/// Writes a lane's part of a row of gradients.
template <class R>
__device__ void store_gradient(const LogitsView& out, std::int64_t token, int experts,
                               const float (&d)[R::kValues]) {
  using Logit = typename R::Logit;
  Logit* row = static_cast<Logit*>(out.data) + token * out.row_stride;
  if (out.vectors != 0) {
    constexpr int kPerVector = 16 / sizeof(Logit);
#pragma unroll
    for (int v = 0; v < R::kValues; v += kPerVector) {
      uint4 bytes;
      Logit* values = reinterpret_cast<Logit*>(&bytes);
#pragma unroll
      for (int i = 0; i < kPerVector; i++) values[i] = narrow<Logit>(d[v + i]);
      if (R::first() + v < experts) *reinterpret_cast<uint4*>(row + R::first() + v) = bytes;
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < R::kValues; v++) {
    const int e = R::first() + v;
    if (e < experts) row[e * out.column_stride] = narrow<Logit>(d[v]);
  }
}

}  // namespace sonicmoe::cuda
