// The sum of dX, in kernels that run at the same time as a weight gradient. Together with a CTA of
// the weight gradient, a multiprocessor has room for one block of 128 threads with 32 registers and
// no shared memory. So few threads must keep many bytes in flight: a thread loads up to 64 bytes
// before it adds the first, 8 bytes of each of eight rows or 16 bytes of each of four rows. Blocks
// are small and many, so that more of them run on a multiprocessor when CTAs of the weight gradient
// exit.
//
// sum_rows_beside_kernel follows the weight gradient on the same stream and reads the rows of dX~
// without a wait, by rule 2 of ptx/dependent.cuh: the weight gradient has waited for dX~ before it
// lets this kernel start. So no load here may be ld.global.nc.
#include <type_traits>

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

/// Makes the first value depend on all loads. Otherwise the compiler, to save registers, would add
/// some rows before it loads the others, and fewer bytes would be in flight.
template <int kCount>
__device__ __forceinline__ void wait_for_all(uint2 (&value)[kCount], std::uint32_t zero) {
  std::uint32_t nothing = 0;
#pragma unroll
  for (int i = 1; i < kCount; i++) nothing |= value[i].y;
  value[0].x |= nothing & zero;
  value[0].y |= nothing & zero;
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
  wait_for_all(value, a.zero);
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    if (i < count) add<Element>(sum, value[i]);
  }
}

/// For a layer on one GPU, where most tokens have all their top_k rows. 8, 4, 2 or 1 rows are
/// loaded at once, without predicates.
struct ManyRows {
  static constexpr std::uint32_t kPart = 8 * kPiece;  ///< bytes of a row that a warp sums in all
  static constexpr int kMostOfTwoPieces = 0;

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
/// ranks. A thread loads one piece of up to kMost rows at once, with predicates. If a token has at
/// most kMostOfTwoPieces rows, it loads two pieces of each row at once; 0: never.
template <class Result>
struct FewRows {
  /// Twice that of ManyRows. Before its first row a warp waits twice for memory, for the position
  /// and for the number of the row. Longer parts have fewer such waits.
  static constexpr std::uint32_t kPart = 16 * kPiece;
  // Sums of other ranks need registers, too: with more rows at once the kernel would spill.
  static constexpr bool kAlone = std::is_same_v<Result, OwnSum>;
  static constexpr int kMost = kAlone ? 7 : 4;
  static constexpr int kMostOfTwoPieces = kAlone ? 4 : 0;

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

/// The offset in (T, d) of a byte of a token.
__device__ __forceinline__ std::int64_t place(const BesideArgs& a, std::uint32_t token,
                                              std::uint32_t byte) {
  return static_cast<std::int64_t>(token) * a.row_bytes + byte;
}

/// Sums two pieces of a token, from byte `first` on, without sums of other ranks. Both pieces must
/// end inside the row. The token has `count` rows, at most kMost; lanes 0, 1, ... hold their
/// numbers.
template <class Element, int kMost>
__device__ __forceinline__ void sum_two_pieces(const BesideArgs& a, std::uint32_t token,
                                               std::uint32_t first, std::int32_t rows, int count) {
  const std::uint32_t byte = first + ptx::lane() * kBytes;
  uint2 value[2 * kMost];
#pragma unroll
  for (int i = 0; i < kMost; i++) {
    const std::int32_t row = __shfl_sync(~0u, rows, i);
    value[i] = value[kMost + i] = {0, 0};
    if (i < count) {
      const std::uint8_t* from = ptx::row_address(a.rows + byte, row, a.row_bytes);
      value[i] = ptx::load8(from);
      value[kMost + i] = ptx::load8(from + kPiece);
    }
  }
  wait_for_all(value, a.zero);
#pragma unroll
  for (int piece = 0; piece < 2; piece++) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kMost; i++) {
      if (i < count) add<Element>(sum, value[piece * kMost + i]);
    }
    store(a, token, byte + piece * kPiece, rounded<Element>(sum));
  }
}

