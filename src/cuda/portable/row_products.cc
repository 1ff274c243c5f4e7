// Row products: A, Y, dH, dX~ and the grouped GEMM.
#include <algorithm>
#include <type_traits>

#include "cuda/portable/choices.h"
#include "cuda/portable/kernels.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/params.h"
#include "cuda/portable/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {
namespace {

std::uint8_t* bytes_of(const Tensor& t) { return static_cast<std::uint8_t*>(t.data); }

RowsOut rows_out(const Tensor& t) { return {bytes_of(t), t.stride[0] * kElementBytes}; }

Matrices matrices_of(const Tensor& t) {
  const std::int64_t line = major_of(t) == Major::kK ? t.stride[1] : t.stride[2];
  return {bytes_of(t), t.stride[0] * kElementBytes, line * kElementBytes};
}

/// Whether a product may have the narrow tile.
template <class Epilogue>
constexpr bool kMayBeNarrow = std::is_same_v<Epilogue, ActivateGrad>;

template <class Epilogue>
TileShape shape_of(const State& state, const RowProduct& product, const Epilogue&) {
  const std::int64_t columns = product.weights.first.shape[1];
  if (kMayBeNarrow<Epilogue> && state.narrow_depth && is_narrow(columns)) {
    return {*state.narrow_depth, Width::k128};
  }
  return {state.depth, Width::k256};
}

/// All fields except records_apart and column_tiles_apart, which depend on the number of CTAs.
RowTilesParams tiles_of(const RowProduct& product, const TileShape& shape) {
  const WeightOperand& w = product.weights;
  const auto tile_columns = static_cast<std::int32_t>(shape.width);
  const bool halves = w.parts == WeightParts::kSideBySide;
  RowTilesParams tiles{};
  tiles.records = product.groups.lists->records;
  tiles.record_count = product.groups.lists->record_count;
  tiles.rows = {bytes_of(product.rows.rows), product.rows.index,
                product.rows.rows.stride[0] * kElementBytes};
  tiles.weights[0] = matrices_of(w.first);
  tiles.weights[1] = w.parts == WeightParts::kOne ? tiles.weights[0] : matrices_of(w.second);
  tiles.columns = static_cast<std::int32_t>(w.first.shape[1]);
  tiles.column_step = halves ? tile_columns / 2 : tile_columns;
  tiles.column_tiles = (tiles.columns + tiles.column_step - 1) / tiles.column_step;
  tiles.second_half = halves ? 0 : tile_columns / 2;
  tiles.depth = static_cast<std::int32_t>(w.first.shape[2]);
  tiles.parts = w.parts == WeightParts::kOneAfterOther ? 2 : 1;
  const auto k_tiles = [&](std::int64_t k) {
    return static_cast<std::int32_t>((k + static_cast<int>(shape.depth) - 1) /
                                     static_cast<int>(shape.depth));
  };
  tiles.k_tiles = tiles.parts * k_tiles(tiles.depth);
  if (product.low_rank) {
    const LowRankTerm& term = *product.low_rank;
    tiles.weights[2] = matrices_of(term.outer[0]);
    tiles.weights[3] = halves ? matrices_of(term.outer[1]) : tiles.weights[2];
    tiles.inner = {bytes_of(term.inner), nullptr, term.inner.stride[0] * kElementBytes};
    tiles.rank = static_cast<std::int32_t>(term.inner.shape[1]);
    tiles.k_tiles += k_tiles(tiles.rank);
  }
  return tiles;
}

StoreParams epilogue_of(const StoreOutput& e) {
  return {.out = rows_out(e.out),
          .bias = bias_of(e.bias),
          .row_scale = static_cast<const float*>(e.scale.data),
          .scale_stride = e.scale.stride[0],
          .factor = e.factor,
          .columns = static_cast<std::int32_t>(e.out.shape[1])};
}

/// The activation of an Activate or ActivateGrad; `a` is its A.
template <class Epilogue>
Activating activating_of(const Epilogue& e, const Tensor& a) {
  return {.scalars = scalars_of(e.activation),
          .kind = kernel_kind(e.activation.kind),
          .layout = e.layout,
          .width = static_cast<std::int32_t>(a.shape[1])};
}

ActivateParams epilogue_of(const Activate& e) {
  return {.h = rows_out(e.h.elements),
          .a = rows_out(e.a.elements),
          .bias = {bias_of(e.layout == GateLayout::kNone ? e.bias_up : e.bias_gate),
                   bias_of(e.bias_up)},
          .act = activating_of(e, e.a.elements)};
}

ActivateGradParams epilogue_of(const ActivateGrad& e) {
  return {.h = bytes_of(e.h.elements),
          .h_row_bytes = e.h.elements.stride[0] * kElementBytes,
          .dh = bytes_of(e.dh.elements),
          .a = rows_out(e.a),
          .row_weight = e.row_weight,
          .score_parts = e.score_parts,
          .score_tiles = e.score_tiles,
          .act = activating_of(e, e.a)};
}

const void* kernel_of(const StoreOutput&, const Variant& variant, Major major) {
  return store_kernel(variant, major);
}
const void* kernel_of(const Activate&, const Variant& variant, Major major) {
  return activate_kernel(variant, major);
}
const void* kernel_of(const ActivateGrad&, const Variant& variant, Major major) {
  return activate_grad_kernel(variant, major);
}

}  // namespace

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream) {
  std::visit(
      [&](const auto& epilogue) {
        const TileShape shape = shape_of(state_of(device), product, epilogue);
        ProductParams<RowTilesParams, decltype(epilogue_of(epilogue))> params{
            tiles_of(product, shape), epilogue_of(epilogue)};
        RowTilesParams& tiles = params.tiles;
        const std::int32_t ctas =
            ctas_of(device, shape, product.groups.most_tiles(tiles.column_tiles));
        tiles.records_apart = ctas / tiles.column_tiles;
        tiles.column_tiles_apart = ctas % tiles.column_tiles;
        const void* kernel =
            kernel_of(epilogue, {product.dtype, shape}, major_of(product.weights.first));
        run({kernel, shape, ctas}, &params, stream);
      },
      product.epilogue);
}

}  // namespace sonicmoe::cuda::portable
