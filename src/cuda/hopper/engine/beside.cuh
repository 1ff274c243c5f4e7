// What is left of a tile when the next one begins, as Mainloop::run calls it beside its products.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/mainloop.cuh"

namespace sonicmoe::cuda {

/// No work beside the products.
struct Nothing {
  static __device__ __forceinline__ bool pending() { return false; }
  static __device__ __forceinline__ void run(int) {}
};

/// What an immediate epilogue has kept back.
template <class Gemm>
struct Late {
  using Epilogue = typename Gemm::Epilogue;

  const typename Epilogue::Params& p;
  const Staging<Gemm::kShape>& staging;
  int warpgroup;
  typename Epilogue::State& state;
  int at = 0;

  __device__ __forceinline__ bool pending() const {
    if constexpr (StoresLate<Epilogue>) return state.held;
    return false;
  }
  __device__ __forceinline__ void next(int k_tiles) {
    if constexpr (StoresLate<Epilogue>) at = Epilogue::late_at(state, k_tiles, warpgroup);
  }
  __device__ __forceinline__ void run(int kt) {
    if constexpr (StoresLate<Epilogue>) {
      const int half = kt == at ? 1 : 0;
      if (half == 1 || (kt == 0 && !state.sent)) Epilogue::late(p, state, staging, half);
    }
  }
};

/// The pieces of a deferred one: one beside each `every` k tiles or, unrolled, beside each of the
/// first ones.
template <class Gemm>
struct HeldPieces {
  using Epilogue = typename Gemm::Epilogue;

  const typename Epilogue::Params& p;
  const Staging<Gemm::kShape>& staging;
  typename Epilogue::State& state;
  int every = 1;
  int done = Epilogue::kPieces;

  __device__ __forceinline__ bool pending() const { return done < Epilogue::kPieces; }
  __device__ __forceinline__ void run(int kt) {
    if (kt >= done * every) step();
  }
  /// All that are left, with no products beside them.
  __device__ __forceinline__ void flush() {
#pragma unroll 1
    while (pending()) step();
  }
  /// The products of a part, and the pieces. between() is called when there are registers for what
  /// it asks, before the last products.
  template <class Loop, class Between>
  __device__ __forceinline__ void multiply(typename Loop::Accumulator& acc,
                                           const Cta<Gemm::kShape>& cta, typename Loop::Ring& ring,
                                           const Part& part, Between between) {
    if constexpr (!UnrolledEpilogue<Epilogue>) {
      every = Epilogue::every(part.k_tiles);
      between();
      Loop::run(acc, cta, ring, part, *this);
    } else if (pending() && part.k_tiles >= Epilogue::kPieces && Loop::whole(part)) {
      Loop::template run_unrolled<Epilogue::kPieces>(
          acc, cta, ring, part, [&]<int kPiece>(std::integral_constant<int, kPiece>) {
            Epilogue::template piece<kPiece>(p, state, staging);
            if constexpr (kPiece == Epilogue::kPieces - 1) between();
          });
      done = Epilogue::kPieces;
    } else {
      flush();
      between();
      Nothing nothing;
      Loop::run(acc, cta, ring, part, nothing);
    }
  }

 private:
  __device__ __forceinline__ void step() {
    choose<0, Epilogue::kPieces>();
    done++;
  }
  /// One of the pieces in a range; halving it takes fewer branches than asking for each.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void choose() {
    constexpr int kMiddle = (kFirst + kEnd) / 2;
    if constexpr (kEnd - kFirst == 1) {
      Epilogue::template piece<kFirst>(p, state, staging);
    } else if (done < kMiddle) {
      choose<kFirst, kMiddle>();
    } else {
      choose<kMiddle, kEnd>();
    }
  }
};

/// The stage that an epilogue with input of its own still has.
template <class Gemm>
struct OwedStage {
  const Cta<Gemm::kShape>& cta;
  const RingPosition<Gemm::kShape.stages>& ring;
  bool owes = false;

  __device__ __forceinline__ bool pending() const { return owes; }
  /// Under the first k tile.
  __device__ __forceinline__ void run(int) {
    Gemm::Epilogue::give_back(cta, ring.before());
    owes = false;
  }
};

}  // namespace sonicmoe::cuda
