// The part of a tile's epilogue that Mainloop::run() executes under the next tile's products.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/mainloop.cuh"

namespace sonicmoe::cuda {

struct NothingDeferred {
  static __device__ __forceinline__ bool pending() { return false; }
  static __device__ __forceinline__ void run(int) {}
};

/// The stores that an immediate epilogue defers to the next tile (DefersStores).
template <class Gemm>
struct DeferredStores {
  using Epilogue = typename Gemm::Epilogue;

  const typename Epilogue::Params& p;
  const Staging<Gemm::kShape>& staging;
  int warpgroup;
  typename Epilogue::State& state;
  int second_at = 0;  ///< k tile of the second half

  __device__ __forceinline__ bool pending() const {
    if constexpr (DefersStores<Epilogue>) return state.pending;
    return false;
  }
  /// Called before a tile of `k_tiles` k tiles.
  __device__ __forceinline__ void begin(int k_tiles) {
    if constexpr (DefersStores<Epilogue>)
      second_at = Epilogue::deferred_k_tile(state, k_tiles, warpgroup);
  }
  __device__ __forceinline__ void run(int kt) {
    if constexpr (DefersStores<Epilogue>) {
      const int half = kt == second_at ? 1 : 0;
      if (half == 1 || (kt == 0 && !state.first_stored))
        Epilogue::store_deferred(p, state, staging, half);
    }
  }
};

/// The pieces of a deferred epilogue.
template <class Gemm>
struct DeferredPieces {
  using Epilogue = typename Gemm::Epilogue;

  const typename Epilogue::Params& p;
  const Staging<Gemm::kShape>& staging;
  typename Epilogue::State& state;
  int k_tiles_per_piece = 1;
  int done = Epilogue::kPieces;

  __device__ __forceinline__ bool pending() const { return done < Epilogue::kPieces; }
  __device__ __forceinline__ void run(int kt) {
    if (kt >= done * k_tiles_per_piece) run_next();
  }
  /// Runs all remaining pieces, without products.
  __device__ __forceinline__ void flush() {
#pragma unroll 1
    while (pending()) run_next();
  }
  /// Multiplies a tile and runs the pieces of the previous tile. Calls between() once, at a point
  /// where registers are free for it, before the tile's last products are complete.
  template <class Loop, class Between>
  __device__ __forceinline__ void multiply(typename Loop::Accumulator& acc,
                                           const Cta<Gemm::kShape>& cta, typename Loop::Ring& ring,
                                           const WarpgroupTile& tile, Between between) {
    if constexpr (!UnrolledEpilogue<Epilogue>) {
      k_tiles_per_piece = Epilogue::k_tiles_per_piece(tile.k_tiles);
      between();
      Loop::run(acc, cta, ring, tile, *this);
    } else if (pending() && tile.k_tiles >= Epilogue::kPieces && Loop::all_full(tile)) {
      Loop::template run_unrolled<Epilogue::kPieces>(
          acc, cta, ring, tile, [&]<int kPiece>(std::integral_constant<int, kPiece>) {
            Epilogue::template piece<kPiece>(p, state, staging);
            if constexpr (kPiece == Epilogue::kPieces - 1) between();
          });
      done = Epilogue::kPieces;
    } else {
      flush();
      between();
      NothingDeferred nothing;
      Loop::run(acc, cta, ring, tile, nothing);
    }
  }

 private:
  __device__ __forceinline__ void run_next() {
    run_one_of<0, Epilogue::kPieces>();
    done++;
  }
  /// Runs piece `done`. Bisection finds it with fewer branches than one comparison per piece.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void run_one_of() {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if constexpr (kEnd - kFirst == 1) {
      Epilogue::template piece<kFirst>(p, state, staging);
    } else if (done < kMiddle) {
      run_one_of<kFirst, kMiddle>();
    } else {
      run_one_of<kMiddle, kEnd>();
    }
  }
};

/// Releases the last input stage of a ring epilogue under the next tile's first k tile. TMA stores
/// results from this stage's memory. It has usually read them by then, so the release rarely waits.
template <class Gemm>
struct DeferredRelease {
  const Cta<Gemm::kShape>& cta;
  const RingPosition<Gemm::kShape.stages>& ring;
  bool unreleased = false;

  __device__ __forceinline__ bool pending() const { return unreleased; }
  __device__ __forceinline__ void run(int) {
    Gemm::Epilogue::release_input(cta, ring.previous_stage());
    unreleased = false;
  }
};

}  // namespace sonicmoe::cuda
