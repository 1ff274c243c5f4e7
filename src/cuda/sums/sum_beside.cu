// The sum of dX, in kernels that run at the same time as a weight gradient. Together with a CTA of
// the weight gradient, a multiprocessor has room for one block of 128 threads with 32 registers and
// no shared memory. So few threads must keep many bytes in flight: a warp sums 2 KB of a token's
// rows, and a thread loads 8 bytes of each of eight rows before it adds the first. Blocks are small
// and many, so that more of them run on a multiprocessor when CTAs of the weight gradient exit.
//
// sum_rows_beside_kernel follows the weight gradient on the same stream and reads its rows without
// a wait, by rule 2 of ptx/dependent.cuh: the weight gradient has waited for the rows before it
// lets this kernel start. So no load here may be ld.global.nc.
#include "cuda/device/device.h"
#include "cuda/device/launch.h"
#include "cuda/math/element.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/sums/rank_sums.cuh"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kWarps = kBesideThreads / 32;
constexpr std::uint32_t kBytes = 8;            // bytes of a row that a thread loads at once
constexpr std::uint32_t kPiece = 32 * kBytes;  // bytes of a row that a warp loads at once
constexpr std::uint32_t kPart = 8 * kPiece;    // bytes of a row that a warp sums in all

struct BesideArgs {
  const std::uint8_t* rows;  // (C, d), contiguous
  std::uint8_t* out;
  std::int64_t out_bytes;  // from one row to the next
  std::uint32_t first_token;
  std::uint32_t tokens;
  std::uint32_t row_bytes;
  std::int32_t top_k;  // positions of a token if token_offsets is null
  const std::int32_t* position_row;
  const std::int32_t* token_offsets;
  std::uint32_t zero;  // 0, a value that the compiler cannot know
};

/// A range of bytes in a row.
struct ByteRange {
  std::uint32_t begin, end;
};

template <class Element>
__device__ __forceinline__ void add(float (&sum)[4], const uint2& v) {
  sum[0] += Pair<Element>::low(v.x);
  sum[1] += Pair<Element>::high(v.x);
  sum[2] += Pair<Element>::low(v.y);
  sum[3] += Pair<Element>::high(v.y);
}

template <class Element>
__device__ __forceinline__ uint2 rounded(const float (&sum)[4]) {
  return {Pair<Element>::pack(sum[0], sum[1]), Pair<Element>::pack(sum[2], sum[3])};
}

__device__ __forceinline__ void store(const BesideArgs& a, std::uint32_t token, std::uint32_t byte,
                                      const uint2& sum) {
  *reinterpret_cast<uint2*>(a.out + token * a.out_bytes + byte) = sum;
}

/// Adds `count` rows to the sum, at most kMost; lanes `first`, first + 1, ... hold their numbers.
/// All rows are loaded before the first is added.
template <class Element, int kMost>
__device__ __forceinline__ void add_rows(float (&sum)[4], const std::uint8_t* from,
                                         std::int32_t rows, int first, int count,
                                         const BesideArgs& a) {
  uint2 value[kMost];
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const std::int32_t row = __shfl_sync(~0u, rows, first + i);
    value[i] = {0, 0};
    if (i < count) value[i] = ptx::load8(ptx::row_address(from, row, a.row_bytes));
  }
  // Makes the first addition depend on all loads. Else the compiler, to save registers, adds some
  // rows before it loads the others, and fewer bytes are in flight.
  std::uint32_t nothing = 0;
#pragma unroll
  for (int i = 1; i < kMost; i++) nothing |= value[i].y;
  value[0].x |= nothing & a.zero;
  value[0].y |= nothing & a.zero;
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    if (i < count) add<Element>(sum, value[i]);
  }
}

