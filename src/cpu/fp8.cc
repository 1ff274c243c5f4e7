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

/// Quantises columns [128 * block, 128 * (block + 1)) of a row.
void quantise_block(const QuantiseRows& job, std::int64_t row, std::int64_t block) {
  const auto* source = static_cast<const BF16*>(job.source.data);
  float values[kBlock];
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < kBlock; ++i) {
    values[i] = to_float(source[element_offset(job.source, row, block * kBlock + i)]);
    largest = std::max(largest, fp8::magnitude_of(values[i]));
  }
  const float scale = fp8::scale_of(largest);
  const float inverse = fp8::inverse_of(scale);
  std::uint8_t codes[kBlock];
  for (std::int64_t i = 0; i < kBlock; ++i) codes[i] = fp8::code_of(values[i], inverse);
  if (job.restored != nullptr) {
    BF16* out = static_cast<BF16*>(job.restored) + row * job.depth + block * kBlock;
    for (std::int64_t i = 0; i < kBlock; ++i) out[i] = restored(codes[i], scale);
  }
  if (job.coded.codes != nullptr) {
    const std::int64_t to = job.coded_row + row;
    std::copy_n(codes, kBlock, job.coded.codes + to * job.depth + block * kBlock);
    job.coded.scales[block * job.coded.scale_stride + to] = scale;
  }
}

/// A weight tensor (E, rows, cols), and where its codes and scales are written. The shapes below
/// are those of one expert; the pointers point to expert 0.
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
  const std::int64_t cols = w.shape[2];
  const std::int64_t across = cols / kBlock;
  const std::int64_t row0 = tile / across * kBlock;
  const std::int64_t col0 = tile % across * kBlock;
  const auto* source = static_cast<const BF16*>(w.data) + expert * w.stride[0];
  const auto value = [&](std::int64_t r, std::int64_t c) {
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
  const std::int64_t size = p.width * p.hidden;
  WeightJobs jobs;
  for (std::int64_t g = 0; g < gates; ++g) {
    jobs.job[jobs.count++] = {
        g + 1 == gates ? w.up : w.gate,
        base + at.up + g * size,
        base + at.up_t + g * p.width,
        gates * p.width,
        reinterpret_cast<float*>(base + at.up_s) + g * (size / (kBlock * kBlock)),
        gates * size};
  }
  jobs.job[jobs.count++] = {w.down,
                            base + at.down,
                            base + at.down_t,
                            p.hidden,
                            reinterpret_cast<float*>(base + at.down_s),
                            size};
  return jobs;
}

/// Dequantises one row of 128 x 128 blocks, which has 128 rows of `cols` codes and cols/128 scales.
void restore_tiles(const std::uint8_t* codes, const float* scales, std::int64_t cols, BF16* out) {
  for (std::int64_t r = 0; r < kBlock; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      out[r * cols + c] = restored(codes[r * cols + c], scales[c / kBlock]);
    }
  }
}

}  // namespace

void quantize_weights(const Problem& p, const Weights& weights, const Buffer& out,
                      const Exec& exec) {
  const WeightJobs jobs = weight_jobs(p, weights, out);
  const std::int64_t tiles = p.width / kBlock * (p.hidden / kBlock);
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
      for (std::int64_t b = 0; b < job.depth / kBlock; ++b) quantise_block(job, row, b);
    }
  });
}

void restore_rows(Team& team, const CodedRows& coded, std::int64_t rows, std::int64_t depth,
                  void* restored_rows) {
  team.run((rows + kRowTask - 1) / kRowTask, [&](std::int64_t task, std::int32_t) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowTask);
    for (std::int64_t row = task * kRowTask; row < end; ++row) {
      const std::uint8_t* codes = coded.codes + row * depth;
      BF16* out = static_cast<BF16*>(restored_rows) + row * depth;
      for (std::int64_t i = 0; i < depth; ++i) {
        out[i] = restored(codes[i], coded.scales[i / kBlock * coded.scale_stride + row]);
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
  // A task is one row of blocks: 128 of the E*G*n rows of gate and up, or of the E*d rows of down.
  const std::int64_t up_tasks = p.experts * gates * p.width / kBlock;
  const std::int64_t tasks = up_tasks + p.experts * p.hidden / kBlock;
  team.run(tasks, [&](std::int64_t task, std::int32_t) {
    const bool is_up = task < up_tasks;
    const std::int64_t cols = is_up ? p.hidden : p.width;
    const std::int64_t i = is_up ? task : task - up_tasks;
    const auto* scales = reinterpret_cast<const float*>(base + (is_up ? at.up_s : at.down_s));
    restore_tiles(base + (is_up ? at.up : at.down) + i * kBlock * cols,
                  scales + i * (cols / kBlock), cols, (is_up ? up : down) + i * kBlock * cols);
  });
}

}  // namespace sonicmoe::cpu
