// Epilogue of the up projection without a gate: H = r(acc + b1), A = r(act(H)), 64 columns at a
// time, right after the tile's products. It is not deferred, because H and A of a whole tile would
// not fit in the registers that the next tile's products leave.
#pragma once

#include "cuda/hopper/epilogues/activate.cuh"

namespace sonicmoe::cuda {

template <class Element, ActivationKind kKind>
struct ActivatePlainRows {
  using Params = ActivateRowsParams;
  using Act = ActivationWords<Element, kKind>;
  struct State {};

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State&,
                                             float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                             const CtaTile& tile, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.boxes == 2 && kShape.row_blocks() == 1);
    if (p.bias[0].data != nullptr) {
      stage_bias(staging, p.bias[0], tile.expert, tile.column, p.width, {0, 1, kShape.n});
      staging.sync();
    }
#pragma unroll
    for (int i = 0; i < kShape.n / 64; i++) {
      Fragment block;
      round_block<Element, BiasUse::kStaged>(block, acc[0] + i * 32, staging, i * 64);
      staging.begin();
      staging.write(0, block);
#pragma unroll
      for (int j = 0; j < 16; j += 4) {
#pragma unroll
        for (int c = j; c < j + 4; c++) block[c] = Act::plain(block[c]);
        staging.write_words(1, block, j);
      }
      staging.publish();
      if (staging.elected()) {
        const int column = tile.column + i * 64;
        if (p.keep_h != 0) store_ragged(p.h, staging.box(0), column, 0, tile, rows.offset);
        store_ragged(p.a, staging.box(1), column, 0, tile, rows.offset);
        staging.commit();
      }
    }
  }
};

}  // namespace sonicmoe::cuda
