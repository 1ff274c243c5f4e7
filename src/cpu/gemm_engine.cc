#include "cpu/gemm_engine.h"

#include <cstring>
#include <limits>
#include <new>
#include <utility>

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kAlignment = 64;
// Bytes that vector stores of the last lanes may write past the end of AlignedMemory.
constexpr std::int64_t kSlack = 256;
// Bytes of an expert's columns that a task packs and multiplies by all its rows before it packs the
// next columns: they fit the L2 or L3 cache.
constexpr std::int64_t kChunkBytes = 2 << 20;
// Most rows, of all segments together, and most columns of a ColTask's accumulators; the rows are
// rounded up to whole tiles.
constexpr std::int64_t kColTaskRows = 512;
constexpr std::int64_t kColTaskCols = 512;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

const void* advance(const void* data, std::int64_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

// The least rows of a RowTask. The last task of an expert may have fewer.
constexpr std::int64_t kSplitRows = 64;
// A group of experts has about this many bytes of rows for each worker.
constexpr std::int64_t kGroupBytes = 6 << 20;
// Rows that sweep_columns() packs into all panels before it reads the next rows: they stay in the
// L1 cache until the last panel has its columns.
constexpr std::int64_t kSweepRows = 16;

/// Columns [col0, col0 + cols) of rows [row0, row0 + rows), packed into panels of `width` columns
/// that lie panel_bytes apart.
struct Sweep {
  Operand source;
  std::int64_t col0;
  std::int64_t cols;
  std::int64_t width;
  std::int64_t row0;
  std::int64_t rows;
  std::byte* out;
  std::int64_t panel_bytes;
};

void sweep_columns(const Kernels& k, const Sweep& s) {
  for (std::int64_t r = 0; r < s.rows; r += kSweepRows) {
    std::byte* out = s.out + r / k.k_group * s.width * k.packed_bytes;
    for (std::int64_t c = 0; c < s.cols; c += s.width, out += s.panel_bytes) {
      k.pack_cols({s.source, s.col0 + c, std::min(s.width, s.cols - c), s.width, s.row0 + r,
                   std::min(kSweepRows, s.rows - r), out});
    }
  }
}

/// Converts a row of a task to a row of operand m. Without an index and without all_rows it has
/// only the rows from `origin` on (RowTask::origin).
std::int64_t stored_row(const Operand& m, std::int64_t row, std::int64_t origin) {
  return m.index != nullptr || m.all_rows ? row : row - origin;
}

}  // namespace

AlignedMemory::AlignedMemory(std::int64_t bytes)
    : data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes + kSlack),
                                                   std::align_val_t{kAlignment}))) {}

void AlignedMemory::Free::operator()(std::byte* p) const {
  ::operator delete(p, std::align_val_t{kAlignment});
}

std::int64_t most_row_tasks(std::int64_t rows, std::int64_t experts) {
  return rows / kSplitRows + std::min(rows, experts);
}

ExpertGroups::ExpertGroups(std::int64_t experts, std::int64_t most_rows, std::int64_t row_bytes,
                           std::int32_t workers)
    : full_rows_(row_bytes == 0 ? std::numeric_limits<std::int64_t>::max()
                                : kGroupBytes * workers / row_bytes),
      workers_(workers) {
  group_.tasks.reserve(static_cast<std::size_t>(most_row_tasks(most_rows, experts)));
}

const ExpertGroup* ExpertGroups::next(std::span<const std::int64_t> offsets) {
  const std::int64_t experts = std::ssize(offsets) - 1;
  if (group_.last == experts) return nullptr;
  group_.first = group_.last;
  group_.begin = offsets[group_.first];
  do {
    ++group_.last;
  } while (group_.last < experts && offsets[group_.last] - group_.begin < full_rows_);
  group_.end = offsets[group_.last];
  // Four tasks for each worker: workers that get shorter tasks take more of them.
  const std::int64_t quarter = (group_.end - group_.begin) / (4 * std::int64_t{workers_});
  const std::int64_t rows =
      workers_ == 1 ? kTaskRows
                    : std::clamp(quarter / kSplitRows * kSplitRows, kSplitRows, kTaskRows);
  group_.tasks.clear();
  for (std::int64_t e = group_.first; e < group_.last; ++e) {
    for (std::int64_t p = offsets[e]; p < offsets[e + 1]; p += rows) {
      group_.tasks.push_back({e, p, std::min(offsets[e + 1], p + rows), group_.begin});
    }
  }
  return &group_;
}

ExpertGroup one_group(std::span<const std::int64_t> offsets, std::int32_t workers) {
  const std::int64_t rows = std::max<std::int64_t>(offsets.back() - offsets.front(), 0);
  ExpertGroups groups(std::ssize(offsets) - 1, rows, 0, workers);
  const ExpertGroup* all = groups.next(offsets);
  if (all == nullptr) return {};
  ExpertGroup group = *all;
  for (RowTask& task : group.tasks) task.origin = 0;
  return group;
}

