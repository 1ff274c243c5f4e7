// Epilogue of the weight gradients: one matrix an expert, (M, N) with N contiguous, or transposed
// with M contiguous. 16-bit results go through TMA; fp32 results, written or accumulated, through
// the boxes element by element. Experts without rows get zero, or are left alone.
#pragma once

#include "cuda/hopper/epilogues/element.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

enum class GradStore : std::int32_t { kElement = 0, kFloat = 1, kAccumulate = 2 };

/// fp32 matrices (expert, M, N); strides in elements.
struct FloatGrad {
  float* data;
  std::int64_t strides[3];
};

/// By output: gate and up, or one alone.
struct StoreExpertParams {
  CUtensorMap map[2];   ///< kElement: (contiguous, other, expert), box 64 x 64 x 1
  FloatGrad floats[2];  ///< kFloat, kAccumulate
  GradStore mode;
  std::int32_t alternate;  ///< fp32: even columns go to [0], odd ones to [1]
  std::int32_t rows;       ///< M
  std::int32_t columns;    ///< N
  /// First column that goes to [1], past all tiles where there is none. With kElement a multiple of
  /// 64: a store may end past its output, but not begin before it.
  std::int32_t border;
};

template <class Element, Major kOut>
struct StoreExpert {
  using Params = StoreExpertParams;
  /// What is left of a tile. Where it goes only the elected thread asks: it writes that down.
  struct State {
    Fragment block[2];  ///< the second half, rounded
    bool held;          ///< until it is stored
    bool sent;          ///< the first half; else it waits in the boxes
  };
  /// The k tile under which the second half is stored. The first one, where it waits, is stored
  /// under k tile 0: between two tiles nothing is multiplied.
  ///
  /// All clusters end their tiles at about the same time, and what they store at once keeps the
  /// next tiles' loads waiting. So the second half waits, the warpgroups' halves for different k
  /// tiles; with a whole tile held the products are slower. A short tile is stored at once: there
  /// is not much to overtake.
  static __device__ __forceinline__ int late_at(const State& state, int k_tiles, int warpgroup) {
    return k_tiles > kShort ? 4 + 5 * warpgroup : (state.sent ? 0 : 1);
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State& state,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.halves() == 1 && kShape.boxes == 2 && kShape.n == 256);
    const bool empty = work.depth == 0;
    if (p.mode != GradStore::kElement) {
      if (empty && p.mode == GradStore::kAccumulate) return;
      store_floats(p, acc[0], work, staging, rows.offset);
      state = {};  // so that it takes no registers meanwhile
      return;
    }
    Fragment first[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      round(first[i], &acc[0][i * 32], empty);
      round(state.block[i], &acc[0][(2 + i) * 32], empty);
    }
    put(first, staging);
    if (staging.elected()) staging.note({work.column, work.m + rows.offset, work.expert});
    state.held = true;
    state.sent = work.depth <= kShort * kDepth;
    if (state.sent) send(p, staging, 0);
  }

  /// Stores half 0, or 1. One text for both: with two of them the compiler no longer believes that
  /// a warp agrees on the ring.
  template <TileShape kShape>
  static __device__ __forceinline__ void late(const Params& p, State& state,
                                              const Staging<kShape>& staging, int half) {
    if (half == 1) {
      put(state.block, staging);
      state.held = false;
    }
    send(p, staging, half);
  }

 private:
  static __device__ __forceinline__ void round(Fragment& block, const float* acc, bool empty) {
#pragma unroll
    for (int w = 0; w < 16; w++) {
      block[w] = empty ? 0u : Pair<Element>::pack(acc[2 * w], acc[2 * w + 1]);
    }
  }

  /// Two blocks of 64 columns, into the boxes.
  template <TileShape kShape>
  static __device__ __forceinline__ void put(const Fragment (&blocks)[2],
                                             const Staging<kShape>& staging) {
    staging.begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kOut == Major::kK) {
        staging.write(i, blocks[i]);
      } else {
        staging.write_transposed(i, blocks[i]);
      }
    }
  }

  /// Stores them as half 0 or 1 of the tile whose column, row and expert were noted.
  template <TileShape kShape>
  static __device__ __forceinline__ void send(const Params& p, const Staging<kShape>& staging,
                                              int half) {
    staging.publish();
    if (!staging.elected()) return;
    const Place tile = staging.noted();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = tile.column + half * 128 + i * 64;
      const int output = column < p.border ? 0 : 1;
      const int n = column - (output == 0 ? 0 : p.border);
      const int m = tile.below;
      ptx::tma_store(&p.map[output], staging.box(i),
                     kOut == Major::kK ? ptx::Coord3{n, m, tile.end} : ptx::Coord3{m, n, tile.end});
    }
    staging.commit();
  }

  static constexpr int kShort = 10;         // k tiles
  static constexpr int kFloatRow = 64 * 4;  // bytes; a block of 64 by 64 fills two boxes
  static constexpr int kWarpRows = 16;

  /// A block of 64 columns at a time, each warp its own rows: written as lanes hold them, read back
  /// as they lie in the output. Addressing all of a thread's elements in line would be most of the
  /// kernel's code.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_floats(const Params& p, const float (&acc)[128],
                                                      const Work& work,
                                                      const Staging<kShape>& staging, int offset) {
    static_assert(kWarpRows * 4 * kFloatRow == 2 * kBoxBytes);
    const int warp_row = ((threadIdx.x >> 5) & 3) * kWarpRows;
    const std::uint32_t rows = staging.box(0) + warp_row * kFloatRow;
#pragma unroll 1
    for (int i = 0; i < kShape.n / 64; i++) {
      for_each_index<kShape.n / 64>([&]<int kBlock>(std::integral_constant<int, kBlock>) {
        if (i == kBlock) write_floats(rows, acc + kBlock * 32, work.depth == 0);
      });
      __syncwarp();
      const int m0 = work.m + offset + warp_row;
#pragma unroll 1
      for (int output = 0; output < 2; output++) {
        copy_floats(p, rows, output, work.expert, m0, work.column + i * 64);
      }
      __syncwarp();
    }
  }

  /// Of column c in row r; eight rows are turned against each other, so that they do not meet in
  /// the banks.
  static __device__ __forceinline__ std::uint32_t float_place(std::uint32_t rows, int r, int c) {
    return rows + r * kFloatRow + ((c >> 1 ^ (r & 7) << 2) << 3) + (c & 1) * 4;
  }
  static __device__ __forceinline__ void write_floats(std::uint32_t rows, const float* acc,
                                                      bool empty) {
    const int lane = ptx::lane();
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int row = i % 2 * 8 + (lane >> 2);
      const int column = i / 2 * 8 + (lane & 3) * 2;
      ptx::store_floats(float_place(rows, row, column), empty ? 0.0f : acc[2 * i],
                        empty ? 0.0f : acc[2 * i + 1]);
    }
  }
  /// What an output gets of a warp's rows of a block, from row m0 and column n0 on. Lanes lie along
  /// what is contiguous; a lane's columns are all even or all odd.
  static __device__ __forceinline__ void copy_floats(const Params& p, std::uint32_t rows,
                                                     int output, int expert, int m0, int n0) {
    constexpr bool kAcross = kOut == Major::kK;
    constexpr int kBatch = 8;  // whose loads are on their way together
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
        value[i] = ptx::load_float(float_place(rows, r, c));
      }
      const auto place = [&](int i) {
        return kAcross ? at + i / 2 * down + i % 2 * across : at + i * across;
      };
      if (p.mode == GradStore::kAccumulate) {
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          if (inside[i]) value[i] += *place(i);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (inside[i]) *place(i) = value[i];
      }
      at += kAcross ? kBatch / 2 * down : kBatch * across;
    }
  }
};

}  // namespace sonicmoe::cuda
