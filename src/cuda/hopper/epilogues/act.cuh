// Epilogue of the gated up projection: H = r(acc + b1), A = r(act(H)) from the rounded H, under the
// products of the next tile. Inference leaves H out. In the split form gate and up of one column
// lie in one thread, half the accumulator apart. In the paired form, where gate and up columns
// alternate in the weights as they lie, they meet in neighbouring accumulators; H keeps the
// alternating columns, 128 of which become 64 of A.
#pragma once

#include "cuda/hopper/epilogues/held.cuh"
#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/math/activation_words.cuh"
#include "cuda/ptx/lane.cuh"

namespace sonicmoe::cuda {

struct ActRowsParams {
  RaggedMap h;  ///< (column, part, row, base): part 0 is the gate (or the only one), part 1 up;
                ///< paired: one part of 2n columns
  RaggedMap a;
  Bias bias[2];  ///< gate, up; without a gate [0] alone
  ActivationScalars scalars;
  std::int32_t width;   ///< n
  std::int32_t keep_h;  ///< 0: inference
};

template <class Element, ActivationKind kKind, HLayout kLayout>
struct ActRows {
  using Params = ActRowsParams;
  using Act = ActivationWords<Element, kKind>;
  using State = HeldTile;  ///< H: blocks 0 and 1 become block 0 of A, blocks 2 and 3 the other one
  static constexpr bool kPaired = kLayout == HLayout::kPaired;
  /// Two boxes of H, their activation in parts; the same again; two boxes of A. More at once does
  /// not fit the registers beside a tile's products.
  static constexpr int kParts = 2;
  static constexpr int kPieces = 2 * (1 + kParts) + 1;
  /// The pieces are long: picked by branches, up to 9 % slower where a tile has 12 k tiles.
  static constexpr bool kUnrolls = true;

  /// Rounds a tile's products, which frees the accumulator.
  template <TileShape kShape>
  static __device__ __forceinline__ void take(const Params& p, State& state,
                                              const float (&acc)[kShape.halves()][kShape.n / 2],
                                              const Work& work, const Staging<kShape>& staging,
                                              Rows rows) {
    state.open(work, staging, rows);
    if (p.bias[0].data == nullptr) {
      round<BiasUse::kNone>(state, acc[0], staging);
      return;
    }
    staging.sync();
    const int expert = staging.noted_expert();
    constexpr int kEach = kShape.n / 2;
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const BiasPlace place =
          kPaired ? BiasPlace{part, 2, kEach} : BiasPlace{part * kEach, 1, kEach};
      stage_bias(staging, p.bias[part], expert, kPaired ? work.column / 2 : work.column, p.width,
                 place);
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
      const int block = kPaired ? i : i / 2 + i % 2 * 2;  // the gates fill half of a split tile
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
    state.send(staging, [&](const Place& place) {
      const int column = place.column + kBlock * (kPaired ? 128 : 64);
      store_ragged(p.h, staging.box(0), column, 0, place);
      store_ragged(p.h, staging.box(1), kPaired ? column + 64 : column, kPaired ? 0 : 1, place);
    });
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void store_a(const Params& p, const State& state,
                                                 const Staging<kShape>& staging) {
    staging.begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kPaired) {
        write_apart(staging.box(i), state.block[2 * i]);
      } else {
        staging.write(i, state.block[2 * i]);
      }
    }
    state.send(staging, [&](const Place& place) {
      const int column = kPaired ? place.column / 2 : place.column;
      store_ragged(p.a, staging.box(0), column, 0, place);
      store_ragged(p.a, staging.box(1), column + 64, 0, place);
    });
  }

  /// A part of a block of A, in place of H. Paired, a word is one column in rows 0-7 (low) and 8-15
  /// (high), four columns from the next word's.
  template <int kBlock, int kPart>
  static __device__ __forceinline__ void activate(const Params& p, State& state) {
    constexpr int kWords = 16 / kParts;
    Fragment& to = state.block[2 * kBlock];
#pragma unroll
    for (int i = kWords * kPart; i < kWords * (kPart + 1); i++) {
      if constexpr (kPaired) {
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

  /// A thread's columns are four apart, which stmatrix cannot place: elements one by one.
  static __device__ __forceinline__ void write_apart(std::uint32_t box, const Fragment& a) {
    const int lane = ptx::lane();  // or all addresses are held from tile to tile
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
