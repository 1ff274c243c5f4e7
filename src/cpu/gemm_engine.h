// The two grouped GEMMs behind every kernel of the layer:
// - RowGemm (varlen-M): the rows of an expert times the expert's matrix.
// - ColGemm (varlen-K): a matrix for each expert, summed over the expert's rows.
//
// Rows are gathered while they are packed, at most kPanelRows at a time. The caller's epilogue gets
// each finished tile.
//
// Every element is one chain of additions in ascending k, whatever the blocking. So neither the
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

/// Most rows of a ColGemm that are packed at a time.
inline constexpr std::int64_t kPanelRows = 256;
/// Most rows of a RowTask, which packs its expert's matrix once.
inline constexpr std::int64_t kTaskRows = 4 * kPanelRows;

/// The weights (E, n, k) with strides in elements: one (n, k) matrix for each expert.
struct ExpertMatrix {
  const void* data = nullptr;
  std::int64_t stride_e = 0;
  std::int64_t stride_n = 0;
  std::int64_t stride_k = 0;
};

/// Memory that begins at a multiple of 64 bytes and has room for vector stores past its end.
class AlignedMemory {
 public:
  explicit AlignedMemory(std::int64_t bytes);
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::unique_ptr<std::byte, Free> data_;
};

/// Rows [begin, end) of one expert. Row `origin` is the first row in the memory of operands that
/// have no index and not all rows: they hold one group of experts at a time.
struct RowTask {
  std::int64_t expert = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t origin = 0;
};

/// Experts [first, last) with the rows [begin, end). All kernels of a pass process one group before
/// the next group, so that each kernel finds in the caches the rows that the kernel before it
/// wrote.
struct ExpertGroup {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::vector<RowTask> tasks;
};

/// An upper bound on the tasks of `rows` rows of `experts` experts.
std::int64_t most_row_tasks(std::int64_t rows, std::int64_t experts);

/// Splits all experts into groups of about 6 MiB of rows for each worker. Only the constructor
/// allocates: next() is called when outputs have been written.
class ExpertGroups {
 public:
  /// `most_rows`: an upper bound on the rows of all experts. `row_bytes`: bytes of a row; 0: all
  /// experts are one group.
  ExpertGroups(std::int64_t experts, std::int64_t most_rows, std::int64_t row_bytes,
               std::int32_t workers);
  /// The next group, or null after the last. Overwrites the group that it returned before.
  const ExpertGroup* next(std::span<const std::int64_t> offsets);

 private:
  const std::int64_t full_rows_;  ///< a group gets no further expert once it has these rows
  const std::int32_t workers_;
  ExpertGroup group_;
};

/// All experts as one group, with tasks for `workers`.
ExpertGroup one_group(std::span<const std::int64_t> offsets, std::int32_t workers);

/// Varlen-M. acc[o](p, j) = sum over s, k of a(p, s * seg_k + k) * b(j, k). With two outputs, b is
/// matrices[o]: gate and up are two products of the same rows. With two segments, b is matrices[s]:
/// gate and up are one sum. A term adds sum over k of term.a(p, k) * term.matrices[o](j, k).
struct RowTerm {
  Operand a;
  ExpertMatrix matrices[2];
  std::int64_t k = 0;  ///< 0: no term
};
struct RowGemm {
  const Kernels* kernels = nullptr;
  Operand a;
  ExpertMatrix matrices[2];
  std::int64_t outputs = 1;
  std::int64_t segments = 1;
  std::int64_t n = 0;
  std::int64_t seg_k = 0;
  RowTerm term{};
};

/// A finished tile: rows [row, row + rows) and columns [col, col + cols) of one expert.
struct RowTile {
  std::int64_t expert = 0;
  std::int64_t row = 0;
  std::int64_t col = 0;
  Tile acc[2];  ///< by output
};

/// Packs and multiplies for one worker. It multiplies mr rows by every column before the next mr
/// rows: the packed rows stay in the L1 cache, and the epilogue writes whole rows.
class RowGemmWorker {
 public:
  explicit RowGemmWorker(const RowGemm& gemm);

  /// For each tile, calls prepare(tile) before the multiplication and finish(tile) after it.
  /// prepare may prefetch the memory that finish reads or writes.
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
  /// Columns of one matrix of an expert. Panels of nr columns lie panel_bytes apart.
  struct Columns {
    std::int64_t first;
    std::int64_t count;
    std::int64_t k;
    std::byte* out;
    std::int64_t panel_bytes;
  };
  void pack_matrix(const ExpertMatrix& matrix, std::int64_t expert, const Columns& columns);
  RowTile tile_at(std::int64_t expert, std::int64_t row, std::int64_t rows,
                  std::int64_t block) const;
  void multiply(std::int64_t b_panel, const RowTile& tile);

  const RowGemm gemm_;
  const Kernels& kernels_;
  const std::int64_t seg_packed_k_;   ///< packed elements in a lane of a segment
  const std::int64_t term_packed_k_;  ///< packed elements in a lane of the term
  const std::int64_t a_panel_bytes_;  ///< for mr rows
  const std::int64_t b_panel_bytes_;  ///< for nr columns
  const std::int64_t chunk_blocks_;   ///< blocks of nr columns that are packed at a time
  AlignedMemory a_;
  AlignedMemory b_;
  AlignedMemory a_term_;
  AlignedMemory b_term_;
  AlignedMemory tile_;
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

  /// Calls finish(tile) once for every tile of the task; the tiles of an expert without rows are
  /// zero. Calls prepare(tile) before a tile's last multiplication.
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
  AlignedMemory a_;
  AlignedMemory b_;
  AlignedMemory acc_;
};

/// Most rows of a segment and most columns in a task.
std::int64_t col_task_rows(const ColGemm& gemm);
std::int64_t col_task_cols(const ColGemm& gemm);

}  // namespace sonicmoe::cpu
