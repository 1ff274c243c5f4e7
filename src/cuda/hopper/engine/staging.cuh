// The shared memory of a consumer warpgroup's epilogue: store boxes, biases, scales, and the expert
// and origin of the tile whose epilogue is not finished.
#pragma once

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/ptx/stmatrix.cuh"
#include "cuda/math/fragment.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// The rows of one warpgroup in its CTA's tile.
struct Rows {
  int offset;  ///< the first row
  int blocks;  ///< 64-row blocks with at least one valid row
};

/// Where a warpgroup's part of a tile is stored, in the coordinates of its store map.
///
///   |        | rows in expert order (RaggedMap)     | one matrix an expert |
///   | column | first column                         | first column         |
///   | row    | first row - base, which is negative  | first row            |
///   | base   | one past the expert's last row, or   | expert               |
///   |        | past the last row of half a tile     |                      |
struct TileOrigin {
  int column;
  int row;
  int base;
};

/// A store takes these steps: begin(), write() for every box, publish(); then the elected thread
/// issues the TMA stores and calls commit(). The boxes may be written again after the next begin().
template <TileShape kShape>
class Staging {
 public:
  __device__ __forceinline__ explicit Staging(const Cta<kShape>& cta) : base_(cta.base) {
    for (int i = threadIdx.x & 127; i < kShape.n; i += kWarpgroup) set_bias(i, 0);
    for (int i = threadIdx.x & 127; i < kShape.warpgroup_rows(); i += kWarpgroup)
      set_scale(i, 1.0f);
    sync();
  }

  __device__ __forceinline__ bool elected() const { return (threadIdx.x & 127) == 0; }
  __device__ __forceinline__ std::uint32_t box(int i) const {
    return base_ + SharedLayout<kShape>::kStaging + (warpgroup() * kShape.boxes + i) * kBoxBytes;
  }

  __device__ __forceinline__ void sync() const {
    cuda::sync(of_warpgroup(NamedBarrier::kStaging0, warpgroup()), kWarpgroup);
  }

  /// The bias of accumulator column i, as the element's bits; 0 until it is set. The caller calls
  /// sync() after it sets the biases and before it reads them, and publish() after it reads them
  /// and before it sets those of the next tile.
  __device__ __forceinline__ void set_bias(int i, std::uint16_t bits) const {
    ptx::store_half_word(bias() + i * kElementBytes, bits);
  }
  /// The biases of this lane's two columns among the eight columns from i on.
  __device__ __forceinline__ std::uint32_t bias_pair(int i) const {
    return ptx::load_word(bias() + (threadIdx.x & 3) * 4 + i * kElementBytes);
  }
  /// The biases of columns i and i + 1; i is even.
  __device__ __forceinline__ std::uint32_t bias_pair_at(int i) const {
    return ptx::load_word(bias() + i * kElementBytes);
  }

  /// The scale of row i of this warpgroup; 1 until it is set. Synchronised as the bias is.
  __device__ __forceinline__ void set_scale(int i, float value) const {
    ptx::store_float(scale() + i * 4, value);
  }
  /// As set_scale(), by cp.async.
  __device__ __forceinline__ void copy_scale(int i, const float* value) const {
    ptx::copy4(scale() + i * 4, value);
  }
  /// The scale of this lane's first row (which = 0) or second row (1) in a 64-row block.
  __device__ __forceinline__ float row_scale(int block, int which) const {
    const int row =
        block * 64 + ((threadIdx.x >> 5) & 3) * 16 + which * 8 + ((threadIdx.x & 31) >> 2);
    return ptx::load_float(scale() + row * 4);
  }

