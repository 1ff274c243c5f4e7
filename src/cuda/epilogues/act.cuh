// Epilogue of the up projection: H = r(acc + b1), A = r(act(H)) from the rounded H. Inference
// leaves H out. Gate and up of one column lie in one thread, half the accumulator apart.
#pragma once

#include "cuda/epilogues/activation.cuh"
#include "cuda/epilogues/store.cuh"

namespace sonicmoe::cuda {

struct ActRowsParams {
  RaggedMap h;  ///< (column, part, row, base): part 0 is the gate (or the only one), part 1 up
  RaggedMap a;
  Bias bias[2];  ///< gate, up; without a gate [0] alone
  ActivationScalars scalars;
  std::int32_t width;   ///< n
  std::int32_t keep_h;  ///< 0: inference
};

template <class Element, ActivationKind kKind>
struct ActRows {
  using Params = ActRowsParams;
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
    static_assert(kShape.boxes == 2);
    constexpr int kAcross = kShape.n / 64 / (is_gated(kKind) ? 2 : 1);
    static_assert(!is_gated(kKind) || kAcross % 2 == 0);
    if (p.bias[0].data != nullptr) {
      constexpr int kColumns = kAcross * 64;
      stage_bias(staging, p.bias[0], work.expert, work.column, p.width, 0, kColumns);
      if constexpr (is_gated(kKind)) {
        stage_bias(staging, p.bias[1], work.expert, work.column, p.width, kColumns, kColumns);
      }
      staging.sync();
    }
#pragma unroll
    for (int half = 0; half < kShape.halves(); half++) {
      if (half >= rows.halves) break;
      if constexpr (is_gated(kKind)) {
#pragma unroll
        for (int pair = 0; pair < kAcross; pair += 2) {
          const float* gate = &acc[half][pair * 32];
          gated(p, gate, gate + kAcross * 32, work, staging, work.column + pair * 64,
                rows.offset + half * 64);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kAcross; j++) {
          plain(p, &acc[half][j * 32], work, staging, work.column + j * 64,
                rows.offset + half * 64);
        }
      }
    }
  }

 private:
  /// Two column blocks: (gate, up) of each through the staging, then both blocks of A.
  template <TileShape kShape>
  static __device__ __forceinline__ void gated(const Params& p, const float* gate, const float* up,
                                               const Work& work, const Staging<kShape>& staging,
                                               int column, int offset) {
    Fragment a[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int at = column + j * 64;
      Fragment h[2];
      const int local = at - work.column;
      round_block<Element>(h[0], gate + j * 32, staging, local);
      round_block<Element>(h[1], up + j * 32, staging, local + kShape.n / 2);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        a[j][i] = Two::pack(Act::value(Two::low(h[0][i]), Two::low(h[1][i]), p.scalars),
                            Act::value(Two::high(h[0][i]), Two::high(h[1][i]), p.scalars));
      }
      if (p.keep_h != 0) {
        stage(staging, h);
        if (staging.elected()) {
          store_ragged(p.h, staging.box(0), at, 0, work, offset);
          store_ragged(p.h, staging.box(1), at, 1, work, offset);
          staging.commit();
        }
      }
    }
    store_pair(p.a, a, work, staging, column, offset);
  }

  /// One column block: H and A through the staging together.
  template <TileShape kShape>
  static __device__ __forceinline__ void plain(const Params& p, const float* acc, const Work& work,
                                               const Staging<kShape>& staging, int column,
                                               int offset) {
    Fragment h;
    staging.begin();
    round_block<Element>(h, acc, staging, column - work.column);
    staging.write(0, h);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      h[i] = Two::pack(Act::value(Two::low(h[i])), Act::value(Two::high(h[i])));
    }
    staging.write(1, h);
    staging.publish();
    if (staging.elected()) {
      if (p.keep_h != 0) store_ragged(p.h, staging.box(0), column, 0, work, offset);
      store_ragged(p.a, staging.box(1), column, 0, work, offset);
      staging.commit();
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void stage(const Staging<kShape>& staging,
                                               const Fragment (&blocks)[2]) {
    staging.begin();
    staging.write(0, blocks[0]);
    staging.write(1, blocks[1]);
    staging.publish();
  }

  /// Two neighbouring 64-column blocks of one matrix.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_pair(const RaggedMap& to,
                                                    const Fragment (&blocks)[2], const Work& work,
                                                    const Staging<kShape>& staging, int column,
                                                    int offset) {
    stage(staging, blocks);
    if (staging.elected()) {
      store_ragged(to, staging.box(0), column, 0, work, offset);
      store_ragged(to, staging.box(1), column + 64, 0, work, offset);
      staging.commit();
    }
  }
};

}  // namespace sonicmoe::cuda
