// Depth products: the weight gradients.
#include <utility>

#include "cuda/portable/kernels.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/params.h"
#include "cuda/portable/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {
namespace {

/// The operands of a product. Kernels store D along its rows. If the output is contiguous along its
/// columns instead, the operands are swapped and the kernel computes the transposed matrix.
struct Sides {
  Rows left;
  Rows right;
  std::int32_t rows;
  std::int32_t columns;
  GatheredSide gathered;
  bool transposed;
};

const Tensor& any_output(const DepthProduct& product) {
  return product.out[product.out[0].data == nullptr ? 1 : 0];
}

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
      false,
  };
  if (any_output(product).stride[2] == 1) return sides;
  std::swap(sides.left, sides.right);
  std::swap(sides.rows, sides.columns);
  sides.gathered = GatheredSide::kRight;
  sides.transposed = true;
  return sides;
}

GradSplit split_of(GradParts parts, bool transposed) {
  switch (parts) {
    case GradParts::kHalves:
      return transposed ? GradSplit::kRowHalves : GradSplit::kColumnHalves;
    case GradParts::kAlternate:
      return transposed ? GradSplit::kRowsAlternate : GradSplit::kColumnsAlternate;
    case GradParts::kOne:
      break;
  }
  return GradSplit::kNone;
}

bool is_multiple_of_4(std::int64_t a, std::int64_t b) { return a % 4 == 0 && b % 4 == 0; }

/// Whether the fp32 output may be accessed 16 bytes at a time.
bool takes_vectors(const GradOut& out) {
  return out.data == nullptr ||
         (out.column_stride == 1 && is_multiple_of_4(out.expert_stride, out.row_stride) &&
          reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0);
}

StoreExpertParams epilogue_of(const DepthProduct& product, const Sides& sides) {
  StoreExpertParams params{};
  params.split = split_of(product.parts, sides.transposed);
  params.border = (sides.transposed ? sides.rows : sides.columns) / 2;
  params.columns = sides.columns;
  params.vectors = params.split == GradSplit::kColumnsAlternate ? 0 : 1;
  for (int part = 0; part < 2; part++) {
    const Tensor& out = product.out[part];
    if (out.data == nullptr) continue;
    GradOut& to = params.out[part];
    to = {out.data, out.stride[0], out.stride[1], out.stride[2]};
    if (sides.transposed) std::swap(to.row_stride, to.column_stride);
    if (!takes_vectors(to)) params.vectors = 0;
  }
  if (any_output(product).dtype == DType::kF32) {
    params.store =
        product.mode == GradMode::kAccumulate ? GradStore::kAccumulate : GradStore::kFloat;
  }
  return params;
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
  params.epilogue = epilogue_of(product, sides);
  const std::int32_t each = tiles.row_tiles * tiles.column_tiles;
  const std::int32_t ctas = ctas_of(device, shape, product.groups.experts * each);
  tiles.experts_apart = ctas / each;
  tiles.tiles_apart = ctas % each;
  run({store_expert_kernel({product.dtype, shape}, sides.gathered), shape, ctas}, &params, stream);
}

}  // namespace sonicmoe::cuda::portable
