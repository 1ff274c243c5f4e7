// The two grouped GEMMs that every kernel of the layer is: rows of an expert times its matrix
// (varlen-M), and sums over the rows of an expert (varlen-K). Gathers happen while packing, at most
// kPanelRows rows at a time; what happens to a finished tile is the caller's epilogue.
//
// Every element is one chain of additions in ascending k whatever the blocking, so neither the
// number of threads nor the split into tasks changes a bit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/gemm_kernels.h"
#include "cpu/threads.h"

namespace sonicmoe::cpu {

/// Gathered rows packed at a time.
inline constexpr std::int64_t kPanelRows = 256;
/// Most rows of a RowTask: they share one packing of their expert's matrix.
inline constexpr std::int64_t kTaskRows = 4 * kPanelRows;

/// One matrix an expert, (n, k) by strides in elements.
struct ExpertMatrix {
  const void* data = nullptr;
  std::int64_t stride_e = 0;
  std::int64_t stride_n = 0;
  std::int64_t stride_k = 0;
};

/// Memory of a worker, 64-byte aligned.
class Panel {
 public:
  explicit Panel(std::int64_t bytes);
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
};

/// Rows [begin, end) of one expert. Operands without an index are stored from row `origin` on.
struct RowTask {
  std::int64_t expert = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t origin = 0;
};

/// Neighbouring experts that pass through all kernels together, so that the next kernel finds the
/// rows that one kernel wrote in the caches. Their rows are [begin, end).
struct ExpertGroup {
  std::int64_t first = 0;
  std::int64_t last = 0;  ///< past the last expert
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<RowTask> tasks;
};

/// Most row tasks of `rows` rows of `experts` experts.
std::int64_t most_row_tasks(std::int64_t rows, std::int64_t experts);

/// Walks all experts in groups of about 6 MiB of rows for each worker. Allocates in the constructor
/// only, so that the walk may begin when outputs have been written.
class ExpertGroups {
 public:
  /// `most_rows`: at least the rows of all experts, which next() then reads from `offsets`.
  ExpertGroups(std::int64_t experts, std::int64_t most_rows, std::int64_t row_bytes,
               std::int32_t workers);
  /// The next group, or null after the last. It replaces the one before.
  const ExpertGroup* next(std::span<const std::int64_t> offsets);

 private:
  const std::int64_t full_rows_;  ///< a group takes experts until it has these
  const std::int32_t workers_;
  ExpertGroup group_;
};

/// Every expert's rows in tasks for `workers`, as one group.
ExpertGroup one_group(std::span<const std::int64_t> offsets, std::int32_t workers);

/// Varlen-M. acc[g](p, j) = sum over s, k of a(p, s * seg_k + k) * b(j, k), where b is matrices[g]
/// with several groups (gate and up side by side) and matrices[s] with several segments (gate and
/// up in one sum).
struct RowGemm {
  const Kernels* kernels = nullptr;
  Operand a;
  ExpertMatrix matrices[2];
  std::int64_t groups = 1;
  std::int64_t segments = 1;
  std::int64_t n = 0;
  std::int64_t seg_k = 0;
};

/// A finished tile: rows [row, row + rows) and columns [col, col + cols) of one expert.
struct RowTile {
  std::int64_t expert = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;
  Tile acc[2];  ///< by group
};

/// Packs and multiplies for one worker: mr rows at a time, which stay in the first cache while they
/// meet every column, so that finished rows leave and enter memory whole.
class RowGemmWorker {
 public:
  explicit RowGemmWorker(const RowGemm& gemm);

  /// Calls prepare(tile) before a tile is multiplied, when memory that its epilogue needs is worth
  /// fetching, and finish(tile) after.
  template <class Prepare, class Finish>
  void run(const RowTask& task, Prepare&& prepare, Finish&& finish) {
    const std::int64_t blocks = (gemm_.n + kernels_.nr - 1) / kernels_.nr;
    for (std::int64_t first = 0; first < blocks; first += chunk_blocks_) {
      const std::int64_t last = std::min(blocks, first + chunk_blocks_);
      pack_b(task.expert, first, last);
      for (std::int64_t row = task.begin; row < task.end; row += kernels_.mr) {
        const std::int64_t rows = std::min(kernels_.mr, task.end - row);
        pack_a(row, rows, task.origin);
        for (std::int64_t block = first; block < last; ++block) {
          const RowTile tile = tile_at(task.expert, row, rows, block);
          prepare(tile);
          multiply(block - first, tile);
          finish(tile);
        }
      }
    }
  }

