#include "cuda/hopper/fp8/products.h"

#include <climits>

#include "cuda/device/launch.h"
#include "cuda/fp8/words.h"
#include "cuda/hopper/choices.h"
#include "cuda/hopper/fp8/kernels.h"
#include "cuda/hopper/fp8/params.h"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/schedules.h"
#include "cuda/hopper/tensor_maps.h"

namespace sonicmoe::cuda {
namespace {

const void* find(Fp8Role role, ActivationKind kind) {
  for (const Fp8KernelEntry& entry : fp8_kernel_list()) {
    if (entry.role == role && entry.activation == kind) return entry.function;
  }
  throw Error(Status::kInternal, "a kernel is missing from this build.");
}

struct Launch {
  const Device& device;
  const RowProduct& product;
  cudaStream_t stream;

  const WeightOperand& weights() const { return product.weights; }
  std::int64_t columns() const { return product.weights.first.shape[1]; }
  /// K, in codes.
  std::int64_t depth() const { return product.weights.first.shape[2]; }
  bool two_parts() const { return product.weights.parts == WeightParts::kSideBySide; }

  template <class Params>
  void run(Fp8Role role, ActivationKind kind, const Params& params) const {
    const void* function = find(role, kernel_kind(kind));
    allow_shared_memory(function);
    launch_clusters(
        device, function,
        {kFp8Tile, Fp8SharedLayout::kEnd, product.groups.most_tiles(params.tiles.column_tiles)},
        &params, stream);
  }
};

Fp8WeightScales weight_scales(const Launch& launch) {
  const WeightScales& from = launch.weights().scales;
  const bool two = launch.two_parts();  // the second unit of a tile is columns of up
  Fp8WeightScales s{};
  s.data = from.data;
  s.expert_stride = static_cast<std::int32_t>(from.expert_stride);
  s.column_stride = static_cast<std::int32_t>(from.column_stride);
  s.depth_stride = static_cast<std::int32_t>(from.depth_stride);
  s.unit_stride = static_cast<std::int32_t>(two ? from.part_stride : from.column_stride);
  s.column_blocks = two ? INT_MAX : static_cast<std::int32_t>(launch.columns() / kScaleBlock);
  return s;
}

Fp8GatherParams gathered(const RowOperand& rows) {
  const std::int64_t depth = rows.rows.shape[1];
  return {static_cast<const std::uint8_t*>(rows.rows.data), rows.scales.data, rows.index,
          static_cast<std::uint32_t>(depth / 16), static_cast<std::int32_t>(depth / kScaleBlock)};
}

Fp8RowsOut rows_out(const CodedRows& rows) {
  return {static_cast<std::uint8_t*>(rows.codes.data), rows.scales.data,
          static_cast<std::int32_t>(rows.codes.stride[0]),
          static_cast<std::int32_t>(rows.scales.block_stride)};
}

Fp8ElementsOut elements_out(const Tensor& rows) {
  return {static_cast<std::uint16_t*>(rows.data), rows.stride[0],
          rows.rank == 3 ? rows.stride[1] : 0};
}

Order order_of(const Launch& launch) {
  if (launch.product.rows.index != nullptr) {
    return gathered_order(launch.product.groups.mean_rows());
  }
  return ordered_order(launch.depth());
}

std::int32_t blocks_of(std::int64_t width) {
  return static_cast<std::int32_t>(fp8::blocks_of(width));
}

/// The map of one part of operand B, in 16-bit words.
template <class Params>
void set_b(const Launch& launch, const Tensor& words, int part, OperandBMaps* b) {
  constexpr bool kByLane = decltype(Params::epilogue)::kColumns == ColumnOrder::kByLane;
  b->map[part] = kByLane ? weight_map_by_lane(launch.device, words, kFp8Tile)
                         : weight_map(launch.device, words, kFp8Tile);
  b->expert_groups = static_cast<std::int32_t>(words.stride[0] / words.stride[1] / 32);
}

/// Appends the k tiles of the product's low-rank term, if it has one.
template <class Params>
void set_low_rank(const Launch& launch, Params* params) {
  if (!launch.product.low_rank) return;
  const LowRankTerm& term = *launch.product.low_rank;
  params->low_rank.inner.rows = rows_map(launch.device, term.inner, kFp8Tile.m);
  for (int part = 0; part < 2; ++part) {
    if (term.outer[part].data == nullptr) continue;
    set_b<Params>(launch, term.outer[part], part, &params->low_rank.outer);
  }
  params->tiles.low_rank_k_tiles =
      static_cast<std::int32_t>((term.inner.shape[1] + kDepth - 1) / kDepth);
}

/// Fills the parameters that all products have. A tile has `column_step` columns of one matrix.
template <class Params>
void set_operands(const Launch& launch, int column_step, Params* params) {
  const WeightOperand& w = launch.weights();
  for (int part = 0; part < (launch.two_parts() ? 2 : 1); ++part) {
    set_b<Params>(launch, words_of(part == 0 ? w.first : w.second), part, &params->b);
  }
  const bool is_dynamic = order_of(launch) == Order::kDynamic;
  params->tiles =
      row_tiles(launch.product.groups, launch.columns(), column_step, launch.depth() / 2,
                is_dynamic ? launch.product.hints.tile_counter : nullptr);
  params->weight_scales = weight_scales(launch);
  set_low_rank(launch, params);
}

void multiply(const Launch& launch, const Activate& e) {
  Fp8ActivateGemmParams params{};
  set_operands(launch, launch.two_parts() ? kFp8Block : kFp8Tile.n, &params);
  params.producer = gathered(launch.product.rows);
  Fp8ActivateParams& p = params.epilogue;
  p.a = rows_out(e.a.codes);
  if (e.h.codes.codes.data != nullptr) {
    p.keep = Fp8KeptH::kCodes;
    p.h = rows_out(e.h.codes);
  } else if (e.h.elements.data != nullptr) {
    p.keep = Fp8KeptH::kElements;
    p.h_elements = elements_out(e.h.elements);
  }
  if (e.a.elements.data != nullptr) p.a_elements = elements_out(e.a.elements);
  p.bias[0] = bias_of(e.layout == GateLayout::kNone ? e.bias_up : e.bias_gate);
  p.bias[1] = bias_of(e.bias_up);
  p.scalars = scalars_of(e.activation);
  const std::int64_t width = e.a.codes.codes.shape[1];
  p.width = static_cast<std::int32_t>(width);
  p.blocks = blocks_of(width);
  launch.run(Fp8Role::kActivate, e.activation.kind, params);
}

void multiply(const Launch& launch, const ActivateGrad& e) {
  Fp8ActivateGradGemmParams params{};
  set_operands(launch, kFp8Tile.n, &params);
  params.producer = gathered(launch.product.rows);
  Fp8ActivateGradParams& p = params.epilogue;
  const bool codes = e.h.codes.codes.data != nullptr;
  constexpr std::int32_t kBoxRows = 16;  // of a warp
  p.h = rows_map(launch.device, codes ? words_of(e.h.codes.codes) : e.h.elements, kBoxRows);
  p.h_scales = e.h.codes.scales.data;
  p.dh_codes = rows_out(e.dh.codes);
  p.dh = elements_out(e.dh.elements);
  p.a = elements_out(e.a);
  p.row_weight = e.row_weight;
  p.score_parts = e.score_parts;
  p.score_tiles = e.score_tiles;
  p.width = static_cast<std::int32_t>(e.a.shape[1]);
  p.blocks = blocks_of(e.a.shape[1]);
  p.interleaved = e.layout == GateLayout::kInterleaved ? 1 : 0;
  p.scalars = scalars_of(e.activation);
  launch.run(codes ? Fp8Role::kActivateGradOfCodes : Fp8Role::kActivateGradOfElements,
             e.activation.kind, params);
}

void multiply(const Launch& launch, const StoreOutput& e) {
  const RowOperand& rows = launch.product.rows;
  Fp8StoreGemmParams params{};
  set_operands(launch, kFp8Tile.n, &params);
  params.tiles.raster_group = raster_group(launch.columns(), launch.depth() / 2);
  params.producer.rows = rows_map(launch.device, words_of(rows.rows), kFp8Tile.m);
  params.producer.scales = scales_map(launch.device, rows.scales.data, launch.depth() / kScaleBlock,
                                      rows.rows.shape[0], kFp8ScaleRows);
  params.epilogue.out = ragged_map(launch.device, e.out);
  params.epilogue.bias = bias_of(e.bias);
  params.epilogue.row_scale = static_cast<const float*>(e.scale.data);
  params.epilogue.scale_stride = e.scale.stride[0];
  params.epilogue.width = static_cast<std::int32_t>(e.out.shape[1]);
  launch.run(Fp8Role::kStore, kNoActivation, params);
}

}  // namespace

void fp8_multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream) {
  const Launch launch{device, product, stream};
  std::visit([&](const auto& epilogue) { multiply(launch, epilogue); }, product.epilogue);
}

}  // namespace sonicmoe::cuda