RowGemmWorker::RowGemmWorker(const RowGemm& gemm)
    : gemm_(gemm),
      kernels_(*gemm.kernels),
      seg_packed_k_(ceil_div(gemm.seg_k, kernels_.k_group)),
      term_packed_k_(ceil_div(gemm.term.k, kernels_.k_group)),
      a_panel_bytes_(gemm.segments * seg_packed_k_ * kernels_.mr * kernels_.packed_bytes),
      b_panel_bytes_(gemm.segments * seg_packed_k_ * kernels_.nr * kernels_.packed_bytes),
      chunk_blocks_(std::clamp(kChunkBytes / (gemm.outputs * b_panel_bytes_), std::int64_t{1},
                               ceil_div(gemm.n, kernels_.nr))),
      a_(a_panel_bytes_),
      b_(chunk_blocks_ * gemm.outputs * b_panel_bytes_),
      a_term_(term_packed_k_ * kernels_.mr * kernels_.packed_bytes),
      b_term_(chunk_blocks_ * gemm.outputs * term_packed_k_ * kernels_.nr * kernels_.packed_bytes),
      tile_(gemm.outputs * kernels_.mr * kernels_.nr * kernels_.acc_bytes) {}

void RowGemmWorker::pack_a(std::int64_t row, std::int64_t rows, std::int64_t origin) {
  const std::int64_t row0 = stored_row(gemm_.a, row, origin);
  const std::int64_t seg_bytes = seg_packed_k_ * kernels_.mr * kernels_.packed_bytes;
  std::byte* out = a_.data();
  for (std::int64_t s = 0; s < gemm_.segments; ++s, out += seg_bytes) {
    kernels_.pack_rows({gemm_.a, row0, rows, kernels_.mr, s * gemm_.seg_k, gemm_.seg_k, out});
  }
  const RowTerm& term = gemm_.term;
  if (term.k == 0) return;
  kernels_.pack_rows(
      {term.a, stored_row(term.a, row, origin), rows, kernels_.mr, 0, term.k, a_term_.data()});
}

void RowGemmWorker::pack_matrix(const ExpertMatrix& m, std::int64_t expert, const Columns& c) {
  const void* data = advance(m.data, expert * m.stride_e * kernels_.element_bytes);
  if (m.stride_n == 1 && m.stride_k != 1) {
    return sweep_columns(kernels_, {{data, nullptr, m.stride_k, m.stride_n},
                                    c.first,
                                    c.count,
                                    kernels_.nr,
                                    0,
                                    c.k,
                                    c.out,
                                    c.panel_bytes});
  }
  std::byte* out = c.out;
  for (std::int64_t col = 0; col < c.count; col += kernels_.nr, out += c.panel_bytes) {
    kernels_.pack_rows({{data, nullptr, m.stride_n, m.stride_k},
                        c.first + col,
                        std::min(kernels_.nr, c.count - col),
                        kernels_.nr,
                        0,
                        c.k,
                        out});
  }
}

void RowGemmWorker::pack_b(std::int64_t expert, std::int64_t first, std::int64_t last) {
  const std::int64_t col0 = first * kernels_.nr;
  const std::int64_t cols = std::min(gemm_.n, last * kernels_.nr) - col0;
  const std::int64_t parts = gemm_.outputs * gemm_.segments;
  const std::int64_t lane_bytes = kernels_.nr * kernels_.packed_bytes;
  const std::int64_t part_bytes = seg_packed_k_ * lane_bytes;
  for (std::int64_t i = 0; i < parts; ++i) {
    pack_matrix(gemm_.matrices[i], expert,
                {col0, cols, gemm_.seg_k, b_.data() + i * part_bytes, parts * part_bytes});
  }
  if (gemm_.term.k == 0) return;
  const std::int64_t term_bytes = term_packed_k_ * lane_bytes;
  for (std::int64_t o = 0; o < gemm_.outputs; ++o) {
    pack_matrix(
        gemm_.term.matrices[o], expert,
        {col0, cols, gemm_.term.k, b_term_.data() + o * term_bytes, gemm_.outputs * term_bytes});
  }
}

RowTile RowGemmWorker::tile_at(std::int64_t expert, std::int64_t row, std::int64_t rows,
                               std::int64_t block) const {
  const std::int64_t col = block * kernels_.nr;
  const std::int64_t tile_bytes = kernels_.mr * kernels_.nr * kernels_.acc_bytes;
  RowTile tile{expert, row, col, {}};
  for (std::int64_t o = 0; o < gemm_.outputs; ++o) {
    tile.acc[o] = {tile_.data() + o * tile_bytes, kernels_.nr, rows,
                   std::min(kernels_.nr, gemm_.n - col)};
  }
  return tile;
}

