// What a plug of the engine must offer, and the staging through which epilogues store.
#pragma once

#include <concepts>

#include "cuda/hopper/engine/scheduler.cuh"
#include "cuda/math/fragment.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"

namespace sonicmoe::cuda {

/// A producer also offers run<Gemm>(params, cta), executed by the whole producer
/// warpgroup.
template <class P>
concept RowProducer = requires(const typename P::Params& p) {
  { P::kCopyArrivals } -> std::convertible_to<int>;
  { P::registers(kAnyShape) } -> std::same_as<Registers>;
  { P::kTileReaders } -> std::convertible_to<int>;  // threads and warps that read tile numbers
  { P::kNeedsProxyFence } -> std::convertible_to<bool>;
  { P::kDrawer } -> std::convertible_to<Drawer>;
  P::prefetch(p);
};

/// The rows of one warpgroup in its CTA's tile.
struct Rows {
  int offset;  ///< first
  int halves;  ///< 64-row halves with at least one valid row
};

/// Where a warpgroup's part of a tile lies in its output.
struct Place {
  int column;  ///< first
  int below;   ///< first row less the rows that are left, not positive
  int end;     ///< one past the expert's last row
};

/// Store boxes of one consumer warpgroup. A batch: begin(), write() each box, publish(), then the
/// elected thread issues the stores and commit()s.
template <TileShape kShape>
class Staging {
 public:
  __device__ __forceinline__ explicit Staging(const Cta<kShape>& cta) : base_(cta.base) {
    for (int i = threadIdx.x & 127; i < kShape.n; i += kWarpgroup) set_bias(i, 0);
    for (int i = threadIdx.x & 127; i < kShape.warpgroup_rows(); i += kWarpgroup)
      set_scale(i, 1.0f);
    sync();
  }

  __device__ __forceinline__ bool elected() const { return (threadIdx.x & 127) == 0; }
  __device__ __forceinline__ std::uint32_t box(int i) const {
    return base_ + SharedLayout<kShape>::kStaging + (warpgroup() * kShape.boxes + i) * kBoxBytes;
  }

  __device__ __forceinline__ void sync() const { ptx::named_sync(1 + warpgroup(), kWarpgroup); }

  /// The bias of accumulator column i, as bits of the element; zero until it is set. sync() lies
  /// between setting and reading, publish() between reading and the next tile.
  __device__ __forceinline__ void set_bias(int i, std::uint16_t bits) const {
    ptx::store_half_word(bias() + i * kElementBytes, bits);
  }
  /// Of this lane's two columns among the eight from column i on.
  __device__ __forceinline__ std::uint32_t bias_pair(int i) const {
    return ptx::load_word(bias() + (threadIdx.x & 3) * 4 + i * kElementBytes);
  }

  /// The factor of row i of this warpgroup; 1 until it is set, on the same terms.
  __device__ __forceinline__ void set_scale(int i, float value) const {
    ptx::store_float(scale() + i * 4, value);
  }
  /// The same by cp.async.
  __device__ __forceinline__ void copy_scale(int i, const float* value) const {
    ptx::copy4(scale() + i * 4, value);
  }
  /// Of this lane's first row (0) or second row (1) in a 64-row half.
  __device__ __forceinline__ float row_scale(int half, int which) const {
    const int row =
        half * 64 + ((threadIdx.x >> 5) & 3) * 16 + which * 8 + ((threadIdx.x & 31) >> 2);
    return ptx::load_float(scale() + row * 4);
  }

  /// The expert of the tile that is multiplied; all may read it after a sync().
  __device__ __forceinline__ void note_expert(int expert) const {
    ptx::store_float(place_words() + 12, __int_as_float(expert));
  }
  __device__ __forceinline__ int noted_expert() const { return ptx::load_word(place_words() + 12); }
  /// What the elected thread writes down, and reads back.
  __device__ __forceinline__ void note(const Place& place) const {
    const std::uint32_t at = place_words();
    ptx::store_words(at, place.column, place.below);
    ptx::store_float(at + 8, __int_as_float(place.end));
  }
  __device__ __forceinline__ Place noted() const {
    const std::uint32_t at = place_words();
    return {ptx::load_word(at), ptx::load_word(at + 4), ptx::load_word(at + 8)};
  }

