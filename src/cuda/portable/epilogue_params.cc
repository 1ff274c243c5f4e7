#include "cuda/portable/epilogue_params.h"

#include <utility>

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

const Tensor& any_output(const DepthProduct& product) {
  return product.out[product.out[0].data == nullptr ? 1 : 0];
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

bool is_transposed(const DepthProduct& product) { return any_output(product).stride[2] != 1; }

StoreExpertParams epilogue_params(const DepthProduct& product) {
  const bool transposed = is_transposed(product);
  const std::int64_t left = product.left.rows.shape[1];
  const std::int64_t right = product.right.shape[product.right.rank - 1];
  StoreExpertParams params{};
  params.split = split_of(product.parts, transposed);
  params.border = static_cast<std::int32_t>(right / 2);
  params.columns = static_cast<std::int32_t>(transposed ? left : right);
  params.vectors = params.split == GradSplit::kColumnsAlternate ? 0 : 1;
  for (int part = 0; part < 2; part++) {
    const Tensor& out = product.out[part];
    if (out.data == nullptr) continue;
    GradOut& to = params.out[part];
    to = {out.data, out.stride[0], out.stride[1], out.stride[2]};
    if (transposed) std::swap(to.row_stride, to.column_stride);
    if (!takes_vectors(to)) params.vectors = 0;
  }
  if (any_output(product).dtype == DType::kF32) {
    params.store =
        product.mode == GradMode::kAccumulate ? GradStore::kAccumulate : GradStore::kFloat;
  }
  return params;
}

}  // namespace sonicmoe::cuda::portable
