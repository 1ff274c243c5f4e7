// The interfaces of producers and epilogues. "Under" the products of a tile or k tile means: while
// the tensor cores execute their wgmma, which are asynchronous.
#pragma once

#include <concepts>

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile_queue.cuh"

namespace sonicmoe::cuda {

/// A producer also has run<Gemm>(params, cta), which the whole producer warpgroup executes.
template <class P>
concept RowProducer = requires(const typename P::Params& p) {
  { P::kCopyArrivals } -> std::convertible_to<int>;  // threads that arrive at `full` by cp.async
  { P::kQueueReaders } -> std::convertible_to<int>;  // threads or warps that read tile indices
  { P::kNeedsProxyFence } -> std::convertible_to<bool>;  // it writes A through the generic proxy
  { P::kMayStartEarly } -> std::convertible_to<bool>;    // its kernels support Begins::kIndependent
  { P::kScheduler } -> std::convertible_to<SchedulerThread>;
  { P::registers(kAnyShape) } -> std::same_as<Registers>;
  P::prefetch(p);
};

// Three kinds of epilogues, by when the epilogue of tile t runs:
//
//   | concept           | runs                                      | for                         |
//   | ImmediateEpilogue | after t's products: run(). Stores that it | ping-pong; H and A without  |
//   |                   | defers run under t + 1's products         | a gate; weight gradients    |
//   | DeferredEpilogue  | take() rounds t after its products;       | H and A with a gate; Y, dX~ |
//   |                   | pieces run under t + 1's products         | and the grouped GEMM        |
//   | RingEpilogue      | after t's products: run(), whose input    | dH                          |
//   |                   | comes through the operand pipeline        |                             |

/// run() computes the tile's results from the accumulator and stores them. `state` belongs to one
/// warpgroup and keeps its values from tile to tile.
template <class E, TileShape kShape>
concept ImmediateEpilogue = requires(const typename E::Params& p, typename E::State& state,
                                     float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                     const CtaTile& tile, const Staging<kShape>& staging,
                                     Rows rows) { E::run(p, state, acc, tile, staging, rows); };

/// An immediate epilogue that stores a part of its tile under the next tile's products. The tile
/// has two halves of columns. While state.pending is true:
///
///   | half                  | where it is        | what stores it                               |
///   | 0, state.first_stored | in global memory   | run() has stored it                          |
///   | 0, not first_stored   | in the store boxes | store_deferred(.., 0), under k tile 0        |
///   | 1                     | in the state       | store_deferred(.., 1), under k tile          |
///   |                       |                    | deferred_k_tile()                            |
template <class E>
concept DefersStores = requires(const typename E::State& state) {
  { E::deferred_k_tile(state, 0, 0) } -> std::convertible_to<int>;
};

/// A deferred epilogue whose pieces are unrolled into the main loop: piece i runs under k tile i of
/// the next tile. For long pieces: if branches selected the piece, they would be slower.
template <class E>
concept UnrolledEpilogue = requires { requires E::kUnrolls; };

/// take() rounds a tile's results from the accumulator into the state. piece<0>() ..
/// piece<kPieces - 1>() do the rest under the next tile's products: one piece every
/// k_tiles_per_piece() k tiles or, unrolled, one piece under each of the first k tiles. Pieces run
/// without products
///  - after the last tile,
///  - if the next tile has too few k tiles,
///  - unrolled pieces also if a k tile of the next tile is not full (Mainloop::full_k_tiles()).
template <class E, TileShape kShape>
concept DeferredEpilogue =
    !kShape.ping_pong() &&
    requires(const typename E::Params& p, typename E::State& state,
             const float (&acc)[kShape.row_blocks()][kShape.n / 2], const CtaTile& tile,
             const Staging<kShape>& staging, Rows rows) {
      E::take(p, state, acc, tile, staging, rows);
      E::template piece<0>(p, state, staging);
      { E::kPieces } -> std::convertible_to<int>;
      requires UnrolledEpilogue<E> || requires {
        { E::k_tiles_per_piece(E::kPieces) } -> std::same_as<int>;
      };
    };

/// After a tile's k tiles the producer fills kInputTiles more stages by load_input(): the input
/// stages. run() reads them, and may store results by TMA from their memory. run() releases an
/// input stage after it has computed the results of the next input stage. release_input() releases
/// the tile's last input stage, under the next tile's first products.
template <class E, TileShape kShape>
concept RingEpilogue =
    !kShape.ping_pong() &&
    requires(const typename E::Params& p, float (&acc)[kShape.row_blocks()][kShape.n / 2],
             const CtaTile& tile, const Staging<kShape>& staging, Rows rows, const Cta<kShape>& cta,
             RingPosition<kShape.stages>& ring) {
      { E::kInputTiles } -> std::convertible_to<int>;
      E::template load_input<kShape>(p, tile, 0, cta.b(0), cta.full(0));
      E::begin(p, tile, staging, rows);
      E::run(p, acc, tile, staging, rows, cta, ring);
      E::release_input(cta, 0);
    };

template <class E, TileShape kShape>
concept TileEpilogue =
    ImmediateEpilogue<E, kShape> || DeferredEpilogue<E, kShape> || RingEpilogue<E, kShape>;

}  // namespace sonicmoe::cuda