  /// Until the boxes may be overwritten.
  __device__ __forceinline__ void begin() const {
    if (elected()) ptx::tma_wait_read();
    sync();
  }
  /// This lane's address of columns 8c.. (c even) in box i: row lane % 8 of matrix lane / 8,
  /// swizzled.
  __device__ __forceinline__ std::uint32_t place(int i, int c) const {
    const int lane = threadIdx.x & 31;
    const int matrix = lane >> 3;
    const int swizzle = lane & 7;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (matrix & 1) * 8 + swizzle;
    return (box(i) + row * 128 + ((swizzle ^ (matrix >> 1)) << 4)) ^ c << 4;
  }
  __device__ __forceinline__ void write(int i, const Fragment& block) const {
#pragma unroll
    for (int word = 0; word < 16; word += 4) write_part(i, block, word);
  }
  /// Four words of it, from `word` on.
  __device__ __forceinline__ void write_part(int i, const Fragment& block, int word) const {
    const std::uint32_t words[4] = {block[word], block[word + 1], block[word + 2], block[word + 3]};
    ptx::store_matrices(place(i, word / 2), words);
  }
  /// Writes the block transposed: box row c holds column c.
  __device__ __forceinline__ void write_transposed(int i, const Fragment& block) const {
    const int lane = threadIdx.x & 31;
    const int matrix = lane >> 3;
    const int swizzle = lane & 7;
    const int chunk = ((threadIdx.x >> 5) & 3) * 2 + (matrix & 1);
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      const std::uint32_t words[4] = {block[2 * c], block[2 * c + 1], block[2 * c + 2],
                                      block[2 * c + 3]};
      const int row = (c + (matrix >> 1)) * 8 + swizzle;
      ptx::store_matrices_transposed(box(i) + row * 128 + ((chunk ^ swizzle) << 4), words);
    }
  }
  /// Makes the boxes visible to the copy engine.
  __device__ __forceinline__ void publish() const {
    ptx::fence_async_shared();
    sync();
  }
  __device__ __forceinline__ void commit() const { ptx::tma_commit(); }
  /// Until everything stored is in memory; a warp's first thread may have stored.
  __device__ __forceinline__ void drain() const {
    if ((threadIdx.x & 31) == 0) ptx::tma_wait_done();
    __syncwarp();
  }

 private:
  // Derived anew at each use: registers are scarcer than integer arithmetic here.
  static __device__ __forceinline__ int warpgroup() {
    return static_cast<int>(threadIdx.x) / kWarpgroup - 1;
  }
  __device__ __forceinline__ std::uint32_t scale() const {
    return base_ + SharedLayout<kShape>::kScale + warpgroup() * kShape.scale_bytes();
  }
  __device__ __forceinline__ std::uint32_t place_words() const {
    return base_ + SharedLayout<kShape>::kPlace + warpgroup() * kPlaceBytes;
  }
  __device__ __forceinline__ std::uint32_t bias() const {
    return base_ + SharedLayout<kShape>::kBias + warpgroup() * kShape.bias_bytes();
  }

  std::uint32_t base_;
};

/// An epilogue that runs between the products of two tiles: run() consumes the accumulator. State
/// is one warpgroup's, from tile to tile. What run() keeps back, if `state.held`, late() finishes
/// under the next tile's k tile late_at().
template <class E, TileShape kShape>
concept ImmediateEpilogue = requires(const typename E::Params& p, typename E::State& state,
                                     float (&acc)[kShape.halves()][kShape.n / 2], const Work& work,
                                     const Staging<kShape>& staging,
                                     Rows rows) { E::run(p, state, acc, work, staging, rows); };

/// Of deferred epilogues: pieces that are long, and slower where branches pick them, have code of
/// their own where there is a k tile for each.
template <class E>
concept UnrolledEpilogue = requires { requires E::kUnrolls; };

/// One that stores a tile while the next is multiplied: take() moves what is needed from the
/// accumulator into the state, piece<0 .. kPieces - 1>() do the rest, one beside each `every` of
/// the next tile's k tiles or, unrolled, each of the first ones, and what is left after the last
/// tile.
template <class E, TileShape kShape>
concept DeferredEpilogue =
    !kShape.ping_pong() && requires(const typename E::Params& p, typename E::State& state,
                                    const float (&acc)[kShape.halves()][kShape.n / 2],
                                    const Work& work, const Staging<kShape>& staging, Rows rows) {
      E::take(p, state, acc, work, staging, rows);
      E::template piece<0>(p, state, staging);
      { E::kPieces } -> std::convertible_to<int>;
      requires UnrolledEpilogue<E> || requires {
        { E::every(E::kPieces) } -> std::same_as<int>;
      };
    };

/// One whose input comes through the ring: the producer loads kInputTiles stages by load_input()
/// behind a tile's products, run() takes them beside the accumulator and may store out of them. The
/// last one still is its own then, until give_back() under the next tile's first products.
template <class E, TileShape kShape>
concept RingEpilogue =
    !kShape.ping_pong() &&
    requires(const typename E::Params& p, float (&acc)[kShape.halves()][kShape.n / 2],
             const Work& work, const Staging<kShape>& staging, Rows rows, const Cta<kShape>& cta,
             RingPosition<kShape.stages>& ring) {
      { E::kInputTiles } -> std::convertible_to<int>;
      E::template load_input<kShape>(p, work, 0, cta.b(0), cta.full(0));
      E::begin(p, work, staging, rows);
      E::run(p, acc, work, staging, rows, cta, ring);
      E::give_back(cta, 0);
    };

template <class E, TileShape kShape>
concept TileEpilogue =
    ImmediateEpilogue<E, kShape> || DeferredEpilogue<E, kShape> || RingEpilogue<E, kShape>;

/// Of immediate epilogues: those that keep something back.
template <class E>
concept StoresLate = requires(const typename E::State& state) {
  { E::late_at(state, 0, 0) } -> std::convertible_to<int>;
};

}  // namespace sonicmoe::cuda
