// Row products on Hopper: A, Y, dH, dX~ and the grouped GEMM.
#include <algorithm>

#include "cuda/hopper/choices.h"
#include "cuda/hopper/fp8/products.h"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/products.h"
#include "cuda/hopper/schedules.h"
#include "cuda/hopper/tensor_maps.h"

namespace sonicmoe::cuda {
namespace {

struct Launch {
  const Device& device;
  const RowProduct& product;
  cudaStream_t stream;

  const WeightOperand& weights() const { return product.weights; }
  std::int64_t columns() const { return product.weights.first.shape[1]; }
  /// K of one part of the weights.
  std::int64_t depth() const { return product.weights.first.shape[2]; }
  bool is_narrow() const { return columns() <= kFewColumns; }
  std::int64_t mean_rows() const { return product.groups.mean_rows(); }
  unsigned* counter(const Tiling& tiling) const {
    return tiling.counter(product.hints.tile_counter);
  }
  KernelKey key(Role role, const Tiling& tiling, ActivationKind kind) const {
    return {role, product.dtype, tiling.tile, major_of(weights().first), kernel_kind(kind)};
  }
  template <class Params>
  void run(const KernelKey& kernel, const Params& params) const {
    launch_product(device, find_kernel(kernel), &params,
                   product.groups.most_tiles(params.tiles.column_tiles), stream);
  }
};

GatherRowsParams gathered(const RowOperand& operand, std::int64_t width) {
  return {operand.rows.data, operand.index,
          static_cast<std::int32_t>(operand.rows.stride[0] * kElementBytes),
          static_cast<std::int32_t>(width), operand.arrivals};
}

/// Appends the k tiles of the product's low-rank term, if it has one.
template <class Params>
void set_low_rank(const Launch& launch, const TileShape& shape, Params* params) {
  if (!launch.product.low_rank) return;
  const LowRankTerm& term = *launch.product.low_rank;
  LowRankParams& low = params->low_rank;
  low.inner.rows = rows_map(launch.device, term.inner, shape.m);
  for (int part = 0; part < 2; part++) {
    if (term.outer[part].data == nullptr) continue;
    low.outer.map[part] = weight_map(launch.device, term.outer[part], shape);
  }
  params->tiles.low_rank_k_tiles =
      static_cast<std::int32_t>((term.inner.shape[1] + kDepth - 1) / kDepth);
}

void multiply(const Launch& launch, const Activate& e) {
  const WeightOperand& w = launch.weights();
  const bool interleaved = e.layout == GateLayout::kInterleaved;
  const bool split = e.layout == GateLayout::kConcatenated;
  const Tiling tiling = gathered_tiling(launch.mean_rows());
  const TileShape shape = tiling.shape();
  ActivateGemmParams params{};
  params.producer = gathered(launch.product.rows, launch.depth());
  params.b.map[0] = weight_map(launch.device, w.first, shape);
  if (split) params.b.map[1] = weight_map(launch.device, w.second, shape);
  params.tiles = row_tiles(launch.product.groups, launch.columns(), split ? shape.n / 2 : shape.n,
                           launch.depth(), launch.counter(tiling));
  set_low_rank(launch, shape, &params);
  params.epilogue.keep_h = e.h.elements.data != nullptr ? 1 : 0;
  if (params.epilogue.keep_h != 0) params.epilogue.h = ragged_map(launch.device, e.h.elements);
  params.epilogue.a = ragged_map(launch.device, e.a.elements);
  params.epilogue.bias[0] = bias_of(e.layout == GateLayout::kNone ? e.bias_up : e.bias_gate);
  params.epilogue.bias[1] = bias_of(e.bias_up);
  params.epilogue.scalars = scalars_of(e.activation);
  params.epilogue.width = static_cast<std::int32_t>(e.a.elements.shape[1]);
  launch.run(launch.key(interleaved ? Role::kActivateInterleaved : Role::kActivate, tiling,
                        e.activation.kind),
             params);
}

/// The tiles of dH. dX~ is launched when the first `early_release` tiles are in memory, and runs
/// beside the other tiles. `early_release` is a number of whole waves. The tiles of the last wave
/// may be split in two (RasterOrder::kSplitLastWave); so either all of them are early or none,
/// however few rows are routed.
struct HiddenGradTiles {
  Tiling tiling;
  RowTilesParams params;
  std::int64_t clusters;
  std::int64_t early_release;  // tiles; 0: none

