// The compile-time description of a grouped GEMM kernel: tile, pipeline, cluster, operand layouts,
// shared memory. Plain C++: the host's tile table and the kernels share it.
#pragma once

#include <cstdint>

#include "cuda/math/column_order.h"
#include "cuda/math/layouts.h"

namespace sonicmoe::cuda {

/// How the two consumer warpgroups divide the tiles.
enum class Schedule : int {
  kCooperative = 0,  ///< each computes half of the rows of every tile
  kPingPong = 1,     ///< each computes every second tile, and runs its epilogue under the products
                     ///< of the other
};

/// Where the N x K operand comes from.
enum class BSource : int {
  kWeights = 0,        ///< one tensor of expert matrices
  kWeightHalves = 1,   ///< columns [0, n/2) of a tile from the gate, the others from up
  kWeightsAlongK = 2,  ///< K runs through one tensor, then through a second one if there is one
  kRows = 3,           ///< rows in expert order, whose number is K; MN-major
};

inline constexpr int kDepth = 64;  // K elements of a stage: one 128-byte swizzled row
inline constexpr int kElementBytes = 2;
inline constexpr int kBoxBytes = 64 * 64 * kElementBytes;  // a store box of 64 x 64 elements
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // consumer warpgroups
inline constexpr int kThreads = kWarpgroup * (1 + kConsumers);

struct TileShape {
  int m;        ///< rows of a CTA's tile
  int n;        ///< columns of B in a tile
  int stages;   ///< of the operand pipeline
  int cluster;  ///< CTAs along M that share B by multicast: 1 or 2
  int boxes;    ///< store boxes that each consumer warpgroup has
  Schedule schedule;

  constexpr bool ping_pong() const { return schedule == Schedule::kPingPong; }
  constexpr int cluster_rows() const { return m * cluster; }
  constexpr int warpgroup_rows() const { return ping_pong() ? m : m / kConsumers; }
  /// Blocks of 64 rows (M of one wgmma) that a warpgroup computes.
  constexpr int row_blocks() const { return warpgroup_rows() / 64; }
  constexpr int a_bytes() const { return m * kDepth * kElementBytes; }
  constexpr int b_bytes() const { return n * kDepth * kElementBytes; }
  constexpr int bias_bytes() const { return n * kElementBytes; }
  constexpr int scale_bytes() const { return warpgroup_rows() * 4; }
  constexpr int staging_bytes() const { return kConsumers * boxes * kBoxBytes; }
};

/// MN-major B is loaded in boxes of 64 columns by mn_box_depth() elements of K. The CTAs of a
/// cluster divide the loads of a stage: if the number of column groups (64 columns each) is a
/// multiple of the cluster size, each CTA loads its part of the groups. Else each CTA loads its
/// part of K of every group.
constexpr bool splits_by_group(const TileShape& s) { return (s.n / 64) % s.cluster == 0; }
constexpr int mn_box_depth(const TileShape& s) {
  return splits_by_group(s) ? kDepth : kDepth / s.cluster;
}

/// Bytes of shared memory in which a consumer warpgroup keeps a tile's expert and origin until the
/// tile's epilogue is finished (Staging::save_expert, save_origin).
inline constexpr int kSavedTileBytes = 16;

/// Entries of the tile index queue (tile_queue.cuh): two mbarriers and a 4-byte index each.
inline constexpr int kQueueEntries = 4;
inline constexpr int kQueueEntryBytes = 2 * 8 + 4;

/// Registers of each of the 384 threads at launch: all that a multiprocessor has, or
/// (kLaunchRegistersCoresident) few enough that a block of 128 threads with 32 registers runs on
/// the same multiprocessor (sums/). ptxas needs at least 154 for products of 256 columns.
inline constexpr int kLaunchRegisters = 168;
inline constexpr int kLaunchRegistersCoresident = 160;
static_assert(kThreads * kLaunchRegistersCoresident + 128 * 32 <= 65536);

/// Registers of a thread after setmaxnreg: in the producer and in each consumer warpgroup. The sum
/// of the three warpgroups may not exceed their sum at launch: else setmaxnreg.inc would wait for
/// ever.
struct Registers {
  int producer;
  int consumer;
};

/// Dynamic shared memory of a CTA: the size of SharedLayout, for the host.
constexpr int shared_bytes(const TileShape& s) {
  return s.stages * (s.a_bytes() + s.b_bytes() + 16) + s.staging_bytes() +
         kConsumers * (s.bias_bytes() + s.scale_bytes() + kSavedTileBytes) +
         kQueueEntries * kQueueEntryBytes;
}

/// Shared memory of a CTA: offsets from a 1024-byte aligned base.
template <TileShape kShape>
struct SharedLayout {
  static constexpr int kA = 0;
  static constexpr int kB = kA + kShape.stages * kShape.a_bytes();
  static constexpr int kStaging = kB + kShape.stages * kShape.b_bytes();
  static constexpr int kBias = kStaging + kShape.staging_bytes();
  static constexpr int kScale = kBias + kConsumers * kShape.bias_bytes();
  static constexpr int kSavedTile = kScale + kConsumers * kShape.scale_bytes();
  static constexpr int kFull = kSavedTile + kConsumers * kSavedTileBytes;
  static constexpr int kEmpty = kFull + kShape.stages * 8;
  static constexpr int kQueueFull = kEmpty + kShape.stages * 8;
  static constexpr int kQueueEmpty = kQueueFull + kQueueEntries * 8;
  static constexpr int kQueueIndex = kQueueEmpty + kQueueEntries * 8;
  static constexpr int kEnd = kQueueIndex + kQueueEntries * 4;
  static_assert(kEnd == shared_bytes(kShape));
  static_assert(kEnd <= 232448, "more shared memory than a CTA of sm_90 has");
};

}  // namespace sonicmoe::cuda