/// For a layer on one GPU, where most tokens have all their top_k rows. 8, 4, 2 or 1 rows are
/// loaded at once, without predicates.
struct ManyRows {
  template <class Element>
  static __device__ __forceinline__ void add_all(float (&sum)[4], const std::uint8_t* from,
                                                 std::int32_t rows, std::uint32_t present,
                                                 const BesideArgs& a) {
#pragma unroll 1
    for (int k = 0; present >> k != 0;) {
      const std::uint32_t next = present >> k;
      if ((next & 0xff) == 0xff) {
        add_rows<Element, 8>(sum, from, rows, k, 8, a);
        k += 8;
      } else if ((next & 0xf) == 0xf) {
        add_rows<Element, 4>(sum, from, rows, k, 4, a);
        k += 4;
      } else if ((next & 3) == 3) {
        add_rows<Element, 2>(sum, from, rows, k, 2, a);
        k += 2;
      } else {
        if ((next & 1) != 0) add_rows<Element, 1>(sum, from, rows, k, 1, a);
        k++;
      }
      if (k == 32) break;
    }
  }
};

/// For a rank of an exchange, where a token has few rows, because its other experts are on other
/// ranks. Up to kMost rows are loaded at once, with predicates.
struct FewRows {
  static constexpr int kMost = 5;  // sums of other ranks need registers too

  template <class Element>
  static __device__ __forceinline__ void add_all(float (&sum)[4], const std::uint8_t* from,
                                                 std::int32_t rows, std::uint32_t present,
                                                 const BesideArgs& a) {
#pragma unroll 1
    for (int k = 0; k < 32 && present >> k != 0;) {
      // The number of ones at the low end of present >> k; -1 if all 32 bits are ones.
      const int ones = __ffs(static_cast<int>(~(present >> k))) - 1;
      const int run = ones < 0 ? kMost : min(ones, kMost);
      if (run > 0) add_rows<Element, kMost>(sum, from, rows, k, run, a);
      k += max(run, 1);
    }
  }
};

__device__ __forceinline__ std::int64_t place(const BesideArgs& a, std::uint32_t token,
                                              std::uint32_t byte) {
  return static_cast<std::int64_t>(token) * a.row_bytes + byte;
}

/// Sums a token of at most 32 positions. Each lane looks up one row number and shuffles it to the
/// others, once for all pieces. A look-up for each piece would cost another round trip to memory.
template <class Element, class Rows, class Result>
__device__ __forceinline__ void sum_short(const BesideArgs& a, const Result& result,
                                          std::uint32_t token, const ByteRange& bytes,
                                          const std::int32_t* look_up, int count) {
  const std::int32_t rows = ptx::lane() < count ? ptx::load4(look_up + ptx::lane()) : -1;
  const std::uint32_t present = __shfl_sync(~0u, __ballot_sync(~0u, rows >= 0), 0);
#pragma unroll 1
  for (std::uint32_t first = bytes.begin; first < bytes.end; first += kPiece) {
    const std::uint32_t wanted = first + ptx::lane() * kBytes;
    const std::uint8_t* from = a.rows + (wanted < a.row_bytes ? wanted : 0);
    const auto others =
        result.template load<uint2>(token, place(a, token, wanted < a.row_bytes ? wanted : 0));
    float sum[4] = {};
    Rows::template add_all<Element>(sum, from, rows, present, a);
    const std::uint32_t byte = first + ptx::lane() * kBytes;
    if (byte < a.row_bytes) {
      store(a, token, byte,
            result.template add<Element>(others, token, place(a, token, byte),
                                         rounded<Element>(sum)));
    }
  }
}

template <class Element, class Result>
__device__ __forceinline__ void sum_long(const BesideArgs& a, const Result& result,
                                         std::uint32_t token, const ByteRange& bytes,
                                         const std::int32_t* look_up, int count) {
#pragma unroll 1
  for (std::uint32_t byte = bytes.begin + ptx::lane() * kBytes; byte < bytes.end; byte += kPiece) {
    const auto others = result.template load<uint2>(token, place(a, token, byte));
    float sum[4] = {};
#pragma unroll 1
    for (int k = 0; k < count; k++) {
      const std::int32_t row = ptx::load4(look_up + k);
      if (row >= 0)
        add<Element>(sum, ptx::load8(ptx::row_address(a.rows + byte, row, a.row_bytes)));
    }
    store(
        a, token, byte,
        result.template add<Element>(others, token, place(a, token, byte), rounded<Element>(sum)));
  }
}

