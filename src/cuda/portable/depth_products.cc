// Depth products: the weight gradients.
#include <utility>

#include "cuda/portable/epilogue_params.h"
#include "cuda/portable/kernels.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/params.h"
#include "cuda/portable/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {
namespace {

/// The operands of a product, swapped if it is transposed.
struct Sides {
  Rows left;
  Rows right;
  std::int32_t rows;
  std::int32_t columns;
  GatheredSide gathered;
};

Sides sides_of(const DepthProduct& product) {
  const Tensor& rows = product.left.rows;
  const Tensor& right = product.right;
  const std::int64_t width = right.shape[right.rank - 1];
  const std::int64_t part = right.rank == 3 ? product.right_part * right.stride[1] : 0;
  Sides sides{
      {static_cast<const std::uint8_t*>(rows.data), product.left.index,
       rows.stride[0] * kElementBytes},
      {static_cast<const std::uint8_t*>(right.data) + part * kElementBytes, nullptr,
       right.stride[0] * kElementBytes},
      static_cast<std::int32_t>(rows.shape[1]),
      static_cast<std::int32_t>(width),
      GatheredSide::kLeft,
  };
  if (!is_transposed(product)) return sides;
  std::swap(sides.left, sides.right);
  std::swap(sides.rows, sides.columns);
  sides.gathered = GatheredSide::kRight;
  return sides;
}

}  // namespace

void multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream) {
  const Sides sides = sides_of(product);
  const TileShape shape{state_of(device).depth, Width::k256};
  constexpr int kColumns = static_cast<int>(Width::k256);
  ProductParams<DepthTilesParams, StoreExpertParams> params{};
  DepthTilesParams& tiles = params.tiles;
  tiles.longest_first = product.groups.longest_first;
  tiles.expert_begin = product.groups.lists->expert_begin;
  tiles.expert_rows = product.groups.lists->expert_rows;
  tiles.left = sides.left;
  tiles.right = sides.right;
  tiles.experts = static_cast<std::int32_t>(product.groups.experts);
  tiles.rows = sides.rows;
  tiles.columns = sides.columns;
  tiles.row_tiles = (sides.rows + kTileRows - 1) / kTileRows;
  tiles.column_tiles = (sides.columns + kColumns - 1) / kColumns;
  params.epilogue = epilogue_params(product);
  const std::int32_t each = tiles.row_tiles * tiles.column_tiles;
  const std::int32_t ctas = ctas_of(device, shape, product.groups.experts * each);
  tiles.experts_apart = ctas / each;
  tiles.tiles_apart = ctas % each;
  run({store_expert_kernel({product.dtype, shape}, sides.gathered), shape, ctas}, &params, stream);
}

}  // namespace sonicmoe::cuda::portable
