// The 16-bit element types, packed in pairs as fragments hold them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/hopper/engine/concepts.cuh"

namespace sonicmoe::cuda {

template <class Element>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float low(std::uint32_t v) { return __uint_as_float(v << 16); }
  static __device__ __forceinline__ float high(std::uint32_t v) {
    return __uint_as_float(v & 0xffff0000u);
  }
  /// To the element type and back.
  static __device__ __forceinline__ float2 round(float low, float high) {
    return {__uint_as_float(pack(0.0f, low)), __uint_as_float(pack(0.0f, high))};
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float low(std::uint32_t v) {
    return __low2float(*reinterpret_cast<const __half2*>(&v));
  }
  static __device__ __forceinline__ float high(std::uint32_t v) {
    return __high2float(*reinterpret_cast<const __half2*>(&v));
  }
  static __device__ __forceinline__ float2 round(float low, float high) {
    return __half22float2(__floats2half2_rn(low, high));
  }
};

/// A bias of every expert's columns, strides in elements; null: none.
struct Bias {
  const void* data;
  std::int64_t expert_stride;
  std::int64_t column_stride;
};

/// Accumulator columns that a bias is for: first, first + step, ...
struct BiasPlace {
  int first;
  int step;
  int count;
};

/// Puts the bias of output columns column.. of `width` at `place`. Through shared memory, because
/// an unrolled epilogue with 192 accumulators has no registers left to hold biases; the caller
/// syncs.
template <TileShape kShape>
__device__ __forceinline__ void stage_bias(const Staging<kShape>& staging, const Bias& bias,
                                           int expert, int column, int width, BiasPlace place) {
  const auto* data = static_cast<const std::uint16_t*>(bias.data) + expert * bias.expert_stride;
  for (int i = threadIdx.x & 127; i < place.count; i += kWarpgroup) {
    const int c = column + i;
    staging.set_bias(place.first + i * place.step,
                     c < width ? __ldg(data + c * bias.column_stride) : 0);
  }
}

/// As round_block below, each row then scaled (before the one rounding).
template <class Element, TileShape kShape>
__device__ __forceinline__ void round_scaled_block(Fragment& block, const float* acc,
                                                   const Staging<kShape>& staging, int column,
                                                   int half) {
  const float first = staging.row_scale(half, 0);
  const float second = staging.row_scale(half, 1);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const std::uint32_t bias = staging.bias_pair(column + i * 8);
    const float low = Pair<Element>::low(bias);
    const float high = Pair<Element>::high(bias);
    block[2 * i] = Pair<Element>::pack((acc[4 * i] + low) * first, (acc[4 * i + 1] + high) * first);
    block[2 * i + 1] =
        Pair<Element>::pack((acc[4 * i + 2] + low) * second, (acc[4 * i + 3] + high) * second);
  }
}

/// Whether a bias was staged: without one, neither its loads nor its additions are paid.
enum class BiasUse { kNone, kStaged };

/// Rounds 64 accumulator columns, bias added, to the element type. The accumulator itself stays as
/// it is: wgmma wants to be its only writer.
template <class Element, BiasUse kBias, TileShape kShape>
__device__ __forceinline__ void round_block(Fragment& block, const float* acc,
                                            const Staging<kShape>& staging, int column) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float* four = acc + 4 * i;
    if constexpr (kBias == BiasUse::kNone) {
      block[2 * i] = Pair<Element>::pack(four[0], four[1]);
      block[2 * i + 1] = Pair<Element>::pack(four[2], four[3]);
    } else {
      const std::uint32_t bias = staging.bias_pair(column + i * 8);
      const float low = Pair<Element>::low(bias);
      const float high = Pair<Element>::high(bias);
      block[2 * i] = Pair<Element>::pack(four[0] + low, four[1] + high);
      block[2 * i + 1] = Pair<Element>::pack(four[2] + low, four[3] + high);
    }
  }
}

}  // namespace sonicmoe::cuda
