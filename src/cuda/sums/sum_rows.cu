// Sums that run alone. Large sums use rings in shared memory (sum_ring.cuh). Small sums, and all
// sums on GPUs before sm_90, which have no bulk copies, use plain loads of eight rows at once; this
// saves the time to fill a ring. A block then sums one token, or several if rows are short. Both
// kernels add in the same order.
#include <algorithm>

#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/sums/rank_sums.cuh"
#include "cuda/sums/sum_args.cuh"
#include "cuda/sums/sum_ring.cuh"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kFewChunks = 1 << 16;  // chunks of 16 bytes of all tokens
constexpr int kMostThreads = 256;             // of a block; wider rows take several rounds
constexpr int kBlocks = 2;                    // on a multiprocessor, at kMostThreads
constexpr int kRows = 8;                      // rows loaded before the first is added

template <class Element>
__device__ __forceinline__ void accumulate_rows(float (&sum)[8], const uint4 (&value)[kRows],
                                                const std::int32_t (&row)[kRows],
                                                const float (&weight)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    if (row[i] >= 0) accumulate<Element>(sum, value[i], weight[i]);
  }
}

template <class Result>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    sum_rows_few_kernel(const SumArgs a, const Result result) {
  ptx::wait_for_previous_kernel();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= a.tokens) return;
  const bool listed = a.token_offsets != nullptr;
  const std::int64_t begin = listed ? a.token_offsets[token] : token * a.top_k;
  const int count = listed ? static_cast<int>(a.token_offsets[token + 1] - begin) : a.top_k;
  const std::int32_t* look_up = a.position_row + begin;
  const std::int32_t* slots = a.position_slot != nullptr ? a.position_slot + begin : nullptr;
  const auto* weights = static_cast<const float*>(a.weights.data);
  if (weights != nullptr && !listed) weights += token * a.weights.row;
  if (weights != nullptr && listed && slots == nullptr) weights += begin * a.weights.column;
  auto* out = reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(a.out) + token * a.out_stride);
  const auto ranks = result.ranks_of(token);
  const bool fault = result.fault();
  for (int chunk = threadIdx.x; chunk < a.chunks; chunk += blockDim.x) {
    const uint4* rows = static_cast<const uint4*>(a.rows) + chunk;
    const std::int64_t byte = (token * a.chunks + chunk) * 16;
    const auto others = result.template load<uint4>(ranks, byte);
    float sum[8] = {};
    for (int k0 = 0; k0 < count; k0 += kRows) {
      // The order of these loads matters: a look-up after the loads of rows would wait for the
      // rows, and rows after the weights would wait for the weights.
      std::int32_t row[kRows];
      std::int32_t slot[kRows];
      uint4 value[kRows];
      float weight[kRows];
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        row[i] = k0 + i < count ? __ldg(look_up + k0 + i) : -1;
        slot[i] = k0 + i < count && slots != nullptr ? __ldg(slots + k0 + i) : k0 + i;
      }
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        if (row[i] < 0) continue;
        value[i] = ptx::load_constant16(rows + static_cast<std::int64_t>(row[i]) * a.chunks);
      }
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        weight[i] =
            row[i] >= 0 && weights != nullptr ? __ldg(weights + slot[i] * a.weights.column) : 1.0f;
      }
      if (a.is_fp16 != 0) {
        accumulate_rows<__half>(sum, value, row, weight);
      } else {
        accumulate_rows<__nv_bfloat16>(sum, value, row, weight);
      }
    }
    const uint4 own = rounded(a, sum);
    const uint4 total = a.is_fp16 != 0
                            ? result.template add<__half>(others, ranks, byte, own)
                            : result.template add<__nv_bfloat16>(others, ranks, byte, own);
    out[chunk] = fault ? nan_chunk<uint4>() : total;
  }
}

template <class Result>
void launch_sum(const Device& device, const SumArgs& args, const Result& result,
                cudaStream_t stream) {
  const char* what = "launching the sum over a token's rows";
  const auto from_ring = sum_rows_ring_kernel<Result>;
  if (args.tokens * args.chunks > kFewChunks && has_sm90(device, from_ring)) {
    const RingLaunch ring(args, device.multiprocessors);
    launch_dependent(device, what, from_ring,
                     {dim3(ring.blocks), dim3(SumRing::kWarps * 32),
                      static_cast<std::size_t>(ring.shared_bytes)},
                     stream, ring.args, result);
    return;
  }
  const int rounds = (args.chunks + kMostThreads - 1) / kMostThreads;
  const int across = (args.chunks + rounds - 1) / rounds;
  const int down = across < 64 ? 96 / across : 1;
  const std::int64_t grid = (args.tokens + down - 1) / down;
  launch_dependent(device, what, sum_rows_few_kernel<Result>,
                   {dim3(static_cast<unsigned>(grid)), dim3(across, down)}, stream, args, result);
}

}  // namespace

void sum_rows(const Device& device, const Problem& problem, const Metadata& metadata,
              const void* rows, const Tensor& weights, const SumOutput& out,
              const TokenRange& tokens, cudaStream_t stream) {
  if (tokens.count == 0) return;
  SumArgs args{};
  args.rows = rows;
  args.out = static_cast<std::uint16_t*>(out.rows.data) + tokens.first * out.rows.stride[0];
  args.out_stride = out.rows.stride[0];
  args.tokens = tokens.count;
  args.chunks = static_cast<std::int32_t>(problem.hidden / 8);
  args.top_k = problem.form == RoutingForm::kIds ? static_cast<std::int32_t>(problem.top_k) : 1;
  args.position_row = metadata.position_row;
  args.position_slot = metadata.position_slot;
  args.token_offsets = metadata.token_offsets;
  args.weights = slot_view(weights);
  // The kernels number tokens from the first one of the range.
  if (args.token_offsets != nullptr) {
    args.token_offsets += tokens.first;
  } else {
    args.position_row += tokens.first * args.top_k;
    if (args.weights.data != nullptr) {
      args.weights.data = static_cast<float*>(args.weights.data) + tokens.first * args.weights.row;
    }
  }
  args.is_fp16 = problem.dtype == DType::kF16 ? 1 : 0;
  if (out.ranks == nullptr) {
    launch_sum(device, args, OwnSum{}, stream);
  } else {
    const RankSums ranks = from_token(*out.ranks, tokens.first, problem.hidden * 2);
    launch_sum(device, args, SumOverRanks{ranks}, stream);
  }
}

}  // namespace sonicmoe::cuda
