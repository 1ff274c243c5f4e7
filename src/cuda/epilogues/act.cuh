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
    if (p.bias[0].data == nullptr) {
      round_and_act<BiasUse::kNone>(p, acc, work, staging, rows);
      return;
    }
    stage_bias(staging, p.bias[0], work.expert, work.column, p.width, 0, kColumns<kShape>);
    if constexpr (is_gated(kKind)) {
      stage_bias(staging, p.bias[1], work.expert, work.column, p.width, kColumns<kShape>,
                 kColumns<kShape>);
    }
    staging.sync();
    round_and_act<BiasUse::kStaged>(p, acc, work, staging, rows);
  }

 private:
  /// Columns of A in a tile.
  template <TileShape kShape>
  static constexpr int kColumns = kShape.n / (is_gated(kKind) ? 2 : 1);

  template <BiasUse kBias, TileShape kShape>
  static __device__ __forceinline__ void round_and_act(const Params& p,
                                                       float (&acc)[kShape.halves()][kShape.n / 2],
                                                       const Work& work,
                                                       const Staging<kShape>& staging, Rows rows) {
    constexpr int kAcross = kColumns<kShape> / 64;
#pragma unroll
    for (int half = 0; half < kShape.halves(); half++) {
      if (half >= rows.halves) break;
      const int offset = rows.offset + half * 64;
      if constexpr (is_gated(kKind)) {
        static_assert(kAcross % 2 == 0);
#pragma unroll
        for (int pair = 0; pair < kAcross; pair += 2) {
          const float* gate = &acc[half][pair * 32];
          gated_pair<kBias>(p, gate, work, staging, pair * 64, offset);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kAcross; j++) {
          plain<kBias>(p, &acc[half][j * 32], work, staging, j * 64, offset);
        }
      }
    }
  }

  static __device__ __forceinline__ void activate(Fragment& a, const Fragment (&h)[2],
                                                  const Params& p) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      a[i] = Two::pack(Act::value(Two::low(h[0][i]), Two::low(h[1][i]), p.scalars),
                       Act::value(Two::high(h[0][i]), Two::high(h[1][i]), p.scalars));
    }
  }

  /// Whether a block is activated after its H is on its way, so that the boxes drain under the
  /// arithmetic (2 % at d = 768). The others would spill registers that way.
  static constexpr bool kActivateLate =
      kKind == ActivationKind::kSwiGLU || kKind == ActivationKind::kReGLU;

  /// Two column blocks through two boxes: (gate, up) of each, then both blocks of A.
  template <BiasUse kBias, TileShape kShape>
  static __device__ __forceinline__ void gated_pair(const Params& p, const float* gate,
                                                    const Work& work,
                                                    const Staging<kShape>& staging, int local,
                                                    int offset) {
    const int column = work.column + local;
    Fragment a[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      Fragment h[2];
      if (kActivateLate && p.keep_h != 0) staging.begin();
      round_block<Element, kBias>(h[0], gate + j * 32, staging, local + j * 64);
      round_block<Element, kBias>(h[1], gate + j * 32 + kShape.n / 4, staging,
                                  local + j * 64 + kShape.n / 2);
      if constexpr (!kActivateLate) activate(a[j], h, p);
      if (p.keep_h != 0) {
        if constexpr (!kActivateLate) staging.begin();
        write_pair(staging, h);
        if (staging.elected()) {
          store_ragged(p.h, staging.box(0), column + j * 64, 0, work, offset);
          store_ragged(p.h, staging.box(1), column + j * 64, 1, work, offset);
          staging.commit();
        }
      }
      if constexpr (kActivateLate) activate(a[j], h, p);
    }
    staging.begin();
    write_pair(staging, a);
    if (staging.elected()) {
      store_ragged(p.a, staging.box(0), column, 0, work, offset);
      store_ragged(p.a, staging.box(1), column + 64, 0, work, offset);
      staging.commit();
    }
  }

  /// One column block without a gate: H and A through the staging together.
  template <BiasUse kBias, TileShape kShape>
  static __device__ __forceinline__ void plain(const Params& p, const float* acc, const Work& work,
                                               const Staging<kShape>& staging, int local,
                                               int offset) {
    const int column = work.column + local;
    Fragment h;
    round_block<Element, kBias>(h, acc, staging, local);
    staging.begin();
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
  static __device__ __forceinline__ void write_pair(const Staging<kShape>& staging,
                                                    const Fragment (&blocks)[2]) {
    staging.write(0, blocks[0]);
    staging.write(1, blocks[1]);
    staging.publish();
  }
};

}  // namespace sonicmoe::cuda
