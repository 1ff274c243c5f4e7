#include "cpu/gemm_engine.h"

#include <cstring>
#include <new>

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kAlignment = 64;
// Vector stores of a panel's last lanes may reach past it.
constexpr std::int64_t kSlack = 256;
// Packed columns of one expert that a task keeps: they stay in the outer caches over its rows.
constexpr std::int64_t kChunkBytes = 2 << 20;
// Accumulators of a varlen-K task.
constexpr std::int64_t kColTaskRows = 512;
constexpr std::int64_t kColTaskCols = 512;
// Rows that share one packing of an expert's matrix.
constexpr std::int64_t kTaskRows = 4 * kPanelRows;

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

const void* advance(const void* data, std::int64_t bytes) {
  return static_cast<const std::byte*>(data) + bytes;
}

}  // namespace

Panel::Panel(std::int64_t bytes)
    : data_(static_cast<std::byte*>(::operator new(static_cast<std::size_t>(bytes + kSlack),
                                                   std::align_val_t{kAlignment}))) {}

void Panel::Free::operator()(std::byte* p) const {
  ::operator delete(p, std::align_val_t{kAlignment});
}

std::vector<RowTask> split_rows(std::span<const std::int64_t> offsets, std::int32_t workers) {
  const std::int64_t experts = static_cast<std::int64_t>(offsets.size()) - 1;
  const std::int64_t share = offsets.back() / (4 * std::int64_t{workers});
  const std::int64_t rows =
      workers == 1 ? kTaskRows : std::clamp(share / 64 * 64, std::int64_t{64}, kTaskRows);
  std::vector<RowTask> tasks;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t p = offsets[e]; p < offsets[e + 1]; p += rows) {
      tasks.push_back({e, p, std::min(offsets[e + 1], p + rows)});
    }
  }
  return tasks;
}

RowGemmWorker::RowGemmWorker(const RowGemm& gemm)
    : gemm_(gemm),
      kernels_(*gemm.kernels),
      panel_rows_(kPanelRows / kernels_.mr * kernels_.mr),
      seg_groups_(ceil_div(gemm.seg_k, kernels_.k_group)),
      a_panel_bytes_(gemm.segments * seg_groups_ * kernels_.mr * kernels_.packed_bytes),
      b_panel_bytes_(gemm.segments * seg_groups_ * kernels_.nr * kernels_.packed_bytes),
      chunk_blocks_(std::clamp(kChunkBytes / (gemm.groups * b_panel_bytes_), std::int64_t{1},
                               ceil_div(gemm.n, kernels_.nr))),
      a_(panel_rows_ / kernels_.mr * a_panel_bytes_),
      b_(chunk_blocks_ * gemm.groups * b_panel_bytes_),
      tile_(gemm.groups * kernels_.mr * kernels_.nr * kernels_.acc_bytes) {}

void RowGemmWorker::pack_a(std::int64_t row, std::int64_t rows) {
  const std::int64_t seg_bytes = seg_groups_ * kernels_.mr * kernels_.packed_bytes;
  std::byte* out = a_.data();
  for (std::int64_t r = 0; r < rows; r += kernels_.mr) {
    for (std::int64_t s = 0; s < gemm_.segments; ++s) {
      kernels_.pack_rows({gemm_.a, row + r, std::min(kernels_.mr, rows - r), kernels_.mr,
                          s * gemm_.seg_k, gemm_.seg_k, out});
      out += seg_bytes;
    }
  }
}

void RowGemmWorker::pack_b(std::int64_t expert, std::int64_t first, std::int64_t last) {
  const std::int64_t seg_bytes = seg_groups_ * kernels_.nr * kernels_.packed_bytes;
  std::byte* out = b_.data();
  for (std::int64_t block = first; block < last; ++block) {
    const std::int64_t col = block * kernels_.nr;
    for (std::int64_t i = 0; i < gemm_.groups * gemm_.segments; ++i) {
      const ExpertMatrix& m = gemm_.matrices[i];
      const void* data = advance(m.data, expert * m.stride_e * kernels_.element_bytes);
      const std::int64_t lanes = std::min(kernels_.nr, gemm_.n - col);
      if (m.stride_n == 1 && m.stride_k != 1) {
        kernels_.pack_cols({{data, nullptr, m.stride_k, m.stride_n},
                            col,
                            lanes,
                            kernels_.nr,
                            0,
                            gemm_.seg_k,
                            out});
      } else {
        kernels_.pack_rows({{data, nullptr, m.stride_n, m.stride_k},
                            col,
                            lanes,
                            kernels_.nr,
                            0,
                            gemm_.seg_k,
                            out});
      }
      out += seg_bytes;
    }
  }
}

