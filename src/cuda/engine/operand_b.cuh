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
  static_assert(kSource != BSource::kRows || kMajor == Major::kMN);
  static constexpr int kGroups = kShape.n / 64;
  /// Boxes of a stage. Those from rank * kShared on are what a CTA brings to its cluster.
  static constexpr int kBoxes =
      kMajor == Major::kK ? 2 : (splits_by_group(kShape) ? kGroups : kGroups * kShape.cluster);
  static constexpr int kShared = kBoxes / kShape.cluster;
  static constexpr std::uint16_t kEveryCta = (1 << kShape.cluster) - 1;

  /// Issues this CTA's share of k tile `kt`, or all of it where the CTA is alone; `k_tiles` are
  /// those of one part of K.
  static __device__ __forceinline__ void load(const OperandBMaps& maps, const Work& work, int kt,
                                              int k_tiles, std::uint32_t target, ptx::Mbarrier full,
                                              int rank) {
    const int part = kSource == BSource::kWeightsInTurn && kt >= k_tiles ? 1 : 0;
    const int k = (kt - part * k_tiles) * kDepth;
    const bool alone = kShape.cluster == 1 || work.alone;
    const int first = alone ? 0 : rank * kShared;
#pragma unroll 1
    for (int i = first; i < first + (alone ? kBoxes : kShared); i++) {
      const Box box = box_at(maps, work, part, k, i);
      if (alone) {
        ptx::tma_load(target + box.offset, box.map, full, box.at);
      } else {
        ptx::tma_load_multicast(target + box.offset, box.map, full, box.at, kEveryCta);
      }
    }
  }

 private:
  struct Box {
    const CUtensorMap* map;
    int offset;  ///< in the stage
    ptx::Coord3 at;
  };

  static __device__ __forceinline__ Box box_at(const OperandBMaps& maps, const Work& work, int part,
                                               int k, int i) {
    if constexpr (kSource == BSource::kRows) {
      return {&maps.map[0],
              i * kBoxBytes,
              {work.column + i * 64, maps.first_part + work.part, work.row + k}};
    } else if constexpr (kMajor == Major::kK) {
      constexpr bool kHalves = kSource == BSource::kWeightHalves;
      const int row = work.column + (kHalves ? 0 : i * (kShape.n / 2));
      return {&maps.map[kHalves ? i : part], i * (kShape.b_bytes() / 2), {k, row, work.expert}};
    } else {
      const int group = i % kGroups;
      const int skip = i / kGroups * mn_box_depth(kShape);
      const bool second = kSource == BSource::kWeightHalves && group >= kGroups / 2;
      const int column = work.column + (second ? group - kGroups / 2 : group) * 64;
      return {&maps.map[second ? 1 : part],
              group * kBoxBytes + skip * 128,
              {column, k + skip, work.expert}};
    }
  }
};

}  // namespace sonicmoe::cuda
