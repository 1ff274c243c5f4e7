// Depth products on Hopper: the weight gradients.
#include <algorithm>

#include "cuda/hopper/choices.h"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/products.h"
#include "cuda/hopper/schedules.h"
#include "cuda/hopper/tensor_maps.h"

namespace sonicmoe::cuda {
namespace {

StoreExpertParams store_params(const Device& device, const DepthProduct& product,
                               const ExpertTilesParams& tiles) {
  StoreExpertParams params{};
  params.rows = tiles.rows;
  params.columns = tiles.columns;
  params.border = product.parts == GradParts::kHalves ? tiles.columns / 2
                                                      : tiles.column_tiles * tiles.column_step;
  params.alternate = product.parts == GradParts::kAlternate ? 1 : 0;
  for (int part = 0; part < 2; part++) {
    const Tensor& out = product.out[part];
    if (out.data == nullptr) continue;
    if (out.dtype == DType::kF32) {
      params.mode =
          product.mode == GradMode::kAccumulate ? GradStore::kAccumulate : GradStore::kFloat;
      params.floats[part].data = static_cast<float*>(out.data);
      std::copy_n(out.stride, 3, params.floats[part].strides);
    } else {
      params.map[part] = matrices_map(device, out);
    }
  }
  return params;
}

/// The number of clusters by which a launch is smaller than usual, so that a sum runs on their
/// multiprocessors at the same time. 0 if there are few clusters: the product needs all of them.
std::int64_t clusters_left(Companion companion, std::int64_t clusters) {
  return companion == Companion::kTokenSum && clusters > kManyClusters ? 2 : 0;
}

}  // namespace

void hopper_multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream) {
  const std::int64_t rows = product.left.rows.shape[1];
  const std::int64_t columns = product.right.shape[product.right.rank - 1];
  const std::int64_t mean_rows = product.groups.mean_rows();
  const Tiling tiling =
      columns <= kFewColumns ? narrow_tiling(mean_rows) : gathered_tiling(mean_rows);
  const TileShape shape = tiling.shape();
  StoreExpertGemmParams params{};
  params.producer = {product.left.rows.data,
                     product.left.index,
                     static_cast<std::int32_t>(product.left.rows.stride[0] * kElementBytes),
                     static_cast<std::int32_t>(rows),
                     {}};
  params.b.map[0] = rows_map(device, product.right, mn_box_depth(shape));
  params.b.part = product.right_part;
  params.tiles = expert_tiles(product.groups, rows, columns, shape);
  params.tiles.tile_counter = tiling.counter(product.hints.tile_counter);
  params.begins =
      product.hints.start == Start::kIndependent ? Begins::kIndependent : Begins::kAfterPrevious;
  params.release_count = product.hints.arrival;
  params.epilogue = store_params(device, product, params.tiles);
  const KernelEntry& kernel = find_kernel(
      {Role::kStoreExpert, product.dtype, tiling.tile, major_of(product.out[0]), kNoActivation});
  const std::int64_t clusters =
      clusters_of(device, shape, product.groups.experts * params.tiles.tiles_per_expert.by);
  launch_product(device, kernel, &params, clusters - clusters_left(product.companion, clusters),
                 stream);
}

}  // namespace sonicmoe::cuda
