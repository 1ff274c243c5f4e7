#include "cuda/hopper/fp8/products.h"

#include <algorithm>

#include "core/fp8_layout.h"
#include "cuda/device/launch.h"
#include "cuda/hopper/fp8/kernels.h"
#include "cuda/hopper/fp8/params.h"
#include "cuda/hopper/fp8/quantize.h"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/schedules.h"
#include "cuda/hopper/tensor_maps.h"
#include "cuda/hopper/tiles.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kBlock = fp8::kBlock;

const void* find(Fp8Role role, ActivationKind kind) {
  for (const Fp8KernelEntry& entry : fp8_kernel_list()) {
    if (entry.role == role && entry.activation == kind) return entry.function;
  }
  throw Error(Status::kInternal, "a kernel is missing from this build.");
}

struct Launch {
  const Device& device;
  const Fp8RowProduct& product;
  cudaStream_t stream;

  const Fp8Matrices& weights() const { return product.weights; }

  template <class Params>
  void run(Fp8Role role, ActivationKind kind, const Params& params) const {
    const void* function = find(role, kind);
    allow_shared_memory(function);
    const std::int64_t clusters =
        clusters_of(device, kFp8Tile, most_tiles(product.groups, params.tiles));
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(kFp8Tile.cluster), 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(clusters * kFp8Tile.cluster));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = Fp8SharedLayout::kEnd;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    void* arguments[] = {const_cast<Params*>(&params)};
    check_cuda(cudaLaunchKernelExC(&config, function, arguments), "launching an FP8 product");
  }
};

/// Describes codes as rows (or, below, matrices) of 16-bit words of two codes each (fp8/shape.h).
Tensor words_of(const void* codes, std::int64_t rows, std::int64_t codes_in_row) {
  return tensor2(const_cast<void*>(codes), DType::kBF16, rows, codes_in_row / 2);
}
Tensor words_of(const Fp8Matrices& w, std::int64_t part) {
  const std::int64_t matrix = w.columns * w.depth;
  Tensor t = tensor3(const_cast<std::uint8_t*>(w.codes) + part * matrix, DType::kBF16, w.experts,
                     w.columns, w.depth / 2);
  t.stride[0] = w.parts * matrix / 2;
  return t;
}

Bias bias_of(const Tensor& bias) { return {bias.data, bias.stride[0], bias.stride[1]}; }

Fp8WeightScales weight_scales(const Fp8Matrices& w) {
  const std::int64_t blocks = w.columns / kBlock;
  Fp8WeightScales s{};
  s.data = w.scales;
  s.expert_stride = static_cast<std::int32_t>(w.expert_scales);
  s.column_stride = static_cast<std::int32_t>(w.column_scales);
  s.depth_stride = static_cast<std::int32_t>(w.depth_scales);
  const bool two = w.parts == 2;  // gate and up: the second unit of a tile is columns of up
  s.unit_stride = static_cast<std::int32_t>(two ? blocks * w.column_scales : w.column_scales);
  s.column_blocks = two ? INT_MAX : static_cast<std::int32_t>(blocks);
  return s;
}

Fp8GatherParams gathered(const Fp8RowProduct& product) {
  const Fp8Rows& rows = product.rows;
  return {rows.codes, rows.scales, product.index, static_cast<std::uint32_t>(rows.depth / 16),
          static_cast<std::int32_t>(rows.depth / kBlock)};
}

Fp8RowsOut rows_out(const Fp8Rows& rows) {
  return {rows.codes, rows.scales, static_cast<std::int32_t>(rows.depth),
          static_cast<std::int32_t>(rows.scale_stride)};
}

Fp8ElementsOut elements_out(const Tensor& rows) {
  return {static_cast<std::uint16_t*>(rows.data), rows.stride[0],
          rows.rank == 3 ? rows.stride[1] : 0};
}

Order order_of(const Fp8RowProduct& product) {
  if (product.index != nullptr) return gathered_order(product.groups.mean_rows());
  return product.weights.depth >= 1024 ? Order::kDynamic : Order::kStatic;
}

