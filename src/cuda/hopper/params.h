// The arguments of Hopper's kernels. Plain C++: the host fills them, the kernels read them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/hopper/engine/shape.h"
#include "cuda/math/bias.h"
#include "cuda/math/scalars.h"
#include "cuda/metadata/row_arrivals.h"
#include "cuda/metadata/tile_record.h"

namespace sonicmoe::cuda {

// Producers and the weights.

struct GatherRowsParams {
  const void* source;         ///< (T, width) 16-bit elements
  const std::int32_t* index;  ///< row of `source` for row p in expert order; null: p
  std::int32_t row_bytes;     ///< stride of `source`, below 2 GiB
  std::int32_t width;         ///< K (GatherDepth: M), a multiple of 8
  RowArrivals arrivals;       ///< of `source`; GatherDepth: none
};

struct TmaRowsParams {
  CUtensorMap rows;  ///< (k, part, row), box 64 x 1 x tile rows; part is 0 unless K has two parts
};

/// The tensor maps of operand B: map[0] alone, or the maps of gate and up.
///
///   | operand            | dimensions           | box                   |
///   | weights, K-major   | (k, n, expert)       | 64 x n/2              |
///   | weights, MN-major  | (n, k, expert)       | 64 x mn_box_depth     |
///   | rows, expert order | (column, part, row)  | 64 x 1 x mn_box_depth |
///
/// Weights with ColumnOrder::kByLane: the columns of all experts form one sequence of groups of 32
/// columns. Column 8q + 2j + b of group g has the coordinates (b, q, j, g). The dimensions are
/// (k, b, q, j, g), and the box is 64 x 2 x 4 x 4 x n/64.
struct OperandBMaps {
  CUtensorMap map[2];
  std::int32_t part;           ///< of rows in expert order: 0 gate (or the only part), 1 up
  std::int32_t expert_groups;  ///< kByLane: the number of groups from one expert to the next
};

/// The last k tiles of a row product with a LowRankTerm: their A is rows in expert order, whatever
/// the producer. TMA fills the columns past r with zeros.
struct LowRankParams {
  TmaRowsParams inner;
  OperandBMaps outer;
};

// Tile schedulers.

/// A divisor that the host knows, with its inverse: kernels divide by a multiplication.
struct Divisor {
  std::uint32_t by;
  std::uint32_t inverse;  ///< 2^32 / by, rounded down; at most 2^32 - 1
};

/// Arguments of RowTiles: tiles of rows by columns.
struct RowTilesParams {
  const TileRecord* records;
  const std::int32_t* record_count;
  unsigned* tile_counter;         ///< dynamic scheduler: 0 before the launch; null: static order
  std::int32_t columns;           ///< N
  std::int32_t column_tiles;      ///< tiles along N
  std::int32_t column_step;       ///< output columns of a tile
  std::int32_t k_tiles;           ///< k tiles of one part of K
  std::int32_t k_parts;           ///< 2: K runs through gate, then up
  std::int32_t low_rank_k_tiles;  ///< after these parts: k tiles of a low-rank term
  std::int32_t raster_group;      ///< of kGrouped: most pairs of a group, a power of two
  Divisor wave;                   ///< of kSplitLastWave: clusters of the launch, or 1: no split
};

/// Arguments of ExpertTiles: the tiles of one output matrix per expert.
struct ExpertTilesParams {
  const ExpertRecord* longest_first;  ///< experts by descending rows; null: in index order
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  unsigned* tile_counter;  ///< dynamic scheduler: 0 before the launch; null: static order
  std::int32_t experts;
  std::int32_t rows;          ///< M
  std::int32_t columns;       ///< N
  std::int32_t row_tiles;     ///< tiles of a cluster along M that have rows for both CTAs
  std::int32_t column_tiles;  ///< tiles along N
  std::int32_t column_step;
  Divisor tiles_per_expert;
  Divisor raster_group;  ///< tiles of a raster group
  std::int32_t columns_fastest;
};

// Epilogues.

/// A tensor map for stores that end at the end of an expert. One map serves all experts. Its
/// dimensions are (column, part, row, base); row and base have the same stride, and the map begins
/// `reach` rows before the tensor. To store `left` rows from row `first` on, a kernel stores at row
/// = reach - left and base = first + left. This address is row `first` of the tensor, and the
/// hardware clips the store after `left` rows, where the row dimension ends.
struct RaggedMap {
  CUtensorMap map;
  std::int32_t reach;
};

/// Arguments of ActivateRows and ActivatePlainRows.
struct ActivateRowsParams {
  RaggedMap h;  ///< (column, part, row, base): part 0 is the gate (or the only one), part 1 up;
                ///< paired: one part of 2n columns
  RaggedMap a;
  Bias bias[2];  ///< gate, up; without a gate [0] alone
  ActivationScalars scalars;
  std::int32_t width;   ///< n
  std::int32_t keep_h;  ///< 0: inference
};

/// Columns of A in an input stage of dH, which are also the columns of a box.
inline constexpr int kGradColumns = 64;

/// Arguments of ActivateGradRows.
struct ActivateGradRowsParams {
  CUtensorMap
      h_in;      ///< (column, part, row), box 64 x 1 x 128; kInterleaved: one part of 2n columns
  RaggedMap dh;  ///< (column, part, row, base), box of 64 rows
  RaggedMap a;   ///< A'
  const float* row_weight;  ///< (C) s; null: 1
  float* score_parts;       ///< (C, score_tiles): the part of a row's dS from a tile of columns
  std::int32_t score_tiles;
  std::int32_t width;  ///< n
  ActivationScalars scalars;
};

/// Arguments of StoreRows.
struct StoreRowsParams {
  RaggedMap out;
  Bias bias;
  /// RowScale::kWeights only: row p is multiplied by `factor`, and by element p * scale_stride of
  /// row_scale unless it is null.
  const float* row_scale;
  std::int64_t scale_stride;
  float factor;
  std::int32_t width;  ///< output columns
};

/// fp32 matrices (expert, M, N); strides in elements.
struct FloatGrad {
  float* data;
  std::int64_t strides[3];
};

/// Arguments of StoreExpert. Entries [0] and [1] are the outputs: gate and up, or one matrix alone.
struct StoreExpertParams {
  CUtensorMap map[2];   ///< kElement: (contiguous, other, expert), box 64 x 64 x 1
  FloatGrad floats[2];  ///< kFloat, kAccumulate
  GradStore mode;
  std::int32_t alternate;  ///< fp32: even columns go to [0], odd ones to [1]
  std::int32_t rows;       ///< M
  std::int32_t columns;    ///< N
  /// First column that goes to [1]; past all tiles if there is one output. With kElement a multiple
  /// of 64, because the hardware clips a box past an output's end, not before its beginning.
  std::int32_t border;
};

// A kernel.

/// When a kernel's tiles may begin. L, M and N are three kernels that follow each other in a stream
/// (P, W and S in ptx/dependent.cuh). The engine keeps the rules of ptx/dependent.cuh in this way:
/// 1. Every CTA of M executes griddepcontrol.wait, then launch_dependents. So N may read, without a
///    wait of its own, what L and earlier kernels wrote (rule 2), under two conditions:
///    - by ld.global.ca (RasterOrder::kGrouped, ExpertTiles, GatherDepth) and cp.async, not by
///      ld.global.nc (__ldg), which may return stale data;
///    - by TMA, which is another proxy, only after fence.proxy.async in the thread that loads.
/// 2. N reads what M writes only after its own wait (rule 3), except in kEarly tiles. For these, a
///    CTA of M whose stores are complete executes fence.proxy.async and counts itself by
///    red.release.gpu; N's loading thread reads the count by ld.acquire.gpu and executes
///    fence.proxy.async. If the count is not complete, it waits.
/// 3. N waits before it ends (rule 4).
/// 4. M may be a kernel that waits for the rows of other GPUs (wait_for() of exchange/kernels.h).
///    When the rows have arrived, M first increments a count by red.release.gpu and then launches
///    N. N's loading threads read the count by ld.acquire.gpu before they read the rows.
/// If M launches N before M has executed its own wait (kernels of sums/ and exchange/), "L" means
/// the kernels that were complete when M started.
enum class Begins : int {
  kAfterPrevious = 0,  ///< after griddepcontrol.wait
  kIndependent = 1,    ///< at once: no tile reads what the previous kernel writes
  kEarly = 2,          ///< tiles below `early_start_tiles` when the previous kernel has released
                       ///< what they read, the others after griddepcontrol.wait; TmaRows only
};

/// Kernel arguments. They depend on the kinds of producer, scheduler and epilogue alone, so that
/// the host fills one type for all instances of a role.
template <class ProducerParams, class SchedulerParams, class EpilogueParams>
struct GemmParams {
  ProducerParams producer;
  OperandBMaps b;
  LowRankParams low_rank;
  SchedulerParams tiles;
  EpilogueParams epilogue;
  Begins begins;
  /// kEarly: tiles below this number read only rows that the previous kernel releases early.
  std::int32_t early_start_tiles;
  /// 0: the next kernel is launched once this kernel's own predecessors are complete. More: it is
  /// launched only when the first `early_release_tiles` tiles of this kernel are in memory.
  /// RingEpilogue only.
  std::int32_t early_release_tiles;
  /// A count that one kernel releases and a later kernel acquires; 0 before.
  /// - Early tiles: the number of CTAs whose early tiles are in memory. A kernel with
  ///   early_release_tiles > 0 increments it; the next kernel reads it if it is kEarly.
  /// - GatherDepth with kIndependent: not 0 once the rows of other GPUs have arrived; null if all
  ///   rows are of this GPU.
  unsigned* release_count;
  std::int32_t early_release_ctas;  ///< kEarly: the count when all CTAs have released
};

// By role (roles.cuh).

using ActivateGemmParams = GemmParams<GatherRowsParams, RowTilesParams, ActivateRowsParams>;
using StoreGemmParams = GemmParams<TmaRowsParams, RowTilesParams, StoreRowsParams>;
using GatheredStoreGemmParams = GemmParams<GatherRowsParams, RowTilesParams, StoreRowsParams>;
using ActivateGradGemmParams = GemmParams<GatherRowsParams, RowTilesParams, ActivateGradRowsParams>;
using StoreExpertGemmParams = GemmParams<GatherRowsParams, ExpertTilesParams, StoreExpertParams>;

}  // namespace sonicmoe::cuda
