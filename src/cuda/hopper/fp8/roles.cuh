// The FP8 kernels and their parts: producer of A, tile order, epilogue, B.
//
//   | product | producer      | tile order      | epilogue   | B                         |
//   | H, A    | Fp8GatherRows | RowTiles        | Fp8Activate     | W1: gate and up by halves |
//   | Y       | Fp8TmaRows    | GroupedRowTiles | Fp8Store   | W2                        |
//   | dX~     | Fp8TmaRows    | GroupedRowTiles | Fp8Store   | W1 transposed: K is the n |
//   |         |               |                 |            | of gate, then the n of up |
//   | dH      | Fp8GatherRows | RowTiles        | Fp8ActivateGrad | W2 transposed             |
#pragma once

#include "cuda/hopper/engine/row_tiles.cuh"
#include "cuda/hopper/fp8/epilogues/activate.cuh"
#include "cuda/hopper/fp8/epilogues/activate_grad.cuh"
#include "cuda/hopper/fp8/epilogues/store.cuh"
#include "cuda/hopper/fp8/gather_rows.cuh"
#include "cuda/hopper/fp8/kernel.cuh"
#include "cuda/hopper/fp8/kernels.h"
#include "cuda/hopper/fp8/tma_rows.cuh"

namespace sonicmoe::cuda {

template <ActivationKind kKind>
using Fp8ActivateKernel =
    Fp8Gemm<Fp8GatherRows, RowTiles, Fp8Activate<kKind>,
            is_gated(kKind) ? BSource::kWeightHalves : BSource::kWeights, Fp8RegisterCodes>;

using Fp8StoreKernel =
    Fp8Gemm<Fp8TmaRows, GroupedRowTiles, Fp8Store, BSource::kWeights, Fp8SharedCodes<Fp8TmaRows>>;

template <ActivationKind kKind, Fp8KeptH kKept>
using Fp8ActivateGradKernel = Fp8Gemm<Fp8GatherRows, RowTiles, Fp8ActivateGrad<kKind, kKept>,
                                      BSource::kWeights, Fp8SharedCodes<Fp8GatherRows>>;

}  // namespace sonicmoe::cuda
