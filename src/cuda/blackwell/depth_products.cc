// Depth products: the weight gradients, and the grouped GEMM over K.
#include <utility>

#include "cuda/blackwell/kernels.h"
#include "cuda/blackwell/launch.h"
#include "cuda/blackwell/params.h"
#include "cuda/blackwell/products.h"
#include "cuda/blackwell/tensor_maps.h"
#include "cuda/portable/epilogue_params.h"

namespace sonicmoe::cuda::blackwell {
namespace {

DepthTilesParams tiles_of(const DepthProduct& product) {
  const auto count = [](std::int32_t size) { return (size + kTileColumns - 1) / kTileColumns; };
  static_assert(kTileColumns == kCtas * kCtaRows);
  DepthTilesParams tiles{};
  tiles.longest_first = product.groups.longest_first;
  tiles.expert_begin = product.groups.lists->expert_begin;
  tiles.expert_rows = product.groups.lists->expert_rows;
  tiles.index = product.left.index;
  tiles.experts = static_cast<std::int32_t>(product.groups.experts);
  tiles.rows = static_cast<std::int32_t>(product.left.rows.shape[1]);
  tiles.columns = static_cast<std::int32_t>(product.right.shape[product.right.rank - 1]);
  if (portable::is_transposed(product)) {
    std::swap(tiles.rows, tiles.columns);
    tiles.gathers_b = 1;
  }
  tiles.row_tiles = count(tiles.rows);
  tiles.column_tiles = count(tiles.columns);
  tiles.operands = types_of(product.dtype) | kMnMajorA | kMnMajorB;
  tiles.tile_counter = counter_of(product.groups, product.hints);
  return tiles;
}

}  // namespace

void multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream) {
  multiply_depth_within({}, device, product, stream);
}

void multiply_depth_within(const WaitLimit& limit, const Device& device,
                           const DepthProduct& product, cudaStream_t stream) {
  const EncodeTensorMap encode = state_of(device).encode;
  DepthProductParams<portable::StoreExpertParams> params{};
  params.operands = {rows_map(encode, product.left.rows, 0, 1),
                     rows_map(encode, product.right, product.right_part, 1),
                     rows_map(encode, product.right, product.right_part, kDepth)};
  params.tiles = tiles_of(product);
  params.order = order_of(product.hints);
  params.tiles.limit = limit;
  params.epilogue = portable::epilogue_params(product);
  const std::int64_t tiles =
      product.groups.experts * params.tiles.row_tiles * params.tiles.column_tiles;
  run({store_expert_kernel(product.dtype)}, pairs_of(device, tiles), &params, stream);
}

}  // namespace sonicmoe::cuda::blackwell
