// Epilogue of the up-projection: computes H = r(acc + b1) and A = q(r(act(H))). Stores the codes
// and scales of A, and H as codes and scales, in bf16, or not at all (inference).
//
// With a gate, a tile has 128 columns of gate and the same 128 columns of up, and a thread has the
// gate and the up value of each of its columns. Without a gate a tile has two blocks of 128
// columns.
//
// The weights' codes past column n are 0, and so are the biases there. So H is 0 there, and A too,
// because act(0) = 0 for every activation. They change no scale and are not stored.
#pragma once

#include "cuda/hopper/epilogues/rounding.cuh"
#include "cuda/hopper/fp8/epilogues/codes.cuh"
#include "cuda/math/activation_words.cuh"

namespace sonicmoe::cuda {

template <ActivationKind kKind>
struct Fp8Activate {
  using Params = Fp8ActivateParams;
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
    const bool biased = p.bias[0].data != nullptr;
    if (biased) {
      stage_biases(p, tile, staging);
      staging.sync();
    }
    if constexpr (kGated) {
      const LanePlace place(tile, rows, p.width - tile.column);
      BlockWords gate, up;
      round(p, gate, &sums[0], staging, 0);
      round(p, up, &sums[64], staging, kFp8Block);
      finish<2>(p, gate, up, tile.column / kFp8Block, place);
    } else {
#pragma unroll
      for (int unit = 0; unit < kFp8Units; unit++) {
        const int block = tile.column / kFp8Block + unit;
        if (block * kFp8Block >= p.width) break;
        const LanePlace place(tile, rows, p.width - block * kFp8Block);
        BlockWords h, unused;
        round(p, h, &sums[unit * 64], staging, unit * kFp8Block);
        finish<1>(p, h, unused, block, place);
      }
    }
    if (biased) staging.sync();  // before the biases of the next tile are staged
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

  /// Adds the staged bias, if there is one, and rounds a unit. `column` is the unit's first column
  /// in the tile.
  static __device__ __forceinline__ void round(const Params& p, BlockWords& words,
                                               const float* sums, const Fp8Staging& staging,
                                               int column) {
    if (p.bias[0].data == nullptr) {
#pragma unroll
      for (int i = 0; i < 16; i++) round_words<Element>(&words[2 * i], sums + 4 * i);
      return;
    }
    const int own = column + (ptx::lane() & 3) * 8;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const std::uint32_t bias = staging.bias_pair_at(own + i / 4 * 32 + i % 4 * 2);
      round_words<Element>(&words[2 * i], sums + 4 * i, bias);
    }
  }

  /// Stores H in the form in which it is kept, then computes and stores A. `first` has gate (or H,
  /// if there is no gate); A overwrites it. `second` has up.
  template <int kParts>
  static __device__ __forceinline__ void finish(const Params& p, BlockWords& first,
                                                BlockWords& second, int block,
                                                const LanePlace& place) {
    if (p.keep == Fp8KeptH::kElements) {
      store_elements(p.h_elements, first, block, 0, place);
      if (kParts == 2) store_elements(p.h_elements, second, block, p.h_elements.part_stride, place);
    }
    if (p.keep == Fp8KeptH::kCodes) {
      store_quantized(p.h, {block, block * kFp8Block}, first, place);
      if (kParts == 2) {
        store_quantized(p.h, {p.blocks + block, p.width + block * kFp8Block}, second, place);
      }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
      // ptxas would overlap all 32 words and spill registers.
      if (i == 16) __syncwarp();
      if constexpr (kGated) {
        first[i] = Act::split(first[i], second[i], p.scalars);
      } else {
        first[i] = Act::plain(first[i]);
      }
    }
    if (p.a_elements.data != nullptr) store_elements(p.a_elements, first, block, 0, place);
    store_quantized(p.a, {block, block * kFp8Block}, first, place);
  }

  /// Stores a block of `out`, which begins `offset` elements after that of the first part.
  static __device__ __forceinline__ void store_elements(const Fp8ElementsOut& out,
                                                        const BlockWords& words, int block,
                                                        std::int64_t offset,
                                                        const LanePlace& place) {
    const LaneElements to(out, place, block * kFp8Block + place.column);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int which = i % 2;
      const int word = i / 2 * 8 + which;
      to.store(place.has(which, i / 2), which, offset + i / 2 * 32,
               make_uint4(words[word], words[word + 2], words[word + 4], words[word + 6]));
    }
  }
};

}  // namespace sonicmoe::cuda
