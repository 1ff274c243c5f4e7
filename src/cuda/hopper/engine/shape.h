// The compile-time description of one grouped GEMM: tile, ring, cluster, schedule, operand forms.
// Plain C++: the host's tile table and the kernels share it.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// How the two consumer warpgroups share work: half a tile each, or whole tiles in turn, so that
/// one runs its epilogue under the other's products.
enum class Schedule : int { kCooperative = 0, kPingPong = 1 };

/// The contiguous dimension of an operand in memory.
enum class Major : int { kK = 0, kMN = 1 };

/// Where the N x K operand comes from.
enum class BSource : int {
  kWeights = 0,        ///< one tensor of expert matrices
  kWeightHalves = 1,   ///< columns [0, n/2) of a tile from the gate, the rest from up
  kWeightsInTurn = 2,  ///< K runs through the gate first, then through up (or one of them only)
  kRows = 3,           ///< grouped rows, which are K; MN-major
};

inline constexpr int kDepth = 64;  // K elements of a stage: one 128-byte swizzled row
inline constexpr int kElementBytes = 2;
inline constexpr int kBoxBytes = 64 * 64 * kElementBytes;  // a 64x64 store box
inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // consumer warpgroups
inline constexpr int kThreads = kWarpgroup * (1 + kConsumers);

struct TileShape {
  int m;        ///< rows of a CTA's tile
  int n;        ///< columns of B in a tile
  int stages;   ///< depth of the ring
  int cluster;  ///< CTAs along M that share B by multicast: 1 or 2
  int boxes;    ///< store boxes that each consumer warpgroup stages at once
  Schedule schedule;

  constexpr bool ping_pong() const { return schedule == Schedule::kPingPong; }
  constexpr int cluster_rows() const { return m * cluster; }
  constexpr int warpgroup_rows() const { return ping_pong() ? m : m / kConsumers; }
  constexpr int halves() const { return warpgroup_rows() / 64; }
  constexpr int a_bytes() const { return m * kDepth * kElementBytes; }
  constexpr int b_bytes() const { return n * kDepth * kElementBytes; }
  constexpr int bias_bytes() const { return n * kElementBytes; }
  constexpr int scale_bytes() const { return warpgroup_rows() * 4; }
  constexpr int staging_bytes() const { return kConsumers * boxes * kBoxBytes; }
};

/// MN-major B: the part of a 64-column group that one load brings, in k. Clusters split a stage by
/// groups where their number is even, else each CTA brings half the k of every group.
constexpr bool splits_by_group(const TileShape& s) { return (s.n / 64) % s.cluster == 0; }
constexpr int mn_box_depth(const TileShape& s) {
  return splits_by_group(s) ? kDepth : kDepth / s.cluster;
}

inline constexpr int kPlaceBytes = 16;  // where a warpgroup's unstored tile lies

/// Slots of tile numbers: two barriers and a word each.
inline constexpr int kSlots = 4;
inline constexpr int kSlotBytes = 2 * 8 + 4;

/// Registers that a launch gives to each of 384 threads: all there are, or what leaves room for a
/// block of 128 threads with 32 each beside them. ptxas needs 154 for a product of 256 columns.
inline constexpr int kLaunchRegisters = 168;
inline constexpr int kLaunchRegistersBeside = 160;
static_assert(kThreads * kLaunchRegistersBeside + 128 * 32 <= 65536);

/// Registers of a thread of the producer warpgroup and of the others. One of the former and two of
/// the latter share what three threads were launched with.
struct Registers {
  int producer;
  int consumer;
};

/// Dynamic shared memory of a CTA (SharedLayout, for the host).
constexpr int shared_bytes(const TileShape& s) {
  return s.stages * (s.a_bytes() + s.b_bytes() + 16) + s.staging_bytes() +
         kConsumers * (s.bias_bytes() + s.scale_bytes() + kPlaceBytes) + kSlots * kSlotBytes;
}

/// Shared memory of a CTA, offsets from a 1024-byte aligned base.
template <TileShape kShape>
struct SharedLayout {
  static constexpr int kA = 0;
  static constexpr int kB = kA + kShape.stages * kShape.a_bytes();
  static constexpr int kStaging = kB + kShape.stages * kShape.b_bytes();
  static constexpr int kBias = kStaging + kShape.staging_bytes();
  static constexpr int kScale = kBias + kConsumers * kShape.bias_bytes();
  static constexpr int kPlace = kScale + kConsumers * kShape.scale_bytes();
  static constexpr int kFull = kPlace + kConsumers * kPlaceBytes;
  static constexpr int kEmpty = kFull + kShape.stages * 8;
  static constexpr int kSlotFull = kEmpty + kShape.stages * 8;
  static constexpr int kSlotEmpty = kSlotFull + kSlots * 8;
  static constexpr int kSlotWords = kSlotEmpty + kSlots * 8;
  static constexpr int kEnd = kSlotWords + kSlots * 4;
  static_assert(kEnd == shared_bytes(kShape));
  static_assert(kEnd <= 232448, "more shared memory than a CTA of sm_90 has");
};

}  // namespace sonicmoe::cuda
