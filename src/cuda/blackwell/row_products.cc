// Row products: A, Y, dH, dX~ and the grouped GEMM.
#include "cuda/blackwell/row_products.h"

#include <variant>

#include "cuda/blackwell/kernels.h"
#include "cuda/blackwell/launch.h"
#include "cuda/blackwell/params.h"
#include "cuda/blackwell/products.h"
#include "cuda/blackwell/tensor_maps.h"
#include "cuda/portable/epilogue_params.h"

namespace sonicmoe::cuda::blackwell {
namespace {

std::int32_t k_tiles_of(std::int64_t depth) {
  return static_cast<std::int32_t>((depth + kDepth - 1) / kDepth);
}

/// Fills `segments`, and returns their number.
std::int32_t set_segments(EncodeTensorMap encode, const RowProduct& product, Segment* segments) {
  const WeightOperand& w = product.weights;
  const bool halves = w.parts == WeightParts::kSideBySide;
  const std::int32_t parts = w.parts == WeightParts::kOneAfterOther ? 2 : 1;
  for (std::int32_t part = 0; part < parts; part++) {
    Segment& s = segments[part];
    s.rows = rows_map(encode, product.rows.rows, part, 1);
    s.columns[0] = columns_map(encode, part == 0 ? w.first : w.second);
    if (halves) s.columns[1] = columns_map(encode, w.second);
    s.k_tiles = k_tiles_of(w.first.shape[2]);
    s.ordered = product.rows.index == nullptr ? 1 : 0;
  }
  if (!product.low_rank) return parts;
  const LowRankTerm& term = *product.low_rank;
  Segment& s = segments[parts];
  s.rows = rows_map(encode, term.inner, 0, 1);
  s.columns[0] = columns_map(encode, term.outer[0]);
  if (halves) s.columns[1] = columns_map(encode, term.outer[1]);
  s.k_tiles = k_tiles_of(term.inner.shape[1]);
  s.ordered = 1;
  return parts + 1;
}

const void* kernel_of(const StoreOutput&, DType dtype) { return store_kernel(dtype); }
const void* kernel_of(const Activate&, DType dtype) { return activate_kernel(dtype); }
const void* kernel_of(const ActivateGrad&, DType dtype) { return activate_grad_kernel(dtype); }

}  // namespace

RowTilesParams row_tiles_of(const RowProduct& product) {
  const WeightOperand& w = product.weights;
  const bool halves = w.parts == WeightParts::kSideBySide;
  RowTilesParams tiles{};
  tiles.records = product.groups.lists->records;
  tiles.record_count = product.groups.lists->record_count;
  tiles.index = product.rows.index;
  tiles.columns = static_cast<std::int32_t>(w.first.shape[1]);
  tiles.column_step = halves ? kTileColumns / 2 : kTileColumns;
  tiles.column_tiles = (tiles.columns + tiles.column_step - 1) / tiles.column_step;
  tiles.halves = halves ? Halves::kInEachCta : Halves::kOneMatrix;
  tiles.has_tails = 1;
  tiles.operands = types_of(product.dtype) | (major_of(w.first) == Major::kMN ? kMnMajorB : 0);
  tiles.tile_counter = counter_of(product.groups, product.hints);
  return tiles;
}

std::int64_t odd_pairs(const Device& device, std::int64_t tiles) {
  const std::int64_t pairs = pairs_of(device, tiles);
  return pairs - 1 + pairs % 2;
}

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream) {
  multiply_rows_within({}, device, product, stream);
}

void multiply_rows_within(const WaitLimit& limit, const Device& device, const RowProduct& product,
                          cudaStream_t stream) {
  if (product.rows.scales.data != nullptr) {
    multiply_codes_within(limit, device, product, stream);
    return;
  }
  std::visit(
      [&](const auto& epilogue) {
        RowProductParams<decltype(portable::epilogue_params(epilogue))> params{};
        params.tiles = row_tiles_of(product);
        params.tiles.limit = limit;
        params.tiles.segments = set_segments(state_of(device).encode, product, params.segments);
        for (const Segment& s : params.segments) params.tiles.k_tiles += s.k_tiles;
        params.order = order_of(product.hints);
        params.epilogue = portable::epilogue_params(epilogue);
        run({kernel_of(epilogue, product.dtype)},
            odd_pairs(device, product.groups.most_tiles(params.tiles.column_tiles)), &params,
            stream);
      },
      product.epilogue);
}

}  // namespace sonicmoe::cuda::blackwell
