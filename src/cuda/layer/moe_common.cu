// Checks, tensor maps and tile lists that the passes of the layer share.
#include <algorithm>
#include <numbers>
#include <string>

#include "cuda/layer/moe.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kMaxExperts = 1024;
constexpr std::int64_t kMaxRowStride = std::int64_t{1} << 30;

[[noreturn]] void refuse(const std::string& sentence, Status status = Status::kUnsupported) {
  throw Error(status, sentence);
}

void check_aligned(const char* name, const Tensor& t) {
  if (reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) {
    refuse(std::string(name) + " is not 16-byte aligned but CUDA tensors must be.");
  }
}

}  // namespace

void check_weight(const char* name, const Tensor& t) {
  check_aligned(name, t);
  const bool last = t.stride[2] == 1;
  const bool middle = t.stride[1] == 1;
  const std::int64_t other = last ? t.stride[1] : t.stride[2];
  if (!last && !middle) {
    refuse(std::string(name) + " has strides " + std::to_string(t.stride[1]) + " and " +
           std::to_string(t.stride[2]) + " but CUDA needs one of its last two to be 1.");
  }
  if (other <= 0 || other % 8 != 0 || (t.shape[0] > 1 && (t.stride[0] <= 0 || t.stride[0] % 8))) {
    refuse(std::string(name) + " has strides " + std::to_string(t.stride[0]) + " and " +
           std::to_string(other) + " but CUDA needs positive multiples of 8 beside the 1.");
  }
}

namespace {

/// fp32 gradients are stored element by element: any strides serve.
void check_grad(const char* name, const Tensor& t) {
  if (t.data != nullptr && t.dtype != DType::kF32) check_weight(name, t);
}

/// H and dH alternate as paired weights do, so 16-bit gradients must alternate too.
void check_paired_grads(const Weights& grads) {
  const Tensor& gate = grads.gate;
  const Tensor& up = grads.up;
  const bool absent = gate.data == nullptr || up.data == nullptr;
  const bool floats = (gate.data == nullptr || gate.dtype == DType::kF32) &&
                      (up.data == nullptr || up.dtype == DType::kF32);
  if (floats) return;
  if (absent || !is_paired(gate, up)) {
    refuse("grads.gate has strides " + std::to_string(gate.stride[1]) + " and " +
           std::to_string(gate.stride[2]) + " and grads.up " + std::to_string(up.stride[1]) +
           " and " + std::to_string(up.stride[2]) +
           " but CUDA needs them to alternate along n as the paired weights do, or to be fp32.");
  }
  check_weight("grads.gate", pairs_of(gate));
}

}  // namespace

void check_problem(const Problem& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) {
    refuse(std::string("dtype is ") + dtype_name(p.dtype) + " but CUDA takes bf16 or f16.");
  }
  if (p.hidden % 8 != 0 || p.width % 8 != 0) {
    refuse("hidden is " + std::to_string(p.hidden) + " and width " + std::to_string(p.width) +
           " but CUDA needs multiples of 8.");
  }
  if (p.experts > kMaxExperts) {
    refuse("experts is " + std::to_string(p.experts) + " but CUDA takes at most " +
           std::to_string(kMaxExperts) + ".");
  }
}

void check_rows(const char* name, const Tensor& rows) {
  check_aligned(name, rows);
  if (rows.stride[1] != 1 ||
      (rows.shape[0] > 1 &&
       (rows.stride[0] <= 0 || rows.stride[0] % 8 != 0 || rows.stride[0] >= kMaxRowStride))) {
    refuse(std::string(name) + " has strides " + std::to_string(rows.stride[0]) + " and " +
           std::to_string(rows.stride[1]) +
           " but CUDA needs a positive multiple of 8 below 2^30 and a last stride of 1.");
  }
}

void check_weights(const Problem& p, const Weights& w) {
  const bool gated = is_gated(p.activation.kind);
  check_weight("down", w.down);
  if (gated && is_paired(w.gate, w.up)) {
    check_weight("gate", pairs_of(w.gate));
    return;
  }
  check_weight("up", w.up);
  if (!gated) return;
  check_weight("gate", w.gate);
  if (major_of(w.gate) != major_of(w.up)) {
    refuse("gate has strides " + std::to_string(w.gate.stride[1]) + " and " +
           std::to_string(w.gate.stride[2]) + " and up " + std::to_string(w.up.stride[1]) +
           " and " + std::to_string(w.up.stride[2]) +
           " but CUDA needs the same one of them to be 1.");
  }
}

void check_grads(const Problem& p, const Weights& weights, const Weights& grads) {
  check_grad("grads.down", grads.down);
  if (is_gated(p.activation.kind) && is_paired(weights.gate, weights.up)) {
    check_paired_grads(grads);
    return;
  }
  check_grad("grads.gate", grads.gate);
  check_grad("grads.up", grads.up);
}

bool is_paired(const Tensor& gate, const Tensor& up) {
  const auto* first = static_cast<const std::uint16_t*>(gate.data);
  return gate.data != nullptr && up.data == first + 1 && gate.dtype == up.dtype &&
         gate.stride[1] == 2 && std::equal(gate.stride, gate.stride + 3, up.stride);
}

Tensor pairs_of(const Tensor& gate) {
  Tensor t = gate;
  t.shape[1] *= 2;
  t.stride[1] = 1;
  return t;
}

Tensor h_rows(const Problem& p, const Weights& w, void* data) {
  const std::int64_t capacity = row_capacity(p);
  const bool gated = is_gated(p.activation.kind);
  if (gated && is_paired(w.gate, w.up)) return tensor2(data, p.dtype, capacity, 2 * p.width);
  return tensor3(data, p.dtype, capacity, gated ? 2 : 1, p.width);
}

