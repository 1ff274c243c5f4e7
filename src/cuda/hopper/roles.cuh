// The kernels by role: the producer, tile scheduler, epilogue and B source of each product.
//
//   | role           | producer    | scheduler       | epilogue             | B | | activate |
//   GatherRows  | RowTiles        | ActivateRows,        | W1: gate, up by halves | | | | |
//   ActivatePlainRows    |                        | |   interleaved  | GatherRows  | RowTiles |
//   ActivateRows         | W1: gate, up alternate | | store (Y, dX~) | TmaRows     |
//   GroupedRowTiles | StoreRows            | W2; gate, up along K   | |   scaled       | TmaRows |
//   GroupedRowTiles | StoreRows, kWeights  | W2                     | | gathered store | GatherRows
//   | RowTiles        | StoreRows            | any matrices           | |   scaled       |
//   GatherRows  | RowTiles        | StoreRows, kWeights  | low-rank factors       | | activate grad
//   | GatherRows  | SplitRowTiles   | ActivateGradRows     | W2                     | | interleaved
//   | GatherRows  | SplitRowTiles   | ActivateGradRows     | W2                     | | store
//   expert   | GatherDepth | ExpertTiles     | StoreExpert          | rows in expert order   |
//
// The host passes the arguments as ActivateGemmParams, StoreGemmParams, ... (params.h, "By role").
#pragma once

#include "cuda/hopper/engine/expert_tiles.cuh"
#include "cuda/hopper/engine/kernel.cuh"
#include "cuda/hopper/engine/row_tiles.cuh"
#include "cuda/hopper/epilogues/activate.cuh"
#include "cuda/hopper/epilogues/activate_grad.cuh"
#include "cuda/hopper/epilogues/activate_plain.cuh"
#include "cuda/hopper/epilogues/store.cuh"
#include "cuda/hopper/epilogues/store_expert.cuh"
#include "cuda/hopper/kernels.h"
#include "cuda/hopper/producers/gather_depth.cuh"
#include "cuda/hopper/producers/gather_rows.cuh"
#include "cuda/hopper/producers/tma_rows.cuh"

namespace sonicmoe::cuda {

/// H = X[token] W1^T, A = act(H).
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using ActivateKernel =
    std::conditional_t<is_gated(kKind),
                       GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                                         ActivateRows<Element, kKind, GateLayout::kConcatenated>,
                                         BSource::kWeightHalves, kB>,
                       GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                                         ActivatePlainRows<Element, kKind>, BSource::kWeights, kB>>;

/// ActivateKernel where gate and up alternate in W1 (which is then MN-major) and in H.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using ActivateInterleavedKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                      ActivateRows<Element, kKind, GateLayout::kInterleaved>, BSource::kWeights,
                      kB>;

/// Y = A W2^T.
template <class Element, TileShape kShape, Major kB>
using StoreKernel = GroupedGemmKernel<Element, kShape, TmaRows, GroupedRowTiles, StoreRows<Element>,
                                      BSource::kWeightsAlongK, kB>;
/// StoreKernel with each row scaled by its routing weight: the grouped form of routing.
template <class Element, TileShape kShape, Major kB>
using StoreScaledKernel = GroupedGemmKernel<Element, kShape, TmaRows, GroupedRowTiles,
                                            StoreRows<Element, RowScale::kWeights, kShape.n / 64>,
                                            BSource::kWeightsAlongK, kB>;

/// D = A[gather] B^T: the public grouped GEMM.
template <class Element, TileShape kShape, Major kB>
using GatheredStoreKernel = GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                                              StoreRows<Element>, BSource::kWeights, kB>;

/// GatheredStoreKernel with each row scaled by a number: the inner products of low-rank factors.
template <class Element, TileShape kShape, Major kB>
using GatheredStoreScaledKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                      StoreRows<Element, RowScale::kWeights, kShape.n / 64>, BSource::kWeights, kB>;

/// dH = act'(H) s dO[token] W2, with A' and dS.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using ActivateGradKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, SplitRowTiles,
                      ActivateGradRows<Element, kKind, GateLayout::kConcatenated>,
                      BSource::kWeights, kB>;
/// ActivateGradKernel where gate and up alternate in H and dH.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using ActivateGradInterleavedKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, SplitRowTiles,
                      ActivateGradRows<Element, kKind, GateLayout::kInterleaved>, BSource::kWeights,
                      kB>;

/// dW = rows[token]^T grad, one matrix per expert. kOut is its contiguous dimension: N (kK) or M
/// (kMN).
template <class Element, TileShape kShape, Major kOut>
using StoreExpertKernel = GroupedGemmKernel<Element, kShape, GatherDepth, ExpertTiles,
                                            StoreExpert<Element, kOut>, BSource::kRows, Major::kMN>;

}  // namespace sonicmoe::cuda