  std::int32_t ctas() const { return static_cast<std::int32_t>(clusters * tiling.shape().cluster); }
};

HiddenGradTiles hidden_grad_tiles(const Device& device, const RowProduct& product) {
  const std::int64_t rows = product.groups.mean_rows();
  const std::int64_t columns = product.weights.first.shape[1];
  HiddenGradTiles tiles{};
  tiles.tiling = hidden_grad_tiling(rows);
  const TileShape shape = tiles.tiling.shape();
  tiles.params = row_tiles(product.groups, columns, shape.n, product.weights.first.shape[2],
                           tiles.tiling.counter(product.hints.tile_counter));
  tiles.clusters = clusters_of(device, shape, product.groups.most_tiles(tiles.params.column_tiles));
  if (splits_last_wave(rows)) tiles.params.wave = divisor(tiles.clusters);
  // Early release is faster only if a cluster has few tiles, and if experts are not narrow: with
  // narrow experts dX~ would take the memory bandwidth that the remaining tiles of dH need.
  const std::int64_t cta_tiles = product.groups.capacity / kRecordRows * tiles.params.column_tiles;
  const std::int64_t waves = cta_tiles / shape.cluster / tiles.clusters;
  const bool releases = product.hints.release_counter != nullptr && columns >= kNarrowWidth &&
                        waves < kEarlyReleaseWaves;
  tiles.early_release = releases ? waves / 4 * tiles.clusters : 0;
  return tiles;
}

/// The number of first tiles of dX~ that read only rows of the early tiles of dH. Of the records of
/// these early tiles, 2 are left out because the last pair may be computed in part, and 2 *
/// raster_group because a group of dX~ visits all of its pairs before the next tile of columns.
std::int64_t early_tiles(const HiddenGradTiles& grad, const RowTilesParams& tiles,
                         const TileShape& shape) {
  const std::int64_t cta_tiles = grad.early_release * grad.tiling.shape().cluster;
  const std::int64_t records = cta_tiles / grad.params.column_tiles - 2 - 2 * tiles.raster_group;
  return std::max<std::int64_t>(0, records * tiles.column_tiles / shape.cluster);
}

void multiply(const Launch& launch, const ActivateGrad& e) {
  const HiddenGradTiles tiles = hidden_grad_tiles(launch.device, launch.product);
  const TileShape shape = tiles.tiling.shape();
  ActivateGradGemmParams params{};
  params.producer = gathered(launch.product.rows, launch.depth());
  params.b.map[0] = weight_map(launch.device, launch.weights().first, shape);
  params.tiles = tiles.params;
  set_low_rank(launch, shape, &params);
  params.early_release_tiles = static_cast<std::int32_t>(tiles.early_release);
  params.release_count = launch.product.hints.release_counter;
  params.epilogue.h_in = rows_map(launch.device, e.h.elements, shape.m, kGradColumns);
  params.epilogue.dh = ragged_map(launch.device, e.dh.elements, kGradColumns);
  params.epilogue.a = ragged_map(launch.device, e.a, kGradColumns);
  params.epilogue.row_weight = e.row_weight;
  params.epilogue.score_parts = e.score_parts;
  params.epilogue.score_tiles = e.score_tiles;
  params.epilogue.width = static_cast<std::int32_t>(launch.columns());
  params.epilogue.scalars = scalars_of(e.activation);
  const bool interleaved = e.layout == GateLayout::kInterleaved;
  launch.run(launch.key(interleaved ? Role::kActivateGradInterleaved : Role::kActivateGrad,
                        tiles.tiling, e.activation.kind),
             params);
}

void set_start(const Launch& launch, const TileShape& shape, StoreGemmParams* params) {
  const LaunchHints& hints = launch.product.hints;
  if (hints.start == Start::kIndependent) params->begins = Begins::kIndependent;
  if (hints.start != Start::kWithRowsOf) return;
  const HiddenGradTiles before = hidden_grad_tiles(launch.device, *hints.source);
  params->early_start_tiles = static_cast<std::int32_t>(early_tiles(before, params->tiles, shape));
  if (params->early_start_tiles == 0) return;
  params->begins = Begins::kEarly;
  params->release_count = hints.source->hints.release_counter;
  params->early_release_ctas = before.ctas();
}

StoreRowsParams store_params(const Launch& launch, const StoreOutput& e) {
  StoreRowsParams params{};
  params.out = ragged_map(launch.device, e.out);
  params.bias = bias_of(e.bias);
  params.row_scale = static_cast<const float*>(e.scale.data);
  params.scale_stride = e.scale.stride[0];
  params.factor = e.factor;
  params.width = static_cast<std::int32_t>(launch.columns());
  return params;
}

/// Rows in expert order, loaded by TMA.
void multiply_ordered(const Launch& launch, const StoreOutput& e) {
  const WeightOperand& w = launch.weights();
  const bool two = w.parts == WeightParts::kOneAfterOther;
  const std::int64_t depth = launch.depth() * (two ? 2 : 1);
  const bool scaled = e.scales() || launch.is_narrow();  // there are no other narrow kernels
  const Tiling tiling = launch.is_narrow() ? narrow_tiling(launch.mean_rows())
                        : scaled           ? scaled_row_tiling(depth)
                                 : row_tiling(launch.columns(), depth, launch.mean_rows());
  const TileShape shape = tiling.shape();
  StoreGemmParams params{};
  params.producer.rows = rows_map(launch.device, launch.product.rows.rows, shape.m);
  params.b.map[0] = weight_map(launch.device, w.first, shape);
  if (two) params.b.map[1] = weight_map(launch.device, w.second, shape);
  params.tiles = row_tiles(launch.product.groups, launch.columns(), shape.n, launch.depth(),
                           launch.counter(tiling));
  params.tiles.k_parts = two ? 2 : 1;
  set_low_rank(launch, shape, &params);
  params.tiles.raster_group = raster_group(launch.columns(), depth);
  set_start(launch, shape, &params);
  params.epilogue = store_params(launch, e);
  launch.run(launch.key(scaled ? Role::kStoreScaled : Role::kStore, tiling, kNoActivation), params);
}

void multiply_gathered(const Launch& launch, const StoreOutput& e) {
  const bool scaled = e.scales() || launch.is_narrow();  // these are always narrow
  const Tiling tiling =
      scaled ? narrow_tiling(launch.mean_rows()) : gathered_tiling(launch.mean_rows());
  const TileShape shape = tiling.shape();
  GatheredStoreGemmParams params{};
  params.producer = gathered(launch.product.rows, launch.depth());
  params.b.map[0] = weight_map(launch.device, launch.weights().first, shape);
  params.tiles = row_tiles(launch.product.groups, launch.columns(), shape.n, launch.depth(),
                           launch.counter(tiling));
  set_low_rank(launch, shape, &params);
  params.epilogue = store_params(launch, e);
  launch.run(
      launch.key(scaled ? Role::kGatheredStoreScaled : Role::kGatheredStore, tiling, kNoActivation),
      params);
}

void multiply(const Launch& launch, const StoreOutput& e) {
  if (launch.product.rows.index == nullptr) {
    multiply_ordered(launch, e);
  } else {
    multiply_gathered(launch, e);
  }
}

}  // namespace

void hopper_multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream) {
  if (product.rows.scales.data != nullptr) {
    fp8_multiply_rows(device, product, stream);
    return;
  }
  const Launch launch{device, product, stream};
  std::visit([&](const auto& epilogue) { multiply(launch, epilogue); }, product.epilogue);
}

}  // namespace sonicmoe::cuda