/// Sums a token of at most 32 positions. Each lane looks up one row number and shuffles it to the
/// others, once for all pieces. A look-up for each piece would cost another round trip to memory.
template <class Element, class Rows, class Result>
__device__ __forceinline__ void sum_short(const BesideArgs& a, const Result& result,
                                          std::uint32_t token, const ByteRange& bytes,
                                          const std::int32_t* look_up, int count) {
  const std::int32_t rows = ptx::lane() < count ? ptx::load4(look_up + ptx::lane()) : -1;
  const auto ranks = result.ranks_of(token);
  const std::uint32_t present = __shfl_sync(~0u, __ballot_sync(~0u, rows >= 0), 0);
  std::uint32_t first = bytes.begin;
  if constexpr (Rows::kMostOfTwoPieces != 0) {
    const int ones = __popc(present);
    if (ones <= Rows::kMostOfTwoPieces && present == (1u << ones) - 1) {
#pragma unroll 1
      for (; first + 2 * kPiece <= bytes.end; first += 2 * kPiece) {
        sum_two_pieces<Element, Rows::kMostOfTwoPieces>(a, token, first, rows, ones);
      }
    }
  }
#pragma unroll 1
  for (; first < bytes.end; first += kPiece) {
    const std::uint32_t wanted = first + ptx::lane() * kBytes;
    const std::uint8_t* from = a.rows + (wanted < a.row_bytes ? wanted : 0);
    const auto others =
        result.template load<uint2>(ranks, place(a, token, wanted < a.row_bytes ? wanted : 0));
    float sum[4] = {};
    Rows::template add_all<Element>(sum, from, rows, present, a);
    const std::uint32_t byte = first + ptx::lane() * kBytes;
    if (byte < a.row_bytes) {
      store(a, token, byte,
            result.template add<Element>(others, ranks, place(a, token, byte),
                                         rounded<Element>(sum)));
    }
  }
}

/// Sums a token of more than 32 positions. Every lane loads all row numbers, for each piece again.
template <class Element, class Result>
__device__ __forceinline__ void sum_long(const BesideArgs& a, const Result& result,
                                         std::uint32_t token, const ByteRange& bytes,
                                         const std::int32_t* look_up, int count) {
  const auto ranks = result.ranks_of(token);
#pragma unroll 1
  for (std::uint32_t byte = bytes.begin + ptx::lane() * kBytes; byte < bytes.end; byte += kPiece) {
    const auto others = result.template load<uint2>(ranks, place(a, token, byte));
    float sum[4] = {};
#pragma unroll 1
    for (int k = 0; k < count; k++) {
      const std::int32_t row = ptx::load4(look_up + k);
      if (row >= 0)
        add<Element>(sum, ptx::load8(ptx::row_address(a.rows + byte, row, a.row_bytes)));
    }
    store(
        a, token, byte,
        result.template add<Element>(others, ranks, place(a, token, byte), rounded<Element>(sum)));
  }
}

template <class Element, class Rows, class Result>
__device__ __forceinline__ void sum_part(const BesideArgs& a, const Result& result, std::uint32_t i,
                                         std::uint32_t part) {
  const std::uint32_t token = a.first_token + i;
  const ByteRange bytes{part * Rows::kPart, min(part * Rows::kPart + Rows::kPart, a.row_bytes)};
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
  // fault() is read last, so that it takes no register during the sum.
  if (!result.fault()) return;
#pragma unroll 1
  for (std::uint32_t byte = bytes.begin + ptx::lane() * kBytes; byte < bytes.end; byte += kPiece) {
    store(a, token, byte, nan_chunk<uint2>());
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

/// For a rank of an exchange. The kernel is on another stream than the weight gradient, so it waits
/// for the kernels of its own stream, which write its rows. It also adds the sums of other ranks,
/// if `result` has any.
template <class Element, class Result>
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    sum_few_rows_beside_kernel(const BesideArgs a, const Result result) {
  ptx::launch_next_kernel();
  ptx::wait_for_previous_kernel();
  sum_beside<Element, FewRows<Result>>(a, result);
}

constexpr const char* kWhat = "launching the sum over a token's rows";

template <class Rows>
dim3 grid_of(const BesideArgs& args) {
  return {(args.tokens + kWarps - 1) / kWarps, (args.row_bytes + Rows::kPart - 1) / Rows::kPart};
}

template <class Result>
void launch_few_rows(const Device& device, const BesideArgs& args, const Result& result,
                     bool is_fp16, cudaStream_t stream) {
  const auto kernel = is_fp16 ? sum_few_rows_beside_kernel<__half, Result>
                              : sum_few_rows_beside_kernel<__nv_bfloat16, Result>;
  const dim3 grid = grid_of<FewRows<Result>>(args);
  launch_dependent(device, kWhat, kernel, {grid, kBesideThreads}, stream, args, result);
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
  const bool is_fp16 = problem.dtype == DType::kF16;
  if (out.ranks == nullptr && beside == BesideWhat::kPrevious) {
    const auto kernel =
        is_fp16 ? sum_rows_beside_kernel<__half> : sum_rows_beside_kernel<__nv_bfloat16>;
    const dim3 grid = grid_of<ManyRows>(args);
    launch_dependent(device, kWhat, kernel, {grid, kBesideThreads}, stream, args);
    return;
  }
  if (out.ranks == nullptr) {
    launch_few_rows(device, args, OwnSum{}, is_fp16, stream);
  } else {
    launch_few_rows(device, args, SumOverRanks{*out.ranks}, is_fp16, stream);
  }
}

}  // namespace sonicmoe::cuda
