// Epilogue of the up-projection: H = r(acc + b1) and A = q(r(act(H))). H is kept as codes and
// scales, or in bf16, or not at all (inference).
//
// With a gate, a tile is 128 columns of gate and the same 128 columns of up, and a thread has both
// values of a column. Without a gate it is two blocks of 128 columns.
#pragma once

#include "cuda/hopper/epilogues/rounding.cuh"
#include "cuda/hopper/fp8/epilogues/codes.cuh"
#include "cuda/math/activation_words.cuh"

namespace sonicmoe::cuda {

template <ActivationKind kKind>
struct Fp8Act {
  using Params = Fp8ActParams;
  using Element = __nv_bfloat16;
  using Act = ActivationWords<Element, kKind>;
  static constexpr bool kGated = is_gated(kKind);

  static __device__ __forceinline__ void init(const Fp8Cta&) {}
  static __device__ __forceinline__ void begin(const Params&, const ConsumerTiles&, const Fp8Cta&,
                                               const Fp8Staging&, Rows) {}

  static __device__ __forceinline__ void run(const Params& p, const float (&sums)[128],
                                             const ConsumerTiles& tiles, const Fp8Cta&,
                                             const Fp8Staging& staging, Rows rows) {
    const CtaTile tile = tiles.current();
    if (p.bias[0].data != nullptr) stage_biases(p, tile, staging);
    if constexpr (kGated) {
      staging.begin();  // its barrier also makes the staged biases visible
      BlockWords gate, up;
      round(p, gate, &sums[0], staging, 0);
      round(p, up, &sums[64], staging, kFp8Block);
      finish<2>(p, gate, up, tile.column / kFp8Block, tile, staging, rows);
    } else {
#pragma unroll
      for (int unit = 0; unit < kFp8Units; unit++) {
        const int block = tile.column / kFp8Block + unit;
        if (block * kFp8Block >= p.width) break;
        staging.begin();
        BlockWords h, unused;
        round(p, h, &sums[unit * 64], staging, unit * kFp8Block);
        finish<1>(p, h, unused, block, tile, staging, rows);
      }
    }
  }

 private:
  static __device__ __forceinline__ void stage_biases(const Params& p, const CtaTile& tile,
                                                      const Fp8Staging& staging) {
    if constexpr (kGated) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        stage_bias(staging, p.bias[part], tile.expert, tile.column, p.width,
                   {part * kFp8Block, 1, kFp8Block});
      }
    } else {
      stage_bias(staging, p.bias[0], tile.expert, tile.column, p.width, {0, 1, kFp8Tile.n});
    }
  }

  static __device__ __forceinline__ void round(const Params& p, BlockWords& words,
                                               const float* sums, const Fp8Staging& staging,
                                               int column) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Fragment& block = words.half[half];
      const int at = column + half * 64;
      if (p.bias[0].data != nullptr) {
        round_block<Element, BiasUse::kStaged>(block, sums + half * 32, staging, at);
      } else {
        round_block<Element, BiasUse::kNone>(block, sums + half * 32, staging, at);
      }
    }
  }

  /// Stores H in the form in which it is kept, then A. `first` is gate (H without a gate) and is
  /// overwritten by A; `second` is up. The boxes hold:
  ///
  ///   H kept as | gate    | up      | A
  ///   codes     | box 0   | box 1   | box 2
  ///   bf16      | 0 and 1 | 2 and 3 | box 2, after the stores of H have read their boxes
  ///   not kept  |         |         | box 2
  template <int kParts>
  static __device__ __forceinline__ void finish(const Params& p, BlockWords& first,
                                                BlockWords& second, int block, const CtaTile& tile,
                                                const Fp8Staging& staging, Rows rows) {
    const int up_block = p.width / kFp8Block + block;
    if (p.keep == Fp8KeptH::kElements) {
      write_words(staging, 0, first);
      if (kParts == 2) write_words(staging, 2, second);
      staging.publish();
      if (staging.elected()) {
        issue_words(p.h_words, staging, 0, block * kFp8Block, 0, tile, rows);
        if (kParts == 2) issue_words(p.h_words, staging, 2, block * kFp8Block, 1, tile, rows);
        staging.commit();
      }
    }
    if (p.keep == Fp8KeptH::kElements) staging.begin();
    if (p.keep == Fp8KeptH::kCodes) {
      quantize_block(p.h, block, staging, 0, first, tile, rows);
      if (kParts == 2) quantize_block(p.h, up_block, staging, 1, second, tile, rows);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if constexpr (kGated) {
        first[i] = Act::split(first[i], second[i], p.scalars);
      } else {
        first[i] = Act::plain(first[i]);
      }
    }
    quantize_block(p.a, block, staging, 2, first, tile, rows);
    staging.publish();
    if (staging.elected()) {
      if (p.keep == Fp8KeptH::kCodes) {
        issue_codes(p.h, staging, 0, block, tile, rows);
        if (kParts == 2) issue_codes(p.h, staging, 1, up_block, tile, rows);
      }
      issue_codes(p.a, staging, 2, block, tile, rows);
      staging.commit();
    }
  }
};

}  // namespace sonicmoe::cuda
