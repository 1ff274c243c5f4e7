// Epilogue of the weight gradients: one matrix (M, N) per expert, with N or M contiguous. 16-bit
// results are stored by TMA. fp32 results, written or accumulated, are rearranged in the boxes and
// stored element by element. An expert without rows gets zeros; if gradients are accumulated, its
// gradient does not change.
#pragma once

#include "cuda/hopper/engine/mainloop.cuh"
#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile.cuh"
#include "cuda/math/fragment.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

template <class Element, Major kOut>
struct StoreExpert {
  using Params = StoreExpertParams;
  /// The part of a tile that is stored under the next tile's products (DefersStores).
  struct State {
    Fragment block[2];  ///< the second half of the columns, rounded
    bool pending;       ///< until the second half is stored
    bool first_stored;  ///< else the first half is in the boxes
  };
  /// The k tile of the next tile (of k_tiles) under which the second half of tile t is stored.
  ///
  ///   | tile t | first half          | second half, next tile long        | next tile short |
  ///   | short  | at once             | k tile 4 (warpgroup 0) or 9 (1)    | k tile 0        |
  ///   | long   | k tile 0            | k tile 4 (warpgroup 0) or 9 (1)    | k tile 1        |
  ///
  /// The stores are spread, because all clusters end their tiles at about the same time, and stores
  /// at that moment delay the next tiles' loads. After a long tile the first half is stored under k
  /// tile 0, because between two tiles no product hides its fence and its stores. Until then it is
  /// in the boxes: both halves in registers would make the products slower. After a short tile this
  /// would save little time.
  static __device__ __forceinline__ int deferred_k_tile(const State& state, int k_tiles,
                                                        int warpgroup) {
    return k_tiles > kShort ? 4 + 5 * warpgroup : (state.first_stored ? 0 : 1);
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State& state,
                                             float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                             const CtaTile& tile, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.row_blocks() == 1 && kShape.boxes == 2);
    static_assert(kShape.n == 256 || kShape.n == 64);
    const bool empty = tile.depth == 0;
    if (p.mode != GradStore::kElement) {
      if (empty && p.mode == GradStore::kAccumulate) return;
      store_floats(p, acc[0], tile, staging, rows.offset);
      state = {};  // the old values would occupy registers
      return;
    }
    if constexpr (kShape.n == 64) {
      store_block(p, acc[0], tile, staging, rows.offset);
      state = {};
    } else {
      defer(p, state, acc[0], tile, staging, rows.offset);
    }
  }

  /// Stores half 0 or 1. Both halves go through one function on purpose: if it is inlined twice,
  /// ptxas takes the ring position for divergent and adds instructions to the main loop.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_deferred(const Params& p, State& state,
                                                        const Staging<kShape>& staging, int half) {
    if (half == 1) {
      write(state.block, staging);
      state.pending = false;
    }
    store(p, staging, half);
  }

 private:
  /// A tile of 64 columns is stored at once.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_block(const Params& p, const float (&acc)[32],
                                                     const CtaTile& tile,
                                                     const Staging<kShape>& staging, int offset) {
    Fragment block;
    round(block, acc, tile.depth == 0);
    staging.begin();
    write(0, block, staging);
    staging.publish();
    if (!staging.elected()) return;
    const int output = tile.column < p.border ? 0 : 1;
    const int n = tile.column - (output == 0 ? 0 : p.border), m = tile.output_row + offset;
    ptx::tma_store(
        &p.map[output], staging.box(0),
        kOut == Major::kK ? ptx::Coord3{n, m, tile.expert} : ptx::Coord3{m, n, tile.expert});
    staging.commit();
  }

  /// Stores a part of the tile, and keeps the other part in the state.
  template <TileShape kShape>
  static __device__ __forceinline__ void defer(const Params& p, State& state,
                                               const float (&acc)[kShape.n / 2],
                                               const CtaTile& tile, const Staging<kShape>& staging,
                                               int offset) {
    const bool empty = tile.depth == 0;
    Fragment first[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      round(first[i], &acc[i * 32], empty);
      round(state.block[i], &acc[(2 + i) * 32], empty);
    }
    write(first, staging);
    if (staging.elected()) {
      staging.save_origin({tile.column, tile.output_row + offset, tile.expert});
    }
    state.pending = true;
    state.first_stored = tile.depth <= kShort * kDepth;
    if (state.first_stored) store(p, staging, 0);
  }

  static __device__ __forceinline__ void round(Fragment& block, const float* acc, bool empty) {
#pragma unroll
    for (int w = 0; w < 16; w++) {
      block[w] = empty ? 0u : Pair<Element>::pack(acc[2 * w], acc[2 * w + 1]);
    }
  }

  /// Writes two blocks of 64 columns into the boxes.
  template <TileShape kShape>
  static __device__ __forceinline__ void write(const Fragment (&blocks)[2],
                                               const Staging<kShape>& staging) {
    staging.begin();
#pragma unroll
    for (int i = 0; i < 2; i++) write(i, blocks[i], staging);
  }
  template <TileShape kShape>
  static __device__ __forceinline__ void write(int i, const Fragment& block,
                                               const Staging<kShape>& staging) {
    if constexpr (kOut == Major::kK) {
      staging.write(i, block);
    } else {
      staging.write_transposed(i, block);
    }
  }

  /// Stores the boxes as half 0 or 1 of the tile whose origin was saved.
  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Staging<kShape>& staging,
                                               int half) {
    staging.publish();
    if (!staging.elected()) return;
    const TileOrigin tile = staging.saved_origin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = tile.column + half * 128 + i * 64;
      const int output = column < p.border ? 0 : 1;
      const int n = column - (output == 0 ? 0 : p.border);
      const int m = tile.row;
      ptx::tma_store(
          &p.map[output], staging.box(i),
          kOut == Major::kK ? ptx::Coord3{n, m, tile.base} : ptx::Coord3{m, n, tile.base});
    }
    staging.commit();
  }

  static constexpr int kShort = 10;         // k tiles of a short tile, at most
  static constexpr int kFloatRow = 64 * 4;  // bytes of a row; 64 x 64 fp32 values fill two boxes
  static constexpr int kWarpRows = 16;

  /// Stores fp32 results, 64 columns at a time, each warp its own rows. Lanes write the boxes in
  /// accumulator order and read them in output order. The loops are not unrolled: the addresses of
  /// all elements of a thread would be most of the kernel's code.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_floats(const Params& p,
                                                      const float (&acc)[kShape.n / 2],
                                                      const CtaTile& tile,
                                                      const Staging<kShape>& staging, int offset) {
    static_assert(kWarpRows * 4 * kFloatRow == 2 * kBoxBytes);
    const int warp_row = ((threadIdx.x >> 5) & 3) * kWarpRows;
    const std::uint32_t rows = staging.box(0) + warp_row * kFloatRow;
#pragma unroll 1
    for (int i = 0; i < kShape.n / 64; i++) {
      for_each_index<kShape.n / 64>([&]<int kBlock>(std::integral_constant<int, kBlock>) {
        if (i == kBlock) write_floats(rows, acc + kBlock * 32, tile.depth == 0);
      });
      __syncwarp();
      const int m0 = tile.output_row + offset + warp_row;
#pragma unroll 1
      for (int output = 0; output < 2; output++) {
        copy_floats(p, rows, output, tile.expert, m0, tile.column + i * 64);
      }
      __syncwarp();
    }
  }

  /// The address of column c in row r. Rows are swizzled by r % 8, to avoid bank conflicts.
  static __device__ __forceinline__ std::uint32_t float_address(std::uint32_t rows, int r, int c) {
    return rows + r * kFloatRow + ((c >> 1 ^ (r & 7) << 2) << 3) + (c & 1) * 4;
  }
  static __device__ __forceinline__ void write_floats(std::uint32_t rows, const float* acc,
                                                      bool empty) {
    const int lane = ptx::lane();
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int row = i % 2 * 8 + (lane >> 2);
      const int column = i / 2 * 8 + (lane & 3) * 2;
      ptx::store_floats(float_address(rows, row, column), empty ? 0.0f : acc[2 * i],
                        empty ? 0.0f : acc[2 * i + 1]);
    }
  }
  /// Copies a warp's rows of a block to output `output`: rows from m0 on, and those columns from n0
  /// on that belong to this output. Lanes run along the contiguous dimension. A lane's columns are
  /// all even or all odd, so that with `alternate` one test per lane decides.
  static __device__ __forceinline__ void copy_floats(const Params& p, std::uint32_t rows,
                                                     int output, int expert, int m0, int n0) {
    constexpr bool kAcross = kOut == Major::kK;
    constexpr int kBatch = 8;  // elements of a lane whose loads overlap
    const int lane = ptx::lane();
    const int row = kAcross ? 0 : lane & 15;
    const int column = kAcross ? lane : lane >> 4;
    const bool alternate = p.alternate != 0;
    const FloatGrad& out = p.floats[output];
    const int border = alternate || output == 0 ? 0 : p.border;
    const int width = min(p.border, p.columns - border);
    n0 -= border;
    if (out.data == nullptr || n0 >= width || n0 + 64 <= 0) return;
    if (alternate && (column & 1) != output) return;
    const int shift = alternate ? 1 : 0;
    const std::int64_t down = out.strides[1];
    const std::int64_t across = ((kAcross ? 32 : 2) >> shift) * out.strides[2];
    float* at = out.data + expert * out.strides[0] + (m0 + row) * down +
                ((n0 + column) >> shift) * out.strides[2];
#pragma unroll 1
    for (int first = 0; first < 2 * kWarpRows; first += kBatch) {
      bool inside[kBatch];
      float value[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int r = row + (kAcross ? (first + i) / 2 : 0);
        const int c = column + (kAcross ? i % 2 * 32 : (first + i) * 2);
        inside[i] = m0 + r < p.rows && n0 + c >= 0 && n0 + c < width;
        value[i] = ptx::load_float(float_address(rows, r, c));
      }
      const auto address = [&](int i) {
        return kAcross ? at + i / 2 * down + i % 2 * across : at + i * across;
      };
      if (p.mode == GradStore::kAccumulate) {
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          if (inside[i]) value[i] += *address(i);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (inside[i]) *address(i) = value[i];
      }
      at += kAcross ? kBatch / 2 * down : kBatch * across;
    }
  }
};

}  // namespace sonicmoe::cuda
