// Arguments and arithmetic of the kernels that sum a token's rows.
#pragma once

#include <cstdint>

#include "cuda/math/element.cuh"
#include "cuda/metadata/slot_view.cuh"

namespace sonicmoe::cuda {

struct SumArgs {
  const void* rows;  // (C, d), contiguous
  void* out;
  std::int64_t out_stride;
  std::int64_t tokens;
  std::int32_t chunks;  // d / 8
  std::int32_t top_k;   // positions of a token if token_offsets is null
  const std::int32_t* position_row;
  const std::int32_t* position_slot;
  const std::int32_t* token_offsets;
  SlotView weights;      // no data: all weights are 1
  std::int32_t is_fp16;  // 1: elements are fp16; 0: bf16
};

template <class Element>
__device__ __forceinline__ void accumulate(float (&sum)[8], const uint4& v, float weight) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum[2 * i] = fmaf(weight, Pair<Element>::low(words[i]), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, Pair<Element>::high(words[i]), sum[2 * i + 1]);
  }
}

template <class Element>
__device__ __forceinline__ uint4 rounded(const float (&sum)[8]) {
  return {Pair<Element>::pack(sum[0], sum[1]), Pair<Element>::pack(sum[2], sum[3]),
          Pair<Element>::pack(sum[4], sum[5]), Pair<Element>::pack(sum[6], sum[7])};
}

__device__ __forceinline__ uint4 rounded(const SumArgs& a, const float (&sum)[8]) {
  return a.is_fp16 != 0 ? rounded<__half>(sum) : rounded<__nv_bfloat16>(sum);
}

}  // namespace sonicmoe::cuda
