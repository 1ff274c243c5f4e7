// The N x K operand: TMA boxes, each CTA of a cluster bringing its share to all of them.
#pragma once

#include "cuda/hopper/engine/scheduler.cuh"
#include "cuda/hopper/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// Maps of the expert matrices: [0] alone, or gate and up. K-major: (k, n, expert), box 64 x n/2;
/// MN-major: (n, k, expert), box 64 x mn_box_depth. Rows: (column, part, row), box 64 x 1 x 64, of
/// which `part` is the operand.
struct OperandBMaps {
  CUtensorMap map[2];
  std::int32_t part;
};

template <TileShape kShape, BSource kSource, Major kMajor>
struct OperandB {
  static_assert(kSource != BSource::kRows || kMajor == Major::kMN);
  static constexpr int kGroups = kShape.n / 64;
  static constexpr bool kByGroup = kMajor == Major::kK || splits_by_group(kShape);
  /// Boxes that a CTA brings of every stage.
  static constexpr int kShare =
      kMajor == Major::kK ? 2 / kShape.cluster : (kByGroup ? kGroups / kShape.cluster : kGroups);
  static constexpr std::uint16_t kEveryCta = (1 << kShape.cluster) - 1;

  /// Issues this CTA's share of k tile `kt`, or all of it where the CTA is alone; `k_tiles` are
  /// those of one part of K.
  static __device__ __forceinline__ void load(const OperandBMaps& maps, const Work& work, int kt,
                                              int k_tiles, std::uint32_t target, ptx::Mbarrier full,
                                              int rank) {
    const int part = kSource == BSource::kWeightsInTurn && kt >= k_tiles ? 1 : 0;
    const int k = (kt - part * k_tiles) * kDepth;
    if (kShape.cluster > 1 && !work.alone) {
      for_each_box(maps, work, part, k, rank, [&](const Box& box) {
        ptx::tma_load_multicast(target + box.offset, box.map, full, box.at, kEveryCta);
      });
      return;
    }
#pragma unroll 1
    for (int share = 0; share < kShape.cluster; share++) {
      for_each_box(maps, work, part, k, share, [&](const Box& box) {
        ptx::tma_load(target + box.offset, box.map, full, box.at);
      });
    }
  }

 private:
  struct Box {
    const CUtensorMap* map;
    int offset;  ///< in the stage
    ptx::Coord3 at;
  };

  /// The boxes that CTA `share` of a cluster brings. Unrolled, because one thread issues them all.
  template <class F>
  static __device__ __forceinline__ void for_each_box(const OperandBMaps& maps, const Work& work,
                                                      int part, int k, int share, F issue) {
#pragma unroll
    for (int i = 0; i < kShare; i++) {
      const int group = kByGroup ? share * kShare + i : i;
      if constexpr (kSource == BSource::kRows) {
        issue(Box{
            &maps.map[0], group * kBoxBytes, {work.column + group * 64, maps.part, work.row + k}});
      } else if constexpr (kMajor == Major::kK) {
        constexpr bool kHalves = kSource == BSource::kWeightHalves;
        const int row = work.column + (kHalves ? 0 : group * (kShape.n / 2));
        issue(Box{&maps.map[kHalves ? group : part],
                  group * (kShape.b_bytes() / 2),
                  {k, row, work.expert}});
      } else {
        const int skip = kByGroup ? 0 : share * mn_box_depth(kShape);
        const bool second = kSource == BSource::kWeightHalves && group >= kGroups / 2;
        const int column = work.column + (second ? group - kGroups / 2 : group) * 64;
        issue(Box{&maps.map[second ? 1 : part],
                  group * kBoxBytes + skip * 128,
                  {column, k + skip, work.expert}});
      }
    }
  }
};

}  // namespace sonicmoe::cuda