/// Fills the parameters that all products have. A tile has `column_step` columns of one matrix.
template <class Params>
void set_operands(const Launch& launch, int column_step, Params* params) {
  const Fp8Matrices& w = launch.weights();
  constexpr bool kByLane = decltype(params->epilogue)::kColumns == ColumnOrder::kByLane;
  for (std::int64_t part = 0; part < w.parts; ++part) {
    const Tensor words = words_of(w, part);
    params->b.map[part] = kByLane ? weight_map_by_lane(launch.device, words, kFp8Tile)
                                  : weight_map(launch.device, words, kFp8Tile);
    params->b.expert_groups = static_cast<std::int32_t>(words.stride[0] / words.stride[1] / 32);
  }
  const bool is_dynamic = order_of(launch.product) == Order::kDynamic;
  params->tiles = row_tiles(launch.product.groups, w.columns, column_step, w.depth / 2,
                            is_dynamic ? launch.product.tile_counter : nullptr);
  params->weight_scales = weight_scales(w);
}

void multiply(const Launch& launch, const Fp8Activate& e) {
  Fp8UpParams params{};
  set_operands(launch, launch.weights().parts == 2 ? kFp8Block : kFp8Tile.n, &params);
  params.producer = gathered(launch.product);
  Fp8ActParams& p = params.epilogue;
  p.a = rows_out(e.a);
  if (e.h_codes.codes != nullptr) {
    p.keep = Fp8KeptH::kCodes;
    p.h = rows_out(e.h_codes);
  } else if (e.h.data != nullptr) {
    p.keep = Fp8KeptH::kElements;
    p.h_elements = elements_out(e.h);
  }
  const bool gated = is_gated(e.activation.kind);
  p.bias[0] = bias_of(gated ? e.bias_gate : e.bias_up);
  p.bias[1] = bias_of(e.bias_up);
  p.scalars = scalars_of(e.activation);
  p.width = static_cast<std::int32_t>(launch.weights().columns);
  launch.run(Fp8Role::kUp, e.activation.kind, params);
}

void multiply(const Launch& launch, const Fp8ActivateGrad& e) {
  Fp8HiddenGradParams params{};
  set_operands(launch, kFp8Tile.n, &params);
  params.producer = gathered(launch.product);
  Fp8ActGradParams& p = params.epilogue;
  const bool codes = e.h_codes.codes != nullptr;
  constexpr std::int32_t kBoxRows = 16;  // of a warp
  p.h =
      rows_map(launch.device,
               codes ? words_of(e.h_codes.codes, e.h_codes.rows, e.h_codes.depth) : e.h, kBoxRows);
  p.h_scales = e.h_codes.scales;
  p.dh_codes = rows_out(e.dh_codes);
  p.dh = elements_out(e.dh);
  p.a = elements_out(e.a);
  p.row_weight = e.row_weight;
  p.score_parts = e.score_parts;
  p.score_tiles = e.score_tiles;
  p.width = static_cast<std::int32_t>(launch.weights().columns);
  p.alternates = e.layout == GateLayout::kInterleaved ? 1 : 0;
  p.scalars = scalars_of(e.activation);
  launch.run(codes ? Fp8Role::kHiddenGradOfCodes : Fp8Role::kHiddenGradOfElements,
             e.activation.kind, params);
}

void multiply(const Launch& launch, const StoreOutput& e) {
  const Fp8Rows& rows = launch.product.rows;
  const Fp8Matrices& w = launch.weights();
  Fp8DownParams params{};
  set_operands(launch, kFp8Tile.n, &params);
  params.tiles.raster_group = raster_group(w.columns, w.depth / 2);
  params.producer.rows =
      rows_map(launch.device, words_of(rows.codes, rows.rows, rows.depth), kFp8Tile.m);
  params.producer.scales =
      scales_map(launch.device, rows.scales, rows.depth / kBlock, rows.rows, kFp8ScaleRows);
  params.epilogue.out = ragged_map(launch.device, e.out);
  params.epilogue.bias = bias_of(e.bias);
  params.epilogue.row_scale = static_cast<const float*>(e.scale.data);
  params.epilogue.scale_stride = e.scale.stride[0];
  params.epilogue.width = static_cast<std::int32_t>(w.columns);
  launch.run(Fp8Role::kDown, ActivationKind::kSwiGLU, params);
}

void multiply_rows(const Device& device, const Fp8RowProduct& product, cudaStream_t stream) {
  const Launch launch{device, product, stream};
  std::visit([&](const auto& epilogue) { multiply(launch, epilogue); }, product.epilogue);
}

}  // namespace

const Fp8Engine kHopperFp8 = {
    .multiply_rows = &multiply_rows,
    .quantize_rows = &fp8_quantize_rows,
    .quantize_weights = &fp8_quantize_weights,
};

}  // namespace sonicmoe::cuda
