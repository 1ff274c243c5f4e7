#include "cpu/fp8.h"

#include <algorithm>
#include <cstddef>

#include "core/fp8_layout.h"
#include "core/fp8_quantize.h"
#include "core/numeric.h"
#include "cpu/backend.h"

namespace sonicmoe::cpu {
namespace {

using fp8::kBlock;

constexpr std::int64_t kRowTask = 64;
/// Approximate cost of quantising one element, in flops as thread_count() counts them.
constexpr double kFlopsPerElement = 40.0;

BF16 restored(std::uint8_t code, float scale) { return to_bf16(fp8::value_of(code) * scale); }

/// Columns of a row that share a scale: at most kBlock.
struct ColumnBlock {
  std::int64_t first;
  std::int64_t count;
};
/// Block `block` of a row of `parts` parts of `width` columns.
ColumnBlock column_block(std::int64_t width, std::int64_t block) {
  const std::int64_t blocks = fp8::blocks_of(width);
  const std::int64_t within = block % blocks * kBlock;
  return {block / blocks * width + within, std::min(kBlock, width - within)};
}

void quantise_block(const QuantiseRows& job, std::int64_t row, std::int64_t block) {
  const auto* source = static_cast<const BF16*>(job.source.data);
  const auto [first, count] = column_block(job.width, block);
  const std::int64_t depth = job.parts * job.width;
  float values[kBlock];
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = to_float(source[element_offset(job.source, row, first + i)]);
    largest = std::max(largest, fp8::magnitude_of(values[i]));
  }
  const float scale = fp8::scale_of(largest);
  const float inverse = fp8::inverse_of(scale);
  std::uint8_t codes[kBlock];
  for (std::int64_t i = 0; i < count; ++i) codes[i] = fp8::code_of(values[i], inverse);
  if (job.restored != nullptr) {
    BF16* out = static_cast<BF16*>(job.restored) + row * depth + first;
    for (std::int64_t i = 0; i < count; ++i) out[i] = restored(codes[i], scale);
  }
  if (job.coded.codes != nullptr) {
    const std::int64_t to = job.coded_row + row;
    std::copy_n(codes, count, job.coded.codes + to * depth + first);
    job.coded.scales[block * job.coded.scale_stride + to] = scale;
  }
}

/// A weight tensor (E, rows, cols), and where its codes and scales are written. The shapes below
/// are those of one expert, with rows and cols rounded up to whole blocks; the pointers point to
/// expert 0.
struct WeightJob {
  Tensor source;
  std::uint8_t* codes;       ///< (rows, cols), rows contiguous
  std::uint8_t* transposed;  ///< (cols, rows), transposed_stride elements from row to row
  std::int64_t transposed_stride;
  float* scales;              ///< (rows/128, cols/128)
  std::int64_t expert_codes;  ///< codes from one expert to the next, in both arrays of codes
};

void quantise_tile(const WeightJob& job, std::int64_t expert, std::int64_t tile) {
  const Tensor& w = job.source;
  const std::int64_t across = fp8::blocks_of(w.shape[2]);
  const std::int64_t cols = across * kBlock;
  const std::int64_t row0 = tile / across * kBlock;
  const std::int64_t col0 = tile % across * kBlock;
  const auto* source = static_cast<const BF16*>(w.data) + expert * w.stride[0];
  const auto value = [&](std::int64_t r, std::int64_t c) {
    if (row0 + r >= w.shape[1] || col0 + c >= w.shape[2]) return 0.0f;
    return to_float(source[(row0 + r) * w.stride[1] + (col0 + c) * w.stride[2]]);
  };
  std::uint32_t largest = 0;
  for (std::int64_t r = 0; r < kBlock; ++r) {
    for (std::int64_t c = 0; c < kBlock; ++c) {
      largest = std::max(largest, fp8::magnitude_of(value(r, c)));
    }
  }
  const float scale = fp8::scale_of(largest);
  const float inverse = fp8::inverse_of(scale);
  job.scales[expert * (job.expert_codes / (kBlock * kBlock)) + tile] = scale;
  std::uint8_t* codes = job.codes + expert * job.expert_codes;
  std::uint8_t* transposed = job.transposed + expert * job.expert_codes;
  for (std::int64_t r = 0; r < kBlock; ++r) {
    for (std::int64_t c = 0; c < kBlock; ++c) {
      const std::uint8_t code = fp8::code_of(value(r, c), inverse);
      codes[(row0 + r) * cols + col0 + c] = code;
      transposed[(col0 + c) * job.transposed_stride + row0 + r] = code;
    }
  }
}

struct WeightJobs {
  WeightJob job[3];
  std::int64_t count = 0;
};

WeightJobs weight_jobs(const Problem& p, const Weights& w, const Buffer& out) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  auto* base = static_cast<std::uint8_t*>(out.data);
  const std::int64_t gates = gate_factor(p.activation.kind);
  const std::int64_t hidden = fp8::whole_blocks(p.hidden), width = fp8::whole_blocks(p.width);
  const std::int64_t size = width * hidden;
  WeightJobs jobs;
  for (std::int64_t g = 0; g < gates; ++g) {
    jobs.job[jobs.count++] = {
        g + 1 == gates ? w.up : w.gate,
        base + at.up + g * size,
        base + at.up_t + g * width,
        gates * width,
        reinterpret_cast<float*>(base + at.up_s) + g * (size / (kBlock * kBlock)),
        gates * size};
  }
  jobs.job[jobs.count++] = {
      w.down, base + at.down, base + at.down_t, hidden, reinterpret_cast<float*>(base + at.down_s),
      size};
  return jobs;
}