RowTile RowGemmWorker::multiply(std::int64_t expert, std::int64_t row, std::int64_t r,
                                std::int64_t rows, std::int64_t block, std::int64_t first) {
  const std::int64_t col = block * kernels_.nr;
  const std::int64_t tile_bytes = kernels_.mr * kernels_.nr * kernels_.acc_bytes;
  RowTile tile{expert, row + r, col, {}};
  for (std::int64_t g = 0; g < gemm_.groups; ++g) {
    std::byte* acc = tile_.data() + g * tile_bytes;
    kernels_.product({a_.data() + r / kernels_.mr * a_panel_bytes_,
                      b_.data() + ((block - first) * gemm_.groups + g) * b_panel_bytes_,
                      gemm_.segments * seg_groups_, rows, Start::kZero, acc});
    tile.acc[g] = {acc, kernels_.nr, rows, std::min(kernels_.nr, gemm_.n - col)};
  }
  return tile;
}

std::int64_t col_task_rows(const ColGemm& gemm) {
  const std::int64_t mr = gemm.kernels->mr;
  return std::min(gemm.m, kColTaskRows / gemm.segments / mr * mr);
}
std::int64_t col_task_cols(const ColGemm& gemm) { return std::min(gemm.n, kColTaskCols); }

std::vector<ColTask> split_cols(const ColGemm& gemm, std::int64_t experts) {
  const std::int64_t rows = col_task_rows(gemm);
  const std::int64_t cols = col_task_cols(gemm);
  std::vector<ColTask> tasks;
  for (std::int64_t e = 0; e < experts; ++e) {
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

void ColGemmWorker::accumulate(const ColTask& task, std::int64_t row_begin, std::int64_t row_end) {
  const Kernels& k = kernels_;
  const std::int64_t m_panels = ceil_div(task.m1 - task.m0, k.mr);
  const std::int64_t n_panels = ceil_div(task.n1 - task.n0, k.nr);
  const std::int64_t tile_bytes = k.mr * k.nr * k.acc_bytes;
  if (row_begin == row_end) {
    std::memset(acc_.data(), 0,
                static_cast<std::size_t>(gemm_.segments * m_panels * n_panels * tile_bytes));
    return;
  }
  for (std::int64_t row = row_begin; row < row_end; row += kPanelRows) {
    const std::int64_t rows = std::min(kPanelRows, row_end - row);
    const std::int64_t groups = ceil_div(rows, k.k_group);
    const std::int64_t a_bytes = groups * k.mr * k.packed_bytes;
    const std::int64_t b_bytes = groups * k.nr * k.packed_bytes;
    std::byte* a = a_.data();
    for (std::int64_t s = 0; s < gemm_.segments; ++s) {
      for (std::int64_t m = task.m0; m < task.m1; m += k.mr, a += a_bytes) {
        k.pack_cols({gemm_.a, s * gemm_.m + m, std::min(k.mr, task.m1 - m), k.mr, row, rows, a});
      }
    }
    std::byte* b = b_.data();
    for (std::int64_t n = task.n0; n < task.n1; n += k.nr, b += b_bytes) {
      k.pack_cols({gemm_.b, n, std::min(k.nr, task.n1 - n), k.nr, row, rows, b});
    }
    const Start start = row == row_begin ? Start::kZero : Start::kAdd;
    std::byte* tile = acc_.data();
    for (std::int64_t j = 0; j < n_panels; ++j) {
      for (std::int64_t i = 0; i < gemm_.segments * m_panels; ++i, tile += tile_bytes) {
        const std::int64_t in_segment = i % m_panels * k.mr;
        k.product({a_.data() + i * a_bytes, b_.data() + j * b_bytes, groups,
                   std::min(k.mr, task.m1 - task.m0 - in_segment), start, tile});
      }
    }
  }
}

}  // namespace sonicmoe::cpu
