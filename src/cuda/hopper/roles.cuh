// The kernels by role: the producer, tile scheduler, epilogue and B source of each product.
//
//   | role      | producer    | scheduler       | epilogue              | B                      |
//   | up        | GatherRows  | RowTiles        | ActRows, ActPlainRows | W1: gate, up by halves |
//   | up paired | GatherRows  | RowTiles        | ActRows               | W1: gate, up alternate |
//   | down, dX~ | TmaRows     | GroupedRowTiles | StoreRows             | W2; gate, up along K   |
//   |   scaled  | TmaRows     | GroupedRowTiles | StoreRows, kWeights   | W2                     |
//   | gather    | GatherRows  | RowTiles        | StoreRows             | any matrices           |
//   |   scaled  | GatherRows  | RowTiles        | StoreRows, kWeights   | low-rank factors       |
//   | dH        | GatherRows  | SplitRowTiles   | ActGrad               | W2                     |
//   | dH paired | GatherRows  | SplitRowTiles   | ActGrad               | W2                     |
//   | dW        | GatherDepth | ExpertTiles     | StoreExpert           | rows in expert order   |
//
// The host passes a role's arguments as UpParams, DownParams, ... (params.h, "By role").
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
using UpKernel = std::conditional_t<
    is_gated(kKind),
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                      ActRows<Element, kKind, HLayout::kSplit>, BSource::kWeightHalves, kB>,
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles, ActPlainRows<Element, kKind>,
                      BSource::kWeights, kB>>;

/// UpKernel where gate and up alternate in W1 (which is then MN-major) and in H.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using UpPairedKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                      ActRows<Element, kKind, HLayout::kPaired>, BSource::kWeights, kB>;

/// Y = A W2^T.
template <class Element, TileShape kShape, Major kB>
using DownKernel = GroupedGemmKernel<Element, kShape, TmaRows, GroupedRowTiles, StoreRows<Element>,
                                     BSource::kWeightsAlongK, kB>;
/// DownKernel with each row scaled by its routing weight: the grouped form of routing.
template <class Element, TileShape kShape, Major kB>
using DownScaledKernel = GroupedGemmKernel<Element, kShape, TmaRows, GroupedRowTiles,
                                           StoreRows<Element, RowScale::kWeights, kShape.n / 64>,
                                           BSource::kWeightsAlongK, kB>;

/// D = A[gather] B^T: the public grouped GEMM.
template <class Element, TileShape kShape, Major kB>
using GatherStoreKernel = GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                                            StoreRows<Element>, BSource::kWeights, kB>;

/// GatherStoreKernel with each row scaled by a number: the inner products of low-rank factors.
template <class Element, TileShape kShape, Major kB>
using GatherStoreScaledKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, RowTiles,
                      StoreRows<Element, RowScale::kWeights, kShape.n / 64>, BSource::kWeights, kB>;

/// dH = act'(H) s dO[token] W2, with A' and dS.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using HiddenGradKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, SplitRowTiles,
                      ActGrad<Element, kKind, HLayout::kSplit>, BSource::kWeights, kB>;
/// HiddenGradKernel where gate and up alternate in H and dH.
template <class Element, TileShape kShape, ActivationKind kKind, Major kB>
using HiddenGradPairedKernel =
    GroupedGemmKernel<Element, kShape, GatherRows, SplitRowTiles,
                      ActGrad<Element, kKind, HLayout::kPaired>, BSource::kWeights, kB>;

/// dW = rows[token]^T grad, one matrix per expert. kOut is its contiguous dimension: N (kK) or M
/// (kMN).
template <class Element, TileShape kShape, Major kOut>
using WeightGradKernel = GroupedGemmKernel<Element, kShape, GatherDepth, ExpertTiles,
                                           StoreExpert<Element, kOut>, BSource::kRows, Major::kMN>;

}  // namespace sonicmoe::cuda
