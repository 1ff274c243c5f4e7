// Reorders a warp's results from fragments to rows, through the warp's own staging buffer. A row
// has the warp's 64 columns in 8 chunks of 8 columns; a lane reads whole chunks.
//
//   | element | rows in the buffer | bytes of a row | bytes of a chunk |
//   | 16-bit  | 16                 | 144            | 16               |
//   | fp32    | 8                  | 288            | 32               |
//
// A row in the buffer is 16 or 32 bytes longer than its data, which avoids bank conflicts of
// writes.
#pragma once

#include <cstdint>

#include "cuda/math/fragment.cuh"
#include "cuda/portable/epilogues/columns.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda::portable {

inline constexpr int kWordsRowBytes = 144;
inline constexpr int kFloatsRowBytes = 288;
static_assert(16 * kWordsRowBytes <= kStagingBytes && 8 * kFloatsRowBytes <= kStagingBytes);

/// The address to which a lane writes its words of a fragment, in row lane / 4.
__device__ __forceinline__ std::uint32_t word_address(std::uint32_t staging, const Warp& warp) {
  return staging + (warp.lane >> 2) * kWordsRowBytes + (warp.lane & 3) * 4;
}

/// Writes a lane's two words of one fragment, to rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void write_words(std::uint32_t at, int fragment,
                                            const std::uint32_t (&words)[2]) {
  ptx::store_word(at + fragment * 16, words[0]);
  ptx::store_word(at + fragment * 16 + 8 * kWordsRowBytes, words[1]);
}

/// Writes 8 of 16 rows of accumulators, from row 8 * kHalf on.
template <int kHalf>
__device__ __forceinline__ void write_floats(std::uint32_t staging, const Warp& warp,
                                             const float (&acc)[8][4]) {
  const std::uint32_t at = staging + (warp.lane >> 2) * kFloatsRowBytes + (warp.lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    ptx::store_floats(at + j * 32, acc[j][2 * kHalf], acc[j][2 * kHalf + 1]);
  }
}

/// Reads eight columns of one row.
__device__ __forceinline__ void read_floats(float (&values)[8], std::uint32_t staging, int row,
                                            int chunk) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint4 v = ptx::load_shared16(staging + row * kFloatsRowBytes + chunk * 32 + i * 16);
    values[4 * i] = __uint_as_float(v.x);
    values[4 * i + 1] = __uint_as_float(v.y);
    values[4 * i + 2] = __uint_as_float(v.z);
    values[4 * i + 3] = __uint_as_float(v.w);
  }
}

/// Writes 8 rows of the accumulators, from row 8 * slice on, to the buffer as fp32.
__device__ __forceinline__ void write_slice(std::uint32_t staging, const Warp& warp,
                                            const Accumulators& acc, int slice) {
  with_part(acc, slice / 2, [&](const float(&values)[8][4]) {
    if (slice % 2 == 0) {
      write_floats<0>(staging, warp, values);
    } else {
      write_floats<1>(staging, warp, values);
    }
  });
}

}  // namespace sonicmoe::cuda::portable