/// Dequantises `rows` rows of one row of blocks. A row has `cols` codes and their padding to whole
/// blocks; all rows have the same scales.
void restore_tiles(const std::uint8_t* codes, const float* scales, std::int64_t rows,
                   std::int64_t cols, BF16* out) {
  const std::int64_t stride = fp8::whole_blocks(cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      out[r * cols + c] = restored(codes[r * stride + c], scales[c / kBlock]);
    }
  }
}

}  // namespace

void quantize_weights(const Problem& p, const Weights& weights, const Buffer& out,
                      const Exec& exec) {
  const WeightJobs jobs = weight_jobs(p, weights, out);
  const std::int64_t tiles = fp8::blocks_of(p.width) * fp8::blocks_of(p.hidden);
  const std::int64_t tasks = p.experts * jobs.count * tiles;
  const double elements = static_cast<double>(tasks * kBlock) * kBlock;
  Team team(thread_count(exec, kFlopsPerElement * elements), tasks);
  team.run(tasks, [&](std::int64_t task, std::int32_t) {
    const std::int64_t matrix = task / tiles;
    quantise_tile(jobs.job[matrix % jobs.count], matrix / jobs.count, task % tiles);
  });
}

CodedRows kept_h_rows(const Problem& p, const Buffer& h) {
  const fp8::RowsLayout at = fp8::kept_h_layout(p, row_capacity(p));
  auto* base = static_cast<std::uint8_t*>(h.data);
  return {base + at.codes, reinterpret_cast<float*>(base + at.scales), at.scale_stride};
}

void quantise_rows(Team& team, const QuantiseRows& job) {
  team.run((job.rows + kRowTask - 1) / kRowTask, [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = std::min(job.rows, (task + 1) * kRowTask);
    for (std::int64_t row = task * kRowTask; row < end; ++row) {
      for (std::int64_t b = 0; b < job.parts * fp8::blocks_of(job.width); ++b) {
        quantise_block(job, row, b);
      }
    }
  });
}

void restore_rows(Team& team, const CodedRows& coded, std::int64_t rows, std::int64_t parts,
                  std::int64_t width, void* restored_rows) {
  const std::int64_t depth = parts * width;
  team.run((rows + kRowTask - 1) / kRowTask, [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowTask);
    for (std::int64_t row = task * kRowTask; row < end; ++row) {
      const std::uint8_t* codes = coded.codes + row * depth;
      BF16* out = static_cast<BF16*>(restored_rows) + row * depth;
      for (std::int64_t b = 0; b < parts * fp8::blocks_of(width); ++b) {
        const auto [first, count] = column_block(width, b);
        const float scale = coded.scales[b * coded.scale_stride + row];
        for (std::int64_t i = first; i < first + count; ++i) out[i] = restored(codes[i], scale);
      }
    }
  });
}

std::int64_t restored_weights_elements(const Problem& p) {
  return (gate_factor(p.activation.kind) + 1) * p.experts * p.width * p.hidden;
}

Weights restored_weights(const Problem& p, const Weights& weights, void* memory) {
  const std::int64_t gates = gate_factor(p.activation.kind);
  const std::int64_t size = p.width * p.hidden;
  auto* first = static_cast<BF16*>(memory);
  Weights views = weights;
  const auto part = [&](std::int64_t g) {
    return Tensor{
        first + g * size, p.dtype, 3, {p.experts, p.width, p.hidden}, {gates * size, p.hidden, 1}};
  };
  if (gates == 2) views.gate = part(0);
  views.up = part(gates - 1);
  views.down = tensor3(first + gates * p.experts * size, p.dtype, p.experts, p.hidden, p.width);
  return views;
}

void restore_weights(Team& team, const Problem& p, const Buffer& fp8_weights,
                     const Weights& views) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  const auto* base = static_cast<const std::uint8_t*>(fp8_weights.data);
  const std::int64_t gates = gate_factor(p.activation.kind);
  auto* up = static_cast<BF16*>(gates == 2 ? views.gate.data : views.up.data);
  auto* down = static_cast<BF16*>(views.down.data);
  // A task is one row of blocks of one of the E*G matrices of gate and up, or of the E of down.
  const std::int64_t up_tasks = p.experts * gates * fp8::blocks_of(p.width);
  const std::int64_t tasks = up_tasks + p.experts * fp8::blocks_of(p.hidden);
  team.run(tasks, [&](std::int64_t task, std::int32_t) {
    const bool is_up = task < up_tasks;
    const std::int64_t rows = is_up ? p.width : p.hidden;
    const std::int64_t cols = is_up ? p.hidden : p.width;
    const std::int64_t i = is_up ? task : task - up_tasks;
    const std::int64_t matrix = i / fp8::blocks_of(rows);
    const std::int64_t first = i % fp8::blocks_of(rows) * kBlock;
    const auto* scales = reinterpret_cast<const float*>(base + (is_up ? at.up_s : at.down_s));
    restore_tiles(base + (is_up ? at.up : at.down) + i * kBlock * fp8::whole_blocks(cols),
                  scales + i * fp8::blocks_of(cols), std::min(kBlock, rows - first), cols,
                  (is_up ? up : down) + (matrix * rows + first) * cols);
  });
}

}  // namespace sonicmoe::cpu