ActivationScalars scalars_of(const Activation& activation) {
  if (activation.kind != ActivationKind::kSwiGLUOai) return {};
  const double alpha = activation.alpha == 0.0 ? 1.702 : activation.alpha;
  return {static_cast<float>(alpha),
          activation.limit == 0.0 ? 7.0f : static_cast<float>(activation.limit),
          static_cast<float>(-alpha * std::numbers::log2e)};
}

Major major_of(const Tensor& weight) { return weight.stride[2] == 1 ? Major::kK : Major::kMN; }

CUtensorMap weight_map(const Device& device, const Tensor& weight, const TileShape& shape) {
  const auto e = weight.shape[0];
  const MapDim experts{e, weight.stride[0], 1};
  if (major_of(weight) == Major::kK) {
    return encode_map(
        device, weight.dtype, weight.data,
        {{weight.shape[2], 1, kDepth}, {weight.shape[1], weight.stride[1], shape.n / 2}, experts});
  }
  return encode_map(device, weight.dtype, weight.data,
                    {{weight.shape[1], 1, 64},
                     {weight.shape[2], weight.stride[2], mn_box_depth(shape)},
                     experts});
}

CUtensorMap rows_map(const Device& device, const Tensor& rows, std::int32_t box_rows,
                     std::int32_t box_columns) {
  const bool parted = rows.rank == 3;
  const std::int64_t width = rows.shape[parted ? 2 : 1];
  const MapDim parts{parted ? rows.shape[1] : 1, parted ? rows.stride[1] : width, 1};
  return encode_map(device, rows.dtype, rows.data,
                    {{width, 1, box_columns}, parts, {rows.shape[0], rows.stride[0], box_rows}});
}

RaggedMap ragged_map(const Device& device, const Tensor& rows, std::int32_t box_columns) {
  const bool parted = rows.rank == 3;
  const std::int64_t capacity = rows.shape[0];
  const std::int64_t width = rows.shape[parted ? 2 : 1];
  const MapDim parts{parted ? rows.shape[1] : 1, parted ? rows.stride[1] : width, 1};
  // The address may leave the allocation: only addresses of clipped boxes are ever formed.
  const std::uintptr_t base =
      reinterpret_cast<std::uintptr_t>(rows.data) -
      static_cast<std::uintptr_t>(capacity * rows.stride[0] * kElementBytes);
  return {encode_map(device, rows.dtype, reinterpret_cast<const void*>(base),
                     {{width, 1, box_columns},
                      parts,
                      {capacity, rows.stride[0], 64},
                      {capacity + 1, rows.stride[0], 1}}),
          static_cast<std::int32_t>(capacity)};
}

Divisor divisor(std::int64_t by) {
  return {static_cast<std::uint32_t>(by),
          by == 1 ? ~0u : static_cast<std::uint32_t>((std::int64_t{1} << 32) / by)};
}

RowTiles::Params row_tiles(const Metadata& metadata, std::int64_t columns, int column_step,
                           std::int64_t depth, unsigned* counter) {
  RowTiles::Params tiles{};
  tiles.records = metadata.records;
  tiles.record_count = metadata.record_count;
  tiles.counter = counter;
  tiles.columns = static_cast<std::int32_t>(columns);
  tiles.column_tiles = static_cast<std::int32_t>((columns + column_step - 1) / column_step);
  tiles.column_step = column_step;
  tiles.k_tiles = static_cast<std::int32_t>((depth + kDepth - 1) / kDepth);
  tiles.k_parts = 1;
  tiles.band = 1;
  tiles.round = divisor(1);
  return tiles;
}

ExpertTiles::Params expert_tiles(const Metadata& metadata, const Tensor& matrices,
                                 const TileShape& shape) {
  ExpertTiles::Params tiles{};
  tiles.expert_begin = metadata.expert_begin;
  tiles.expert_rows = metadata.expert_rows;
  tiles.experts = static_cast<std::int32_t>(matrices.shape[0]);
  tiles.rows = static_cast<std::int32_t>(matrices.shape[1]);
  tiles.columns = static_cast<std::int32_t>(matrices.shape[2]);
  tiles.column_step = shape.n;
  tiles.column_tiles = static_cast<std::int32_t>((matrices.shape[2] + shape.n - 1) / shape.n);
  const std::int32_t ctas = (tiles.rows + shape.m - 1) / shape.m;
  const std::int32_t odd = ctas % 2;
  tiles.lines = ctas / 2;
  tiles.each = divisor(tiles.lines * tiles.column_tiles + odd * (tiles.column_tiles + 1) / 2);
  const bool columns_fastest = fast_columns(tiles.lines, tiles.column_tiles);
  tiles.columns_fastest = columns_fastest ? 1 : 0;
  tiles.group = divisor(columns_fastest ? tiles.column_tiles : 2 * tiles.lines + odd);
  return tiles;
}

CUtensorMap matrices_map(const Device& device, const Tensor& t) {
  const int fast = major_of(t) == Major::kK ? 2 : 1;
  const int slow = 3 - fast;
  return encode_map(
      device, t.dtype, t.data,
      {{t.shape[fast], 1, 64}, {t.shape[slow], t.stride[slow], 64}, {t.shape[0], t.stride[0], 1}});
}

std::int64_t mean_rows(const Problem& problem) { return row_capacity(problem) / problem.experts; }

std::int64_t most_tiles(const Problem& problem, const RowTiles::Params& tiles) {
  const std::int64_t rows = row_capacity(problem);
  const std::int64_t records = std::min(rows, rows / kRecordRows + problem.experts);
  return std::max<std::int64_t>(1, records * tiles.column_tiles);
}

}  // namespace sonicmoe::cuda
