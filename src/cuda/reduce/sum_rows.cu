// One token a block (several where d is small), plain loads and stores: this runs at the copy
// bandwidth as long as enough bytes are on their way. What decides is how many threads a
// multiprocessor holds, so a thread loads two rows at a time, 32 bytes of each, whatever K is; four
// or eight rows at once take registers that threads then lack (a tenth to a half slower). A handful
// of tokens leaves the chip idle anyway: there eight rows at once save round trips. The order of
// the sum is fixed.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/epilogues/element.cuh"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/reduce/sum_rows.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kMostThreads = 256;             // of a block; wider rows take several rounds
constexpr std::int64_t kFewChunks = 1 << 16;  // of 16 bytes, of all tokens

// How a thread loads: kRows before the first is summed, of each kPieces of 16 bytes, blockDim.x
// apart, with kBlocks on a multiprocessor.
struct ManyTokens {
  static constexpr int kRows = 2, kPieces = 2, kBlocks = 4;
};
struct FewTokens {
  static constexpr int kRows = 8, kPieces = 1, kBlocks = 2;
};

struct SumArgs {
  const void* rows;  // (C, d), contiguous
  void* out;
  std::int64_t out_stride;
  std::int64_t tokens;
  std::int32_t chunks;  // d / 8
  std::int32_t top_k;   // positions of a token where it has no list
  const std::int32_t* position_row;
  const std::int32_t* position_slot;
  const std::int32_t* token_offsets;
  const float* weights;
  std::int64_t token_stride;   // of weights, where tokens have no list
  std::int64_t weight_stride;  // from one k, or one slot, to the next
  std::int32_t half;           // elements are fp16, else bf16
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

template <class Element, int kRows, int kPieces>
__device__ __forceinline__ void accumulate_rows(float (&sum)[kPieces][8],
                                                const uint4 (&value)[kRows][kPieces],
                                                const std::int32_t (&row)[kRows],
                                                const float (&weight)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    if (row[i] < 0) continue;
#pragma unroll
    for (int c = 0; c < kPieces; c++) accumulate<Element>(sum[c], value[i][c], weight[i]);
  }
}

template <class Load>
__global__ void __launch_bounds__(kMostThreads, Load::kBlocks) sum_rows_kernel(const SumArgs a) {
  constexpr int kRows = Load::kRows;
  constexpr int kPieces = Load::kPieces;
  ptx::wait_for_previous_kernel();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= a.tokens) return;
  const bool listed = a.token_offsets != nullptr;
  const std::int64_t begin = listed ? a.token_offsets[token] : token * a.top_k;
  const int count = listed ? static_cast<int>(a.token_offsets[token + 1] - begin) : a.top_k;
  const std::int32_t* look_up = a.position_row + begin;
  const std::int32_t* slots = a.position_slot != nullptr ? a.position_slot + begin : nullptr;
  const float* weights = a.weights;
  if (weights != nullptr && !listed) weights += token * a.token_stride;
  if (weights != nullptr && listed && slots == nullptr) weights += begin * a.weight_stride;
  auto* out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(a.out) + token * a.out_stride);
  const int step = blockDim.x;
  for (int first = threadIdx.x; first < a.chunks; first += kPieces * step) {
    const uint4* rows = static_cast<const uint4*>(a.rows) + first;
    float sum[kPieces][8] = {};
    for (int k0 = 0; k0 < count; k0 += kRows) {
      // In this order: a look-up after the loads of a row would wait for them, and rows that come
      // after weights would wait for these.
      std::int32_t row[kRows];
      std::int32_t slot[kRows];
      uint4 value[kRows][kPieces];
      float weight[kRows];
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        row[i] = k0 + i < count ? __ldg(look_up + k0 + i) : -1;
        slot[i] = k0 + i < count && slots != nullptr ? __ldg(slots + k0 + i) : k0 + i;
      }
#pragma unroll
      for (int i = 0; i < kRows; i++) {
#pragma unroll
        for (int c = 0; c < kPieces; c++) {
          if (row[i] < 0 || first + c * step >= a.chunks) continue;
          value[i][c] =
              ptx::load_constant16(rows + static_cast<std::int64_t>(row[i]) * a.chunks + c * step);
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        weight[i] =
            row[i] >= 0 && weights != nullptr ? __ldg(weights + slot[i] * a.weight_stride) : 1.0f;
      }
      if (a.half != 0) {
        accumulate_rows<__half>(sum, value, row, weight);
      } else {
        accumulate_rows<__nv_bfloat16>(sum, value, row, weight);
      }
    }
#pragma unroll
    for (int c = 0; c < kPieces; c++) {
      if (first + c * step >= a.chunks) break;
      out[first + c * step] =
          a.half != 0 ? rounded<__half>(sum[c]) : rounded<__nv_bfloat16>(sum[c]);
    }
  }
}

}  // namespace

void sum_rows(const Problem& problem, const Metadata& metadata, const void* rows,
              const Tensor& weights, const Tensor& out, cudaStream_t stream) {
  if (problem.tokens == 0) return;
  SumArgs args{};
  args.rows = rows;
  args.out = out.data;
  args.out_stride = out.stride[0];
  args.tokens = problem.tokens;
  args.chunks = static_cast<std::int32_t>(problem.hidden / 8);
  args.top_k = problem.form == RoutingForm::kIds ? static_cast<std::int32_t>(problem.top_k) : 1;
  args.position_row = metadata.position_row;
  args.position_slot = metadata.position_slot;
  args.token_offsets = metadata.token_offsets;
  args.weights = static_cast<const float*>(weights.data);
  args.token_stride = weights.stride[0];
  args.weight_stride = weights.stride[problem.form == RoutingForm::kIds ? 1 : 0];
  args.half = problem.dtype == DType::kF16 ? 1 : 0;
  const bool few = problem.tokens * args.chunks <= kFewChunks;
  const auto kernel = few ? sum_rows_kernel<FewTokens> : sum_rows_kernel<ManyTokens>;
  const int pieces_each = few ? FewTokens::kPieces : ManyTokens::kPieces;
  const int pieces = (args.chunks + pieces_each - 1) / pieces_each;
  const int rounds = (pieces + kMostThreads - 1) / kMostThreads;
  const int across = (pieces + rounds - 1) / rounds;
  const int down = across < 64 ? 96 / across : 1;
  const std::int64_t grid = (problem.tokens + down - 1) / down;
  launch_dependent("launching the sum over a token's rows", kernel,
                   {dim3(static_cast<unsigned>(grid)), dim3(across, down)}, stream, args);
}

}  // namespace sonicmoe::cuda
