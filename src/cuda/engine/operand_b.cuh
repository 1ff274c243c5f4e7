// The N x K operand: TMA boxes, each CTA of a cluster bringing its share to all of them.
#pragma once

#include "cuda/engine/scheduler.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda {

/// Maps of the expert matrices: [0] alone, or gate and up. K-major: (k, n, expert), box 64 x n/2;
/// MN-major: (n, k, expert), box 64 x mn_box_depth. Rows: (column, part, row), box 64 x 1 x 64, of
/// which parts from `first_part` on are the operand.
struct OperandBMaps {
  CUtensorMap map[2];
  std::int32_t first_part;
};

template <TileShape kShape, BSource kSource, Major kMajor>
struct OperandB {
  static constexpr std::uint16_t kEveryCta = (1 << kShape.cluster) - 1;

  static __device__ __forceinline__ void box(const CUtensorMap* map, std::uint32_t target,
                                             ptx::Mbarrier full, ptx::Coord3 at) {
    if constexpr (kShape.cluster > 1) {
      ptx::tma_load_multicast(target, map, full, at, kEveryCta);
    } else {
      ptx::tma_load(target, map, full, at);
    }
  }

  /// Issues this CTA's share of k tile `kt`; `k_tiles` are those of one part of K.
  static __device__ __forceinline__ void load(const OperandBMaps& maps, const Work& work, int kt,
                                              int k_tiles, std::uint32_t target, ptx::Mbarrier full,
                                              int rank) {
    const int part = kSource == BSource::kWeightsInTurn && kt >= k_tiles ? 1 : 0;
    const int k = (kt - part * k_tiles) * kDepth;
    if constexpr (kSource == BSource::kRows) {
      constexpr int kMine = kShape.n / 64 / kShape.cluster;
      static_assert(kMajor == Major::kMN && kMine * 64 * kShape.cluster == kShape.n);
#pragma unroll
      for (int i = 0; i < kMine; i++) {
        const int group = rank * kMine + i;
        box(&maps.map[0], target + group * kBoxBytes, full,
            {work.column + group * 64, maps.first_part + work.part, work.row + k});
      }
    } else if constexpr (kMajor == Major::kK) {
#pragma unroll
      for (int i = 0; i < 2 / kShape.cluster; i++) {
        const int half = kShape.cluster > 1 ? rank : i;
        const bool halves = kSource == BSource::kWeightHalves;
        const int row = work.column + (halves ? 0 : half * (kShape.n / 2));
        box(&maps.map[halves ? half : part], target + half * (kShape.b_bytes() / 2), full,
            {k, row, work.expert});
      }
    } else {
      constexpr int kGroups = kShape.n / 64;
      constexpr bool kByGroup = splits_by_group(kShape);
      constexpr int kMine = kByGroup ? kGroups / kShape.cluster : kGroups;
#pragma unroll 1
      for (int i = 0; i < kMine; i++) {
        const int group = kByGroup ? rank * kMine + i : i;
        const int skip = kByGroup ? 0 : rank * mn_box_depth(kShape);
        const bool second = kSource == BSource::kWeightHalves && group >= kGroups / 2;
        const int column = work.column + (second ? group - kGroups / 2 : group) * 64;
        box(&maps.map[second ? 1 : part], target + group * kBoxBytes + skip * 128, full,
            {column, k + skip, work.expert});
      }
    }
  }
};

}  // namespace sonicmoe::cuda
