// Loads operand B (N x K) by TMA, in boxes. Each CTA of a cluster loads its part of the boxes and
// multicasts it to both CTAs.
#pragma once

#include <type_traits>

#include "cuda/hopper/engine/tile.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

template <TileShape kShape, BSource kSource, Major kMajor,
          ColumnOrder kOrder = ColumnOrder::kAscending>
struct OperandB {
  static_assert(kSource != BSource::kRows || kMajor == Major::kMN);
  static_assert(kOrder == ColumnOrder::kAscending || kMajor == Major::kK);
  static constexpr int kGroups = kShape.n / 64;
  static constexpr bool kByGroup = kMajor == Major::kK || splits_by_group(kShape);
  /// Boxes of a stage that one CTA loads.
  static constexpr int kBoxesPerCta =
      kMajor == Major::kK ? 2 / kShape.cluster : (kByGroup ? kGroups / kShape.cluster : kGroups);
  static constexpr std::uint16_t kEveryCta = (1 << kShape.cluster) - 1;

  /// Loads k tile `kt` of B: this CTA's part of the boxes into the stages of both CTAs, or with
  /// own_b all boxes into its own stage. `part`: of K, with kWeightsAlongK; `kt` counts within it.
  static __device__ __forceinline__ void load(const OperandBMaps& maps, const CtaTile& tile, int kt,
                                              int part, std::uint32_t target, ptx::Mbarrier full,
                                              int rank) {
    const int k = kt * kDepth;
    if (kShape.cluster > 1 && !tile.own_b) {
      for_each_box(maps, tile, part, k, rank, [&](const Box& box) {
        ptx::tma_load_multicast(target + box.offset, box.map, full, box.at, kEveryCta);
      });
      return;
    }
#pragma unroll 1
    for (int cta = 0; cta < kShape.cluster; cta++) {
      for_each_box(maps, tile, part, k, cta, [&](const Box& box) {
        ptx::tma_load(target + box.offset, box.map, full, box.at);
      });
    }
  }

 private:
  using Coordinates = std::conditional_t<kOrder == ColumnOrder::kByLane, ptx::Coord5, ptx::Coord3>;
  struct Box {
    const CUtensorMap* map;
    int offset;  ///< in the stage
    Coordinates at;
  };

  /// Where a box of K-major weights begins: at element k of column `row` of the tile's expert.
  static __device__ __forceinline__ Coordinates weights_at(const OperandBMaps& maps,
                                                           const CtaTile& tile, int k, int row) {
    if constexpr (kOrder == ColumnOrder::kByLane) {
      return {k, 0, 0, 0, tile.expert * maps.expert_groups + row / 32};
    } else {
      return {k, row, tile.expert};
    }
  }

  /// Calls issue(box) for each box that CTA `cta` of a cluster loads. Unrolled, because one thread
  /// issues them all.
  template <class F>
  static __device__ __forceinline__ void for_each_box(const OperandBMaps& maps, const CtaTile& tile,
                                                      int part, int k, int cta, F issue) {
#pragma unroll
    for (int i = 0; i < kBoxesPerCta; i++) {
      const int group = kByGroup ? cta * kBoxesPerCta + i : i;
      if constexpr (kSource == BSource::kRows) {
        const int skip = kByGroup ? 0 : cta * mn_box_depth(kShape);
        issue(Box{&maps.map[0],
                  group * kBoxBytes + skip * 128,
                  {tile.column + group * 64, maps.part, tile.row + k + skip}});
      } else if constexpr (kMajor == Major::kK) {
        constexpr bool kHalves = kSource == BSource::kWeightHalves;
        const int row = tile.column + (kHalves ? 0 : group * (kShape.n / 2));
        issue(Box{&maps.map[kHalves ? group : part], group * (kShape.b_bytes() / 2),
                  weights_at(maps, tile, k, row)});
      } else {
        const int skip = kByGroup ? 0 : cta * mn_box_depth(kShape);
        const bool second = kSource == BSource::kWeightHalves && group >= kGroups / 2;
        const int column = tile.column + (second ? group - kGroups / 2 : group) * 64;
        issue(Box{&maps.map[second ? 1 : part],
                  group * kBoxBytes + skip * 128,
                  {column, k + skip, tile.expert}});
      }
    }
  }
};

}  // namespace sonicmoe::cuda
