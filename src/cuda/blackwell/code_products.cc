// Row products of codes (Precision::kFp8): H and A, Y, dH, dX~.
#include <variant>

#include "core/fp8_layout.h"
#include "cuda/blackwell/codes_params.h"
#include "cuda/blackwell/kernels.h"
#include "cuda/blackwell/launch.h"
#include "cuda/blackwell/row_products.h"
#include "cuda/blackwell/tensor_maps.h"
#include "cuda/fp8/words.h"
#include "cuda/portable/epilogue_params.h"

namespace sonicmoe::cuda::blackwell {
namespace {

CodeScales scales_of(const RowOperand& rows, const WeightOperand& weights) {
  const WeightScales& w = weights.scales;
  const bool is_by_row = rows.scales.block_stride == 0;
  const bool has_two = weights.parts == WeightParts::kSideBySide;
  return {.rows = rows.scales.data,
          .row_stride = is_by_row ? rows.rows.shape[1] / kScaleBlock : 1,
          .row_block_stride = is_by_row ? 1 : rows.scales.block_stride,
          .weights = w.data,
          .expert_stride = w.expert_stride,
          .column_stride = w.column_stride,
          .half_stride = has_two ? w.part_stride : w.column_stride,
          .depth_stride = w.depth_stride};
}

/// Rows of one or two parts (gate, up) of `part_bytes` codes each: n, or for dH n in whole blocks.
RowCodes row_codes(const CodedRows& rows, std::int64_t part_bytes) {
  return {static_cast<std::uint8_t*>(rows.codes.data),
          rows.scales.data,
          rows.codes.stride[0],
          rows.scales.block_stride,
          static_cast<std::int32_t>(part_bytes),
          static_cast<std::int32_t>(fp8::blocks_of(part_bytes))};
}

portable::StoreParams epilogue_of(const StoreOutput& e) { return portable::epilogue_params(e); }

CodesActivateParams epilogue_of(const Activate& e) {
  const std::int64_t width = e.a.codes.codes.shape[1];
  CodesActivateParams p{};
  p.a = row_codes(e.a.codes, width);
  if (e.h.codes.codes.data != nullptr) p.h = row_codes(e.h.codes, width);
  const Tensor& h = e.h.elements;
  p.h_elements = {static_cast<std::uint8_t*>(h.data), h.stride[0] * kElementBytes};
  p.bias[0] = bias_of(e.layout == GateLayout::kNone ? e.bias_up : e.bias_gate);
  p.bias[1] = bias_of(e.bias_up);
  p.act = {.scalars = cuda::scalars_of(e.activation),
           .kind = kernel_kind(e.activation.kind),
           .layout = e.layout,
           .width = static_cast<std::int32_t>(width)};
  return p;
}

CodesActivateGradParams epilogue_of(const ActivateGrad& e) {
  CodesActivateGradParams p{.rows = portable::epilogue_params(e), .h_codes = {}, .dh_codes = {}};
  // H in bf16 has as many elements in a row as dH has.
  p.rows.h_row_bytes = e.dh.elements.stride[0] * kElementBytes;
  const std::int64_t width = e.a.shape[1];
  if (e.h.codes.codes.data != nullptr) p.h_codes = row_codes(e.h.codes, width);
  p.dh_codes = row_codes(e.dh.codes, fp8::whole_blocks(width));
  return p;
}

const void* kernel_of(const StoreOutput&) { return codes_store_kernel(); }
const void* kernel_of(const Activate&) { return codes_activate_kernel(); }
const void* kernel_of(const ActivateGrad&) { return codes_activate_grad_kernel(); }

}  // namespace

void multiply_codes_within(const WaitLimit& limit, const Device& device, const RowProduct& product,
                           cudaStream_t stream) {
  const WeightOperand& w = product.weights;
  const EncodeTensorMap encode = state_of(device).encode;
  std::visit(
      [&](const auto& epilogue) {
        CodesProductParams<decltype(epilogue_of(epilogue))> params{};
        params.tiles = row_tiles_of(product);
        params.tiles.has_tails = 0;
        if (w.parts == WeightParts::kSideBySide) params.tiles.halves = Halves::kInEachPair;
        params.tiles.limit = limit;
        params.tiles.segments = 1;
        Segment& s = params.segments[0];
        s.rows = rows_map(encode, words_of(product.rows.rows), 0, 1);
        s.columns[0] = columns_map(encode, words_of(w.first));
        if (w.parts == WeightParts::kSideBySide) {
          s.columns[1] = columns_map(encode, words_of(w.second));
        }
        s.k_tiles = static_cast<std::int32_t>(w.first.shape[2] / kScaleBlock);
        s.ordered = product.rows.index == nullptr ? 1 : 0;
        params.tiles.k_tiles = s.k_tiles;
        params.order = order_of(product.hints);
        params.scales = scales_of(product.rows, w);
        params.epilogue = epilogue_of(epilogue);
        run({kernel_of(epilogue), kCodesThreads, kCodesSharedBytes},
            odd_pairs(device, product.groups.most_tiles(params.tiles.column_tiles)), &params,
            stream);
      },
      product.epilogue);
}

}  // namespace sonicmoe::cuda::blackwell
