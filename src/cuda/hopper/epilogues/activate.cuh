// Epilogue of the gated up projection: H = r(acc + b1), A = r(act(H)) of the rounded H. It runs
// under the products of the next tile. Inference does not store H.
//
// Split layout: one thread has gate and up of a column, half the accumulator apart. Paired layout
// (gate and up columns alternate in W1): gate and up are neighbours in the accumulator; H keeps the
// alternating columns, and 128 columns of H become 64 of A.
#pragma once

#include "cuda/hopper/epilogues/deferred_tile.cuh"
#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/hopper/epilogues/rounding.cuh"
#include "cuda/math/activation_words.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

template <class Element, ActivationKind kKind, GateLayout kLayout>
struct ActivateRows {
  using Params = ActivateRowsParams;
  using Act = ActivationWords<Element, kKind>;
  using State =
      DeferredTile<4>;  ///< H, then A: blocks 0 and 1 become block 0, blocks 2 and 3 block 2
  static constexpr bool kInterleaved = kLayout == GateLayout::kInterleaved;
  /// Pieces: store two boxes of H, then compute A from them in kParts pieces; the same for the
  /// other two boxes; store two boxes of A. Larger pieces would not fit in the registers that a
  /// tile's products leave.
  static constexpr int kParts = 2;
  static constexpr int kPieces = 2 * (1 + kParts) + 1;
  /// If branches chose the pieces, tiles of 12 k tiles would be up to 9 % slower (H200).
  static constexpr bool kUnrolls = true;

  template <TileShape kShape>
  static __device__ __forceinline__ void take(const Params& p, State& state,
                                              const float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                              const CtaTile& tile, const Staging<kShape>& staging,
                                              Rows rows) {
    state.save_origin(tile, staging, rows);
    if (p.bias[0].data == nullptr) {
      round<BiasUse::kNone>(state, acc[0], staging);
      return;
    }
    staging.sync();
    const int expert = staging.saved_expert();
    constexpr int kEach = kShape.n / 2;
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const BiasColumns columns =
          kInterleaved ? BiasColumns{part, 2, kEach} : BiasColumns{part * kEach, 1, kEach};
      stage_bias(staging, p.bias[part], expert, kInterleaved ? tile.column / 2 : tile.column,
                 p.width, columns);
    }
    staging.sync();
    round<BiasUse::kStaged>(state, acc[0], staging);
  }

  template <int kPiece, TileShape kShape>
  static __device__ __forceinline__ void piece(const Params& p, State& state,
                                               const Staging<kShape>& staging) {
    if constexpr (kPiece == kPieces - 1) {
      store_a(p, state, staging);
    } else if constexpr (kPiece % (1 + kParts) == 0) {
      store_h<kPiece / (1 + kParts)>(p, state, staging);
    } else {
      activate<kPiece / (1 + kParts), kPiece % (1 + kParts) - 1>(p, state);
    }
  }

 private:
  template <BiasUse kBias, TileShape kShape>
  static __device__ __forceinline__ void round(State& state, const float (&acc)[kShape.n / 2],
                                               const Staging<kShape>& staging) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // Split: the gates are accumulator blocks 0 and 1, their ups blocks 2 and 3.
      const int block = kInterleaved ? i : i / 2 + i % 2 * 2;
      round_block<Element, kBias>(state.block[i], acc + block * 32, staging, block * 64);
    }
  }

  template <int kBlock, TileShape kShape>
  static __device__ __forceinline__ void store_h(const Params& p, const State& state,
                                                 const Staging<kShape>& staging) {
    if (p.keep_h == 0) return;
    staging.begin();
    staging.write(0, state.block[2 * kBlock]);
    staging.write(1, state.block[2 * kBlock + 1]);
    state.store(staging, [&](const TileOrigin& origin) {
      const int column = origin.column + kBlock * (kInterleaved ? 128 : 64);
      store_ragged(p.h, staging.box(0), column, 0, origin);
      store_ragged(p.h, staging.box(1), kInterleaved ? column + 64 : column, kInterleaved ? 0 : 1,
                   origin);
    });
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void store_a(const Params& p, const State& state,
                                                 const Staging<kShape>& staging) {
    staging.begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kInterleaved) {
        write_paired(staging.box(i), state.block[2 * i]);
      } else {
        staging.write(i, state.block[2 * i]);
      }
    }
    state.store(staging, [&](const TileOrigin& origin) {
      const int column = kInterleaved ? origin.column / 2 : origin.column;
      store_ragged(p.a, staging.box(0), column, 0, origin);
      store_ragged(p.a, staging.box(1), column + 64, 0, origin);
    });
  }

  /// Computes a part of a block of A and writes it over H. ptx::pinned keeps the compiler from
  /// computing it before the k tile under which the piece runs. Paired: a word of A has one column
  /// of two rows, row lane / 4 in its low half and row lane / 4 + 8 in its high half. The column of
  /// the next word is four further.
  template <int kBlock, int kPart>
  static __device__ __forceinline__ void activate(const Params& p, State& state) {
    constexpr int kWords = 16 / kParts;
    Fragment& to = state.block[2 * kBlock];
#pragma unroll
    for (int i = kWords * kPart; i < kWords * (kPart + 1); i++) {
      if constexpr (kInterleaved) {
        const Fragment& h = state.block[2 * kBlock + i / 8];
        const std::uint32_t first = ptx::pinned(h[2 * (i % 8)]);
        const std::uint32_t second = ptx::pinned(h[2 * (i % 8) + 1]);
        to[i] = Act::paired(first, second, p.scalars);
      } else {
        const std::uint32_t gate = ptx::pinned(to[i]);
        const std::uint32_t up = ptx::pinned(state.block[2 * kBlock + 1][i]);
        to[i] = Act::split(gate, up, p.scalars);
      }
    }
  }

  /// Writes a block of A of the paired layout to a box, one element at a time: stmatrix would need
  /// two neighbouring columns in a word, but here a thread's columns are four apart.
  static __device__ __forceinline__ void write_paired(std::uint32_t box, const Fragment& a) {
    // ptx::lane() is read anew, so that no address is kept in a register from tile to tile.
    const int lane = ptx::lane();
    const int swizzle = lane >> 2;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + swizzle;
    const std::uint32_t first = box + row * 128 + (swizzle << 4) + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const std::uint32_t at = (first ^ (i >> 1) << 4) + (i & 1) * 8;
      ptx::store_half_word(at, static_cast<std::uint16_t>(a[i]));
      ptx::store_half_word(at + 8 * 128, static_cast<std::uint16_t>(a[i] >> 16));
    }
  }
};

}  // namespace sonicmoe::cuda