 private:
  void pack_a(std::int64_t row, std::int64_t rows, std::int64_t origin);
  void pack_b(std::int64_t expert, std::int64_t first, std::int64_t last);
  RowTile tile_at(std::int64_t expert, std::int64_t row, std::int64_t rows,
                  std::int64_t block) const;
  void multiply(std::int64_t b_panel, const RowTile& tile);

  const RowGemm gemm_;
  const Kernels& kernels_;
  const std::int64_t seg_groups_;     ///< packed k of a segment
  const std::int64_t a_panel_bytes_;  ///< of mr rows
  const std::int64_t b_panel_bytes_;  ///< of nr columns
  const std::int64_t chunk_blocks_;   ///< column blocks whose b panels are kept
  Panel a_;
  Panel b_;
  Panel tile_;
};

/// Varlen-K. acc[s](i, j) = sum over rows p of one expert of a(p, s * m + i) * b(p, j).
struct ColGemm {
  const Kernels* kernels = nullptr;
  Operand a;
  Operand b;
  std::int64_t segments = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
};

/// Rows [m0, m1) of every segment and columns [n0, n1) of one expert's matrix.
struct ColTask {
  std::int64_t expert = 0;
  std::int64_t m0 = 0;
  std::int64_t m1 = 0;
  std::int64_t n0 = 0;
  std::int64_t n1 = 0;
};

struct ColTile {
  std::int64_t segment = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;
  Tile acc;
};

/// The number of tasks of each expert.
std::int64_t col_tasks(const ColGemm& gemm);
/// The tasks of experts [first, last).
std::vector<ColTask> split_cols(const ColGemm& gemm, std::int64_t first, std::int64_t last);

class ColGemmWorker {
 public:
  explicit ColGemmWorker(const ColGemm& gemm);

  /// Calls finish(tile) once for every tile of the task, all zero where the expert has no rows,
  /// and prepare(tile) before its last multiplication.
  template <class Prepare, class Finish>
  void run(const ColTask& task, const RowTask& rows, Prepare&& prepare, Finish&& finish) {
    if (rows.begin == rows.end) clear_tile();
    for (std::int64_t row = rows.begin; row < rows.end || row == rows.begin; row += kPanelRows) {
      const std::int64_t count = std::min(kPanelRows, rows.end - row);
      const bool last = row + count == rows.end;
      pack(task, row, count, rows.origin);
      const Start start = row == rows.begin ? Start::kZero : Start::kAdd;
      std::int64_t index = 0;
      for (std::int64_t n = task.n0; n < task.n1; n += kernels_.nr) {
        std::int64_t a_panel = 0;
        for (std::int64_t s = 0; s < gemm_.segments; ++s) {
          for (std::int64_t m = task.m0; m < task.m1; m += kernels_.mr, ++a_panel, ++index) {
            const ColTile tile = tile_at(task, s, m, n, count == 0 ? 0 : index);
            if (last) prepare(tile);
            if (count != 0) {
              multiply({a_panel, (n - task.n0) / kernels_.nr, count, start}, tile);
            }
            if (last) finish(tile);
          }
        }
      }
    }
  }

 private:
  struct Step {
    std::int64_t a_panel;
    std::int64_t b_panel;
    std::int64_t k;
    Start start;
  };
  void clear_tile();
  void pack(const ColTask& task, std::int64_t row, std::int64_t rows, std::int64_t origin);
  ColTile tile_at(const ColTask& task, std::int64_t segment, std::int64_t m, std::int64_t n,
                  std::int64_t index) const;
  void multiply(const Step& step, const ColTile& tile);

  const ColGemm gemm_;
  const Kernels& kernels_;
  Panel a_;
  Panel b_;
  Panel acc_;
};

/// Columns and rows of a varlen-K task.
std::int64_t col_task_rows(const ColGemm& gemm);
std::int64_t col_task_cols(const ColGemm& gemm);

/// One Worker of a product for each worker of the team, made before the first phase.
template <class Worker, class Gemm>
using Workers = PerWorker<Worker>;

}  // namespace sonicmoe::cpu