  // Four words per warpgroup. Epilogues would otherwise hold them in registers from tile to tile.
  /// The expert of the current tile. One thread saves it; all threads may read it after a sync().
  __device__ __forceinline__ void save_expert(int expert) const {
    ptx::store_float(saved_tile() + 12, __int_as_float(expert));
  }
  __device__ __forceinline__ int saved_expert() const { return ptx::load_word(saved_tile() + 12); }
  /// The origin of the tile. Only the elected thread writes and reads it.
  __device__ __forceinline__ void save_origin(const TileOrigin& origin) const {
    const std::uint32_t at = saved_tile();
    ptx::store_words(at, origin.column, origin.row);
    ptx::store_float(at + 8, __int_as_float(origin.base));
  }
  __device__ __forceinline__ TileOrigin saved_origin() const {
    const std::uint32_t at = saved_tile();
    return {ptx::load_word(at), ptx::load_word(at + 4), ptx::load_word(at + 8)};
  }

  /// Waits until the TMA has read the boxes, which may then be overwritten.
  __device__ __forceinline__ void begin() const {
    if (elected()) ptx::tma_wait_read();
    sync();
  }
  __device__ __forceinline__ void write(int i, const Fragment& block) const {
#pragma unroll
    for (int word = 0; word < 16; word += 4) write_words(i, block, word);
  }
  /// Words `word` .. `word` + 3 of the block.
  __device__ __forceinline__ void write_words(int i, const Fragment& block, int word) const {
    const std::uint32_t words[4] = {block[word], block[word + 1], block[word + 2], block[word + 3]};
    ptx::store_matrices(matrix_address(i, word / 2), words);
  }
  /// Writes the block transposed: box row c holds column c.
  __device__ __forceinline__ void write_transposed(int i, const Fragment& block) const {
    const int lane = threadIdx.x & 31;
    const int matrix = lane >> 3;
    const int swizzle = lane & 7;
    const int chunk = ((threadIdx.x >> 5) & 3) * 2 + (matrix & 1);
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      const std::uint32_t words[4] = {block[2 * c], block[2 * c + 1], block[2 * c + 2],
                                      block[2 * c + 3]};
      const int row = (c + (matrix >> 1)) * 8 + swizzle;
      ptx::store_matrices_transposed(box(i) + row * 128 + ((chunk ^ swizzle) << 4), words);
    }
  }
  /// Makes the boxes visible to the TMA (the async proxy).
  __device__ __forceinline__ void publish() const {
    ptx::fence_async_shared();
    sync();
  }
  __device__ __forceinline__ void commit() const { ptx::tma_commit(); }
  /// Waits until all TMA stores of this warp are in memory. Only its first lane issues any.
  __device__ __forceinline__ void drain() const {
    if ((threadIdx.x & 31) == 0) ptx::tma_wait_done();
    __syncwarp();
  }

 private:
  // Addresses are computed at every use: registers are scarce here, integer arithmetic is not.
  static __device__ __forceinline__ int warpgroup() {
    return static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  }
  /// For stmatrix: this lane's address, swizzled, of row lane % 8 of matrix lane / 8, where the
  /// first column of matrix 0 in box i is 8c (c even).
  __device__ __forceinline__ std::uint32_t matrix_address(int i, int c) const {
    const int lane = threadIdx.x & 31;
    const int matrix = lane >> 3;
    const int swizzle = lane & 7;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (matrix & 1) * 8 + swizzle;
    return (box(i) + row * 128 + ((swizzle ^ (matrix >> 1)) << 4)) ^ c << 4;
  }
  __device__ __forceinline__ std::uint32_t scale() const {
    return base_ + SharedLayout<kShape>::kScale + warpgroup() * kShape.scale_bytes();
  }
  __device__ __forceinline__ std::uint32_t saved_tile() const {
    return base_ + SharedLayout<kShape>::kSavedTile + warpgroup() * kSavedTileBytes;
  }
  __device__ __forceinline__ std::uint32_t bias() const {
    return base_ + SharedLayout<kShape>::kBias + warpgroup() * kShape.bias_bytes();
  }

  std::uint32_t base_;
};

}  // namespace sonicmoe::cuda
