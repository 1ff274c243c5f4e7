// Epilogue of the up projection in the paired form, where gate and up columns alternate in the
// weights as they lie: they meet in neighbouring accumulators of a thread. H keeps the alternating
// columns; a block of 128 of them becomes 64 of A.
#pragma once

#include "cuda/epilogues/act.cuh"

namespace sonicmoe::cuda {

template <class Element, ActivationKind kKind>
struct ActPairedRows {
  static_assert(is_gated(kKind));
  using Params = ActRowsParams;  ///< h has one part of 2n columns
  using Act = ActivationOf<kKind>;
  using Two = Pair<Element>;
  using State = NoState;

  template <TileShape kShape>
  static __device__ __forceinline__ void begin(const Params&, State&, const Work&,
                                               const Staging<kShape>&, Rows) {}

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State&,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.boxes == 2 && kShape.n % 256 == 0);
    if (p.bias[0].data != nullptr) {
      stage_biases(p, work, staging);
      staging.sync();
    }
#pragma unroll
    for (int half = 0; half < kShape.halves(); half++) {
      if (half >= rows.halves) break;
#pragma unroll
      for (int quad = 0; quad < kShape.n / 256; quad++) {
        columns(p, &acc[half][quad * 128], work, staging, quad * 256, rows.offset + half * 64);
      }
    }
  }

 private:
  template <TileShape kShape>
  static __device__ __forceinline__ void stage_biases(const Params& p, const Work& work,
                                                      const Staging<kShape>& staging) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const Bias& bias = p.bias[part];
      const auto* data =
          static_cast<const std::uint16_t*>(bias.data) + work.expert * bias.expert_stride;
      for (int i = threadIdx.x & 127; i < kShape.n / 2; i += kWarpgroup) {
        const int c = work.column / 2 + i;
        staging.set_bias(2 * i + part, c < p.width ? __ldg(data + c * bias.column_stride) : 0);
      }
    }
  }

  /// 256 accumulator columns: four blocks of H, then two of A.
  template <TileShape kShape>
  static __device__ __forceinline__ void columns(const Params& p, const float* acc,
                                                 const Work& work, const Staging<kShape>& staging,
                                                 int local, int offset) {
    std::uint32_t a[2][16];  // word i of a block: rows 0-7 and 8-15, column 4i + lane % 4
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = local + j * 128;
      Fragment h[2];
      staging.begin();
#pragma unroll
      for (int b = 0; b < 2; b++) {
        round_block<Element, BiasUse::kStaged>(h[b], acc + (2 * j + b) * 32, staging,
                                               column + b * 64);
        if (p.keep_h != 0) staging.write(b, h[b]);
#pragma unroll
        for (int i = 0; i < 8; i++) a[j][8 * b + i] = activated(p, h[b][2 * i], h[b][2 * i + 1]);
      }
      staging.publish();
      if (p.keep_h != 0 && staging.elected()) {
        store_ragged(p.h, staging.box(0), work.column + column, 0, work, offset);
        store_ragged(p.h, staging.box(1), work.column + column + 64, 0, work, offset);
        staging.commit();
      }
    }
    staging.begin();
#pragma unroll
    for (int j = 0; j < 2; j++) write(staging.box(j), a[j]);
    staging.publish();
    if (staging.elected()) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = (work.column + local) / 2 + j * 64;
        store_ragged(p.a, staging.box(j), column, 0, work, offset);
      }
      staging.commit();
    }
  }

  /// A of a gate and up in one row (low half of the result) and of one eight rows further (high).
  static __device__ __forceinline__ std::uint32_t activated(const Params& p, std::uint32_t first,
                                                            std::uint32_t second) {
    return Two::pack(Act::value(Two::low(first), Two::high(first), p.scalars),
                     Act::value(Two::low(second), Two::high(second), p.scalars));
  }

  /// A thread's columns are four apart, which stmatrix cannot place: elements one by one.
  static __device__ __forceinline__ void write(std::uint32_t box, const std::uint32_t (&a)[16]) {
    const int lane = threadIdx.x & 31;
    const int swizzle = lane >> 2;
    const std::uint32_t row =
        box + (((threadIdx.x >> 5) & 3) * 16 + swizzle) * 128 + (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const std::uint32_t at = row + (((i >> 1) ^ swizzle) << 4) + (i & 1) * 8;
      ptx::store_half_word(at, static_cast<std::uint16_t>(a[i]));
      ptx::store_half_word(at + 8 * 128, static_cast<std::uint16_t>(a[i] >> 16));
    }
  }
};

}  // namespace sonicmoe::cuda
