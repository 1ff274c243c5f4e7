#include "cuda/portable/epilogue_params.h"

#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {
namespace {

std::uint8_t* bytes_of(const Tensor& t) { return static_cast<std::uint8_t*>(t.data); }

RowsOut rows_out(const Tensor& t) { return {bytes_of(t), t.stride[0] * kElementBytes}; }

/// The activation of an Activate or ActivateGrad; `a` is its A.
template <class Epilogue>
Activating activating_of(const Epilogue& e, const Tensor& a) {
  return {.scalars = scalars_of(e.activation),
          .kind = kernel_kind(e.activation.kind),
          .layout = e.layout,
          .width = static_cast<std::int32_t>(a.shape[1])};
}

}  // namespace

StoreParams epilogue_params(const StoreOutput& e) {
  return {.out = rows_out(e.out),
          .bias = bias_of(e.bias),
          .row_scale = static_cast<const float*>(e.scale.data),
          .scale_stride = e.scale.stride[0],
          .factor = e.factor,
          .columns = static_cast<std::int32_t>(e.out.shape[1])};
}

ActivateParams epilogue_params(const Activate& e) {
  return {.h = rows_out(e.h.elements),
          .a = rows_out(e.a.elements),
          .bias = {bias_of(e.layout == GateLayout::kNone ? e.bias_up : e.bias_gate),
                   bias_of(e.bias_up)},
          .act = activating_of(e, e.a.elements)};
}

ActivateGradParams epilogue_params(const ActivateGrad& e) {
  return {.h = bytes_of(e.h.elements),
          .h_row_bytes = e.h.elements.stride[0] * kElementBytes,
          .dh = bytes_of(e.dh.elements),
          .a = rows_out(e.a),
          .row_weight = e.row_weight,
          .score_parts = e.score_parts,
          .score_tiles = e.score_tiles,
          .act = activating_of(e, e.a)};
}

}  // namespace sonicmoe::cuda::portable
