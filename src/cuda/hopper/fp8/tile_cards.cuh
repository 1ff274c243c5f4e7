// Cards: a ring of tile descriptions (expert, first row, rows, first column) in shared memory. The
// producer computes a tile while it loads the previous tile, and writes its card. The consumers
// read it there. So no consumer waits for the chain of dependent loads that a tile needs.
//
// There are kFp8Cards = 8 cards, and tile i has card i % 8. Each card has an mbarrier whose phase
// completes when the card is written. No mbarrier protects a card from being overwritten too early,
// because the order of the pipeline's stages does:
//
//   1. The producer's thread 0 writes the card of tile i + 1 after it has waited for an empty stage
//      for a k tile of tile i.
//   2. Before, this stage held the k tile three k tiles earlier, which all consumers have released.
//      That k tile belongs to tile i - 3 or a later tile, because every tile has at least one k
//      tile.
//   3. So no consumer still reads the card of tile i - 7, which the card of tile i + 1 overwrites.
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

/// Writes one card after the other. Only the producer's thread 0 may call it.
class CardWriter {
 public:
  __device__ __forceinline__ explicit CardWriter(const Fp8Cta& cta) : cta_(cta) {}
  __device__ __forceinline__ void write(const CtaTile& tile) {
    const std::uint32_t at = next();
    ptx::store_words(at, tile.expert, tile.row);
    ptx::store_words(at + 8, tile.valid_rows, tile.column);
    publish();
  }
  /// Writes the card that follows the last tile: its first word is kNoTile.
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

/// Reads the cards, for one consumer warp. Its state is in shared memory, because products and
/// epilogues need the registers. The state is four words: the number of cards read, the parity of
/// the epilogue's input, and the stage and parity of the operand pipeline.
class ConsumerTiles {
 public:
  __device__ __forceinline__ explicit ConsumerTiles(const Fp8Cta& cta) : cta_(cta) {
    write(state(), 0, 0);
  }

  /// Waits for the next card. Returns false if there are no more tiles.
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
  /// Number of cards read, including the card after the last tile.
  __device__ __forceinline__ std::uint32_t cards_read() const { return ptx::load_word(state()); }

  /// Returns the parity of the mbarrier phase in which the epilogue's next input arrives: 0, 1, 0,
  /// ...
  __device__ __forceinline__ std::uint32_t next_input_parity() const {
    const std::uint32_t parity = input_parity();
    write(state(), cards_read(), parity ^ 1);
    return parity;
  }

  /// save() writes the position in the operand pipeline to shared memory and restore() reads it, so
  /// that it takes no registers during an epilogue.
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
