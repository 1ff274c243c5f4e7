// One token a block (several where d is small), 16 bytes a thread and row, plain loads and stores:
// this runs at the copy bandwidth. The order of the sum is fixed.
#include <algorithm>

#include "cuda/device.h"
#include "cuda/epilogues/element.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/reduce/sum_rows.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kInFlight = 8;  // rows looked up, then loaded, before the first is summed

constexpr int kMostThreads = 512;  // of a block; wider rows take several rounds

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
  std::int64_t weight_strides[2];  // of (token, k), or of the slot in [0]
  std::int32_t by_token;           // weights are (T, K)

  __device__ float weight(std::int64_t token, int k, std::int64_t position) const {
    if (weights == nullptr) return 1.0f;
    if (by_token != 0) return __ldg(weights + token * weight_strides[0] + k * weight_strides[1]);
    const std::int64_t slot = position_slot != nullptr ? position_slot[position] : position;
    return __ldg(weights + slot * weight_strides[0]);
  }
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
__global__ void __launch_bounds__(kMostThreads) sum_rows_kernel(const SumArgs a) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= a.tokens) return;
  const bool listed = a.token_offsets != nullptr;
  const std::int64_t begin = listed ? a.token_offsets[token] : token * a.top_k;
  const int count = listed ? static_cast<int>(a.token_offsets[token + 1] - begin) : a.top_k;
  for (int chunk = threadIdx.x; chunk < a.chunks; chunk += blockDim.x) {
    const uint4* rows = static_cast<const uint4*>(a.rows) + chunk;
    float sum[8] = {};
    for (int k0 = 0; k0 < count; k0 += kInFlight) {
      uint4 value[kInFlight];
      float weight[kInFlight];
      std::int32_t row[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; i++) {
        const bool valid = k0 + i < count;
        row[i] = valid ? __ldg(a.position_row + begin + k0 + i) : -1;
        weight[i] = valid ? a.weight(token, k0 + i, begin + k0 + i) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; i++) {
        if (row[i] < 0) continue;
        value[i] = ptx::load_constant16(rows + static_cast<std::int64_t>(row[i]) * a.chunks);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; i++) {
        if (row[i] >= 0) accumulate<Element>(sum, value[i], weight[i]);
      }
    }
    uint4 packed;
    packed.x = Pair<Element>::pack(sum[0], sum[1]);
    packed.y = Pair<Element>::pack(sum[2], sum[3]);
    packed.z = Pair<Element>::pack(sum[4], sum[5]);
    packed.w = Pair<Element>::pack(sum[6], sum[7]);
    auto* out = static_cast<std::uint16_t*>(a.out) + token * a.out_stride;
    reinterpret_cast<uint4*>(out)[chunk] = packed;
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
  args.weight_strides[0] = weights.stride[0];
  args.weight_strides[1] = weights.stride[1];
  args.by_token = problem.form == RoutingForm::kIds ? 1 : 0;
  const int rounds = (args.chunks + kMostThreads - 1) / kMostThreads;
  const int across = (args.chunks + rounds - 1) / rounds;
  const int down = std::max(1, 64 / across);
  const auto grid = static_cast<unsigned>((problem.tokens + down - 1) / down);
  const auto kernel =
      problem.dtype == DType::kBF16 ? sum_rows_kernel<__nv_bfloat16> : sum_rows_kernel<__half>;
  kernel<<<grid, dim3(across, down), 0, stream>>>(args);
  check_cuda(cudaGetLastError(), "launching the sum over a token's rows");
}

}  // namespace sonicmoe::cuda