template <class Element, class Rows, class Result>
__device__ __forceinline__ void sum_part(const BesideArgs& a, const Result& result, std::uint32_t i,
                                         std::uint32_t part) {
  const std::uint32_t token = a.first_token + i;
  const ByteRange bytes{part * kPart, min(part * kPart + kPart, a.row_bytes)};
  const std::int32_t* look_up = a.position_row;
  int count = a.top_k;
  if (a.token_offsets != nullptr) {
    const std::int32_t begin = ptx::load4(a.token_offsets + token);
    count = ptx::load4(a.token_offsets + token + 1) - begin;
    look_up += begin;
  } else {
    look_up += static_cast<std::int64_t>(token) * count;
  }
  if (count <= 32) {
    sum_short<Element, Rows>(a, result, token, bytes, look_up, count);
  } else {
    sum_long<Element>(a, result, token, bytes, look_up, count);
  }
}

/// Sums this warp's part of a token. The rows must be in memory.
template <class Element, class Rows, class Result>
__device__ __forceinline__ void sum_beside(const BesideArgs& a, const Result& result) {
  // The shuffle makes the number uniform, so that values that depend on it use uniform registers.
  const std::uint32_t i = blockIdx.x * kWarps + __shfl_sync(~0u, threadIdx.x >> 5, 0);
  if (i < a.tokens) sum_part<Element, Rows>(a, result, i, blockIdx.y);
  // Keeps rule 4 of ptx/dependent.cuh: a kernel that waits for this kernel then also waits for all
  // kernels before it.
  if (blockIdx.x + 1 == gridDim.x && blockIdx.y + 1 == gridDim.y) ptx::wait_for_previous_kernel();
}

template <class Element>
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    sum_rows_beside_kernel(const BesideArgs a) {
  ptx::launch_next_kernel();
  sum_beside<Element, ManyRows>(a, OwnSum{});
}

/// For a rank of an exchange, in bf16 or fp16. The kernel is on another stream than the weight
/// gradient, so it waits for the kernels of its own stream, which write its rows. It also adds the
/// sums of other ranks, if `result` has any.
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    sum_few_rows_beside_kernel(const BesideArgs a, const SumOverRanks result,
                               const std::uint32_t is_fp16) {
  ptx::launch_next_kernel();
  ptx::wait_for_previous_kernel();
  if (is_fp16 != 0) {
    sum_beside<__half, FewRows>(a, result);
  } else {
    sum_beside<__nv_bfloat16, FewRows>(a, result);
  }
}

}  // namespace

void sum_rows_beside(const Device& device, const Problem& problem, const Metadata& metadata,
                     const void* rows, const SumOutput& out, const TokenRange& tokens,
                     BesideWhat beside, cudaStream_t stream) {
  if (tokens.count == 0) return;
  BesideArgs args{};
  args.rows = static_cast<const std::uint8_t*>(rows);
  args.out = static_cast<std::uint8_t*>(out.rows.data);
  args.out_bytes = out.rows.stride[0] * 2;
  args.row_bytes = static_cast<std::uint32_t>(problem.hidden * 2);
  args.first_token = static_cast<std::uint32_t>(tokens.first);
  args.tokens = static_cast<std::uint32_t>(tokens.count);
  args.top_k = problem.form == RoutingForm::kIds ? static_cast<std::int32_t>(problem.top_k) : 1;
  args.position_row = metadata.position_row;
  args.token_offsets = metadata.token_offsets;
  const dim3 grid((args.tokens + kWarps - 1) / kWarps, (args.row_bytes + kPart - 1) / kPart);
  const char* what = "launching the sum over a token's rows";
  const bool is_fp16 = problem.dtype == DType::kF16;
  if (out.ranks == nullptr && beside == BesideWhat::kPrevious) {
    const auto kernel =
        is_fp16 ? sum_rows_beside_kernel<__half> : sum_rows_beside_kernel<__nv_bfloat16>;
    launch_dependent(device, what, kernel, {grid, kBesideThreads}, stream, args);
    return;
  }
  const SumOverRanks result{out.ranks == nullptr ? RankSums{} : *out.ranks};
  launch_dependent(device, what, sum_few_rows_beside_kernel, {grid, kBesideThreads}, stream, args,
                   result, std::uint32_t{is_fp16});
}

}  // namespace sonicmoe::cuda
