// The C functions of the layer and of the grouped GEMM.
#include <algorithm>

#include "capi/convert.h"
#include "core/checks.h"

using namespace sonicmoe;

namespace {

// GroupedGemm and GroupedGemmK have the same members; only the shapes of their tensors differ.
template <class Args>
Args gemm_args(const smoe_grouped_gemm_args* given) {
  // The first version of the struct ends before `scratch`.
  constexpr std::size_t kFirst = offsetof(smoe_grouped_gemm_args, scratch);
  const smoe_grouped_gemm_args a = capi::read(given, "args", kFirst);
  capi::refuse_reserved(a.reserved, "args");
  return {capi::required(a.a, "a"),           capi::required(a.b, "b"),
          capi::required(a.d, "d"),           capi::required(a.offsets, "offsets"),
          capi::optional(a.gather, "gather"), {a.scratch, a.scratch_bytes}};
}

void write_view(const Tensor& view, smoe_tensor* tensor) {
  tensor->dtype = static_cast<std::int32_t>(view.dtype);
  tensor->rank = view.rank;
  tensor->data = view.data;
  std::copy(view.shape, view.shape + 3, tensor->shape);
  std::copy(view.stride, view.stride + 3, tensor->stride);
}

}  // namespace

extern "C" {

smoe_status smoe_row_capacity(const smoe_problem* problem, int64_t* capacity) {
  return capi::guarded([&] {
    capi::refuse_null(capacity, "capacity");
    const Problem checked = capi::problem(problem);
    checks::problem(checked);
    *capacity = row_capacity(checked);
  });
}

smoe_status smoe_moe_sizes(const smoe_problem* problem, int32_t pass, const smoe_exec* exec,
                           smoe_sizes* sizes) {
  return capi::guarded([&] {
    capi::write_sizes(sizes, [&] {
      return moe_sizes(capi::problem(problem), static_cast<Pass>(pass), capi::exec(exec));
    });
  });
}

smoe_status smoe_h_views(const smoe_problem* problem, const smoe_weights* weights, void* h,
                         int64_t h_bytes, const smoe_exec* exec, smoe_tensor* gate,
                         smoe_tensor* up) {
  return capi::guarded([&] {
    capi::read(static_cast<const smoe_tensor*>(gate), "gate");
    capi::read(static_cast<const smoe_tensor*>(up), "up");
    const HViews views = h_views(capi::problem(problem), capi::weights(weights, "weights"),
                                 {h, h_bytes}, capi::exec(exec));
    write_view(views.gate, gate);
    write_view(views.up, up);
  });
}

smoe_status smoe_fp8_weights_bytes(const smoe_problem* problem, const smoe_exec* exec,
                                   int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = fp8_weights_bytes(capi::problem(problem), capi::exec(exec));
  });
}

smoe_status smoe_quantize_weights(const smoe_problem* problem, const smoe_weights* weights,
                                  void* fp8_weights, int64_t fp8_weights_bytes,
                                  const smoe_exec* exec) {
  return capi::guarded([&] {
    quantize_weights(capi::problem(problem), capi::weights(weights, "weights"),
                     {fp8_weights, fp8_weights_bytes}, capi::exec(exec));
  });
}

smoe_status smoe_unpack_weights(const smoe_packed_weights* packed, const smoe_tensor* out,
                                const smoe_exec* exec) {
  return capi::guarded([&] {
    unpack_weights(capi::packed_weights(packed), capi::required(out, "out"), capi::exec(exec));
  });
}

smoe_status smoe_auto_precision(const smoe_problem* problem, const smoe_exec* exec,
                                int32_t* precision) {
  return capi::guarded([&] {
    capi::refuse_null(precision, "precision");
    *precision = static_cast<int32_t>(auto_precision(capi::problem(problem), capi::exec(exec)));
  });
}

smoe_status smoe_moe_forward(const smoe_problem* problem, const smoe_forward_args* args,
                             const smoe_exec* exec) {
  return capi::guarded([&] {
    const ForwardArgs given = capi::forward_args(args);
    capi::refuse_kept_rows(capi::kept_rows(args));
    moe_forward(capi::problem(problem), given, capi::exec(exec));
  });
}

smoe_status smoe_moe_backward(const smoe_problem* problem, const smoe_backward_args* args,
                              const smoe_exec* exec) {
  return capi::guarded([&] {
    const BackwardArgs given = capi::backward_args(args);
    capi::refuse_kept_rows(capi::kept_rows(args));
    moe_backward(capi::problem(problem), given, capi::exec(exec));
  });
}

smoe_status smoe_grouped_gemm_scratch_bytes(int64_t rows, int64_t experts, const smoe_exec* exec,
                                            int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = grouped_gemm_scratch_bytes(rows, experts, capi::exec(exec));
  });
}

smoe_status smoe_grouped_gemm(const smoe_grouped_gemm_args* args, const smoe_exec* exec) {
  return capi::guarded([&] { grouped_gemm(gemm_args<GroupedGemm>(args), capi::exec(exec)); });
}

smoe_status smoe_grouped_gemm_k(const smoe_grouped_gemm_args* args, const smoe_exec* exec) {
  return capi::guarded([&] { grouped_gemm_k(gemm_args<GroupedGemmK>(args), capi::exec(exec)); });
}

}  // extern "C"
