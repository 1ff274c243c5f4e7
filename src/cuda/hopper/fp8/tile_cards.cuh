// The tiles of a CTA, which the producer hands to the consumers through shared memory. The producer
// looks a tile up while it loads the tile before it, so no consumer waits for the look-up.
//
// No mbarrier tells when a card may be overwritten, because the pipeline's stages tell it. The
// producer's thread 0 writes the card of tile i + 1 when it has got a stage for tile i. Three k
// tiles earlier the same stage held a k tile of tile i - 3 or of a later tile, and the consumers
// have released it. So they do not read card i - 7 any more, whose place card i + 1 takes.
#pragma once

#include "cuda/hopper/engine/tile_queue.cuh"
#include "cuda/hopper/fp8/params.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

using Fp8Cta = Cta<kFp8Tile>;

__device__ __forceinline__ ptx::Mbarrier card_full(const Fp8Cta& cta, int card) {
  return ptx::Mbarrier(cta.base + Fp8SharedLayout::kCardFull + card * 8);
}

/// For the producer's thread 0: writes one card after the other.
class CardWriter {
 public:
  __device__ __forceinline__ explicit CardWriter(const Fp8Cta& cta) : cta_(cta) {}
  __device__ __forceinline__ void write(const CtaTile& tile) {
    const std::uint32_t at = next();
    ptx::store_words(at, tile.expert, tile.row);
    ptx::store_words(at + 8, tile.valid_rows, tile.column);
    publish();
  }
  /// After the last tile.
  __device__ __forceinline__ void write_end() {
    ptx::store_word(next(), kNoTile);
    publish();
  }

 private:
  __device__ __forceinline__ std::uint32_t next() const {
    return cta_.base + Fp8SharedLayout::kCards + next_ * Fp8SharedLayout::kCardBytes;
  }
  __device__ __forceinline__ void publish() {
    card_full(cta_, next_).arrive();
    next_ = (next_ + 1) % kFp8Cards;
  }

  const Fp8Cta& cta_;
  std::uint32_t next_ = 0;
};

/// A consumer warp's way through the tiles. Its state is in shared memory, because products and
/// epilogues need the registers.
class ConsumerTiles {
 public:
  __device__ __forceinline__ explicit ConsumerTiles(const Fp8Cta& cta) : cta_(cta) {
    write(state(), 0, 0);
  }

  /// Goes to the next tile. False: there is none.
  __device__ __forceinline__ bool next() {
    const std::uint32_t read = cards_read();
    const int card = read % kFp8Cards;
    card_full(cta_, card).wait(read / kFp8Cards & 1);
    card_ = cta_.base + Fp8SharedLayout::kCards + card * Fp8SharedLayout::kCardBytes;
    write(state(), read + 1, input_parity());
    return ptx::uniform(ptx::load_word(card_)) != kNoTile;
  }
  __device__ __forceinline__ CtaTile current() const {
    const uint4 words = ptx::load_shared16(card_);
    CtaTile tile{};
    tile.expert = static_cast<int>(words.x);
    tile.row = static_cast<int>(words.y);
    tile.valid_rows = static_cast<int>(words.z);
    tile.column = static_cast<int>(words.w);
    return tile;
  }
  /// Number of cards read, with that of the end.
  __device__ __forceinline__ std::uint32_t cards_read() const { return ptx::load_word(state()); }

  /// The mbarrier parity of the epilogue's next input: 0, 1, 0, ...
  __device__ __forceinline__ std::uint32_t next_input_parity() const {
    const std::uint32_t parity = input_parity();
    write(state(), cards_read(), parity ^ 1);
    return parity;
  }

  /// save() and restore() keep a position in the operand pipeline during an epilogue.
  using Ring = RingPosition<kFp8Tile.stages>;
  __device__ __forceinline__ void save(const Ring& ring) const {
    write(state() + 8, ring.stage, ring.parity);
  }
  __device__ __forceinline__ void restore(Ring& ring) const {
    ring.stage = ptx::load_word(state() + 8);
    ring.parity = ptx::load_word(state() + 12);
  }

 private:
  __device__ __forceinline__ std::uint32_t state() const {
    return cta_.base + Fp8SharedLayout::kWarpStates +
           (threadIdx.x - kWarpgroup) / 32 * Fp8SharedLayout::kWarpStateBytes;
  }
  __device__ __forceinline__ std::uint32_t input_parity() const {
    return ptx::load_word(state() + 4);
  }
  /// One lane writes, after all lanes have read the old values.
  static __device__ __forceinline__ void write(std::uint32_t at, std::uint32_t first,
                                               std::uint32_t second) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::store_words(at, first, second);
    __syncwarp();
  }

  const Fp8Cta& cta_;
  std::uint32_t card_ = 0;
};

}  // namespace sonicmoe::cuda
