// The tile of a pair of CTAs and its shared memory, for host and device.
//
// A pair computes 256 rows of one expert by 256 columns. A CTA has half of the rows of A and of D,
// and half of the columns of B. If the expert has at most 128 rows left, the tile has 128 rows.
#pragma once

#include <cstdint>

#include "cuda/metadata/tile_record.h"

namespace sonicmoe::cuda::blackwell {

inline constexpr int kCtas = 2;           ///< of a pair, which is a cluster
inline constexpr int kTileColumns = 256;  ///< of D
inline constexpr int kCtaRows = 128;      ///< of a tile of 256 rows
inline constexpr int kTailRows = 64;      ///< of a CTA in a tile of 128 rows
static_assert(kCtas * kTailRows == kRecordRows && kCtas * kCtaRows == 2 * kRecordRows);

/// Elements of K in a stage: 128 bytes, the width of the swizzle.
inline constexpr int kDepth = 64;
inline constexpr int kElementBytes = 2;
inline constexpr int kLineBytes = kDepth * kElementBytes;
/// A box of B: 64 columns by 64 of K, in either order.
inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxBytes = kBoxColumns * kLineBytes;

/// A stage of a CTA: 128 rows of A, then two boxes of B.
inline constexpr int kStageBytesA = kCtaRows * kLineBytes;
inline constexpr int kStageBytes = kStageBytesA + 2 * kBoxBytes;
inline constexpr int kStages = 6;

/// Columns of tensor memory: two accumulators. While the epilogue reads one, products write the
/// other.
inline constexpr int kAccumulators = 2;
inline constexpr int kTensorColumns = kAccumulators * kTileColumns;

/// Columns of D that an epilogue reads at once.
inline constexpr int kPiece = 32;

// Warps of a CTA by role. Products of codes have the scale warp too.
inline constexpr int kEpilogueWarps = 4;  ///< 0 to 3: each reads its quarter of tensor memory
inline constexpr int kProductWarp = 4;
inline constexpr int kColumnWarp = 5;  ///< loads B
inline constexpr int kRowWarps = 4;    ///< 6 to 9: load A
inline constexpr int kFirstRowWarp = 6;
inline constexpr int kThreads = (kFirstRowWarp + kRowWarps) * 32;
inline constexpr int kScaleWarp = kFirstRowWarp + kRowWarps;
inline constexpr int kCodesThreads = kThreads + 32;

/// Rows that one load of A gathers, and lanes of a row warp that load.
inline constexpr int kGatheredRows = 4;
inline constexpr int kLoadingLanes = kCtaRows / kRowWarps / kGatheredRows;

/// Entries of the queue of tile indices: by so many tiles the scheduler is ahead of the slowest
/// reader.
inline constexpr int kQueueEntries = 4;
/// Of both CTAs: the epilogue warps, the warps that load, and the thread that multiplies.
inline constexpr int kQueueReaders = kCtas * (kEpilogueWarps + 1 + kRowWarps) + 1;

/// Shared memory of a CTA, in this order: stages, staging buffers of the epilogue warps, barriers,
/// queue of tile indices.
inline constexpr int kStagingBytes = 32 * kPiece * kElementBytes;
inline constexpr int kStagingBuffers = 3;  ///< of a warp
inline constexpr int kStagingAt = kStages * kStageBytes;
inline constexpr int kBarriersAt = kStagingAt + kEpilogueWarps * kStagingBuffers * kStagingBytes;
inline constexpr int kBarriers = 2 * kStages + 2 * kAccumulators + 2 * kQueueEntries;
inline constexpr int kQueueAt = kBarriersAt + kBarriers * 8;
inline constexpr int kTensorSlotAt = kQueueAt + kQueueEntries * 4;
inline constexpr int kSharedBytes = kTensorSlotAt + 8;
static_assert(kSharedBytes <= 227 * 1024);
/// A CTA without dynamic shared memory (a sum) must fit beside a CTA of a weight gradient. The
/// hardware reserves 1 KB for each CTA.
static_assert(kSharedBytes + 2 * 1024 <= 228 * 1024);

// Products of codes (Precision::kFp8). They count two codes as one element: a k tile has 128 codes
// of each row, and one scale, as many as fp8::kBlock. All tiles have 256 rows.

/// The scales of 128 rows of A or columns of B, as tcgen05.cp copies them from shared memory.
inline constexpr int kChunkRows = 128;
inline constexpr int kChunkBytes = 512;
inline constexpr int kChunkColumns = 4;  ///< of tensor memory
/// Of a stage: a chunk of this CTA's rows, then two of the columns of both CTAs.
inline constexpr int kStageChunks = 3;
inline constexpr int kChunksAt = (kSharedBytes + 127) / 128 * 128;
inline constexpr int kCodesSharedBytes = kChunksAt + kStages * kStageChunks * kChunkBytes;
static_assert(kCodesSharedBytes <= 227 * 1024);

/// Tensor memory has one accumulator, then the scales of each stage. Two accumulators of 256
/// columns would leave no column to the scales, and tiles of 192 columns would divide the blocks of
/// 128 that the epilogues quantise.
inline constexpr int kScalesColumn = kTileColumns;
inline constexpr int kStageScaleColumns = 16;
static_assert(kStageChunks * kChunkColumns <= kStageScaleColumns);
static_assert(kScalesColumn + kStages * kStageScaleColumns <= kTensorColumns);

}  // namespace sonicmoe::cuda::blackwell