void RowGemmWorker::multiply(std::int64_t b_panel, const RowTile& tile) {
  const std::int64_t tile_bytes = kernels_.mr * kernels_.nr * kernels_.acc_bytes;
  for (std::int64_t o = 0; o < gemm_.outputs; ++o) {
    kernels_.product({a_.data(), b_.data() + (b_panel * gemm_.outputs + o) * b_panel_bytes_,
                      gemm_.segments * seg_packed_k_, tile.acc[o].rows, Start::kZero,
                      tile_.data() + o * tile_bytes});
    if (term_packed_k_ == 0) continue;
    const std::int64_t term_bytes = term_packed_k_ * kernels_.nr * kernels_.packed_bytes;
    kernels_.product({a_term_.data(), b_term_.data() + (b_panel * gemm_.outputs + o) * term_bytes,
                      term_packed_k_, tile.acc[o].rows, Start::kAdd,
                      tile_.data() + o * tile_bytes});
  }
}

std::int64_t col_task_rows(const ColGemm& gemm) {
  // Rounded up to whole tiles. Rounded down, the remaining rows would be a task of their own, which
  // packs all of b again.
  const std::int64_t mr = gemm.kernels->mr;
  return std::min(gemm.m, ceil_div(kColTaskRows / gemm.segments, mr) * mr);
}
std::int64_t col_task_cols(const ColGemm& gemm) { return std::min(gemm.n, kColTaskCols); }

std::int64_t col_tasks(const ColGemm& gemm) {
  return ceil_div(gemm.m, col_task_rows(gemm)) * ceil_div(gemm.n, col_task_cols(gemm));
}

std::vector<ColTask> split_cols(const ColGemm& gemm, std::int64_t first, std::int64_t last) {
  const std::int64_t rows = col_task_rows(gemm);
  const std::int64_t cols = col_task_cols(gemm);
  std::vector<ColTask> tasks;
  for (std::int64_t e = first; e < last; ++e) {
    for (std::int64_t m = 0; m < gemm.m; m += rows) {
      for (std::int64_t n = 0; n < gemm.n; n += cols) {
        tasks.push_back({e, m, std::min(gemm.m, m + rows), n, std::min(gemm.n, n + cols)});
      }
    }
  }
  return tasks;
}

ColGemmWorker::ColGemmWorker(const ColGemm& gemm)
    : gemm_(gemm),
      kernels_(*gemm.kernels),
      a_(gemm.segments * ceil_div(col_task_rows(gemm), kernels_.mr) * kernels_.mr * kPanelRows *
         kernels_.packed_bytes),
      b_(ceil_div(col_task_cols(gemm), kernels_.nr) * kernels_.nr * kPanelRows *
         kernels_.packed_bytes),
      acc_(gemm.segments * ceil_div(col_task_rows(gemm), kernels_.mr) * kernels_.mr *
           ceil_div(col_task_cols(gemm), kernels_.nr) * kernels_.nr * kernels_.acc_bytes) {}

void ColGemmWorker::clear_tile() {
  const std::int64_t bytes = kernels_.mr * kernels_.nr * kernels_.acc_bytes;
  std::memset(acc_.data(), 0, static_cast<std::size_t>(bytes));
}

void ColGemmWorker::pack(const ColTask& task, std::int64_t row, std::int64_t rows,
                         std::int64_t origin) {
  const Kernels& k = kernels_;
  const std::int64_t groups = ceil_div(rows, k.k_group);
  const std::int64_t a_bytes = groups * k.mr * k.packed_bytes;
  const std::int64_t m_panels = ceil_div(task.m1 - task.m0, k.mr);
  for (std::int64_t s = 0; s < gemm_.segments; ++s) {
    sweep_columns(
        k, {gemm_.a, s * gemm_.m + task.m0, task.m1 - task.m0, k.mr,
            stored_row(gemm_.a, row, origin), rows, a_.data() + s * m_panels * a_bytes, a_bytes});
  }
  sweep_columns(k, {gemm_.b, task.n0, task.n1 - task.n0, k.nr, stored_row(gemm_.b, row, origin),
                    rows, b_.data(), groups * k.nr * k.packed_bytes});
}

ColTile ColGemmWorker::tile_at(const ColTask& task, std::int64_t segment, std::int64_t m,
                               std::int64_t n, std::int64_t index) const {
  const Kernels& k = kernels_;
  return {segment, m, n,
          Tile{acc_.data() + index * k.mr * k.nr * k.acc_bytes, k.nr, std::min(k.mr, task.m1 - m),
               std::min(k.nr, task.n1 - n)}};
}

void ColGemmWorker::multiply(const Step& step, const ColTile& tile) {
  const Kernels& k = kernels_;
  const std::int64_t groups = ceil_div(step.k, k.k_group);
  const std::int64_t offset = static_cast<const std::byte*>(tile.acc.values) - acc_.data();
  k.product({a_.data() + step.a_panel * groups * k.mr * k.packed_bytes,
             b_.data() + step.b_panel * groups * k.nr * k.packed_bytes, groups, tile.acc.rows,
             step.start, acc_.data() + offset});
}

}  // namespace sonicmoe::cpu
