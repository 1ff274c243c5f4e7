// The public functions of the layer and of the grouped GEMM. Each checks its arguments, then calls
// the backend's function.
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
namespace {

Sizes sizes_of(const Problem& problem, Pass pass, const Exec& exec) {
  return serve(exec, "moe_sizes", &BackendTable::moe_sizes)(problem, pass, exec);
}

std::int64_t gemm_scratch(std::int64_t rows, std::int64_t experts, const Exec& exec) {
  return serve(exec, "grouped_gemm", &BackendTable::grouped_gemm_scratch_bytes)(rows, experts);
}

}  // namespace

Sizes moe_sizes(const Problem& problem, Pass pass, const Exec& exec) {
  checks::moe_sizes(problem, pass, exec);
  return sizes_of(problem, pass, exec);
}

HViews h_views(const Problem& problem, const Weights& weights, const Buffer& h, const Exec& exec) {
  checks::h_views(problem, weights, exec);
  if (h.data != nullptr) {
    checks::buffer(h, "h", sizes_of(problem, Pass::kForward, exec).h_bytes, exec);
  }
  const Tensor rows = serve(exec, "h_views", &BackendTable::h_rows)(problem, weights, h.data);
  const bool alternate = rows.rank == 2;
  const std::int64_t to_up =
      alternate ? 1 : (gate_factor(problem.activation.kind) - 1) * problem.width;
  const Tensor first{rows.data,
                     rows.dtype,
                     2,
                     {rows.shape[0], problem.width, 0},
                     {rows.stride[0], alternate ? 2 : 1, 0}};
  HViews views{.gate = {}, .up = first};
  if (is_gated(problem.activation.kind)) views.gate = first;
  if (h.data != nullptr) {
    views.up.data = static_cast<char*>(h.data) + to_up * dtype_bytes(problem.dtype);
  }
  return views;
}

void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  checks::moe_forward(problem, args, exec);
  checks::forward_buffers(args, sizes_of(problem, checks::forward_pass(args), exec), exec);
  checks::fp8_weights(problem, args.fp8_weights, exec);
  checks::forward_overlap(args);
  serve(exec, "moe_forward", &BackendTable::moe_forward)(problem, args, exec);
}

void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  checks::moe_backward(problem, args, exec);
  checks::backward_buffers(args, sizes_of(problem, Pass::kBackward, exec), exec);
  checks::fp8_weights(problem, args.fp8_weights, exec);
  checks::backward_overlap(args);
  serve(exec, "moe_backward", &BackendTable::moe_backward)(problem, args, exec);
}

std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts, const Exec& exec) {
  checks::grouped_gemm_sizes(rows, experts, exec);
  return gemm_scratch(rows, experts, exec);
}

void grouped_gemm(const GroupedGemm& args, const Exec& exec) {
  checks::grouped_gemm(args, exec);
  checks::buffer(args.scratch, "scratch", gemm_scratch(args.d.shape[0], args.b.shape[0], exec),
                 exec);
  checks::grouped_gemm_overlap(args);
  serve(exec, "grouped_gemm", &BackendTable::grouped_gemm)(args, exec);
}

void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec) {
  checks::grouped_gemm_k(args, exec);
  checks::buffer(args.scratch, "scratch", gemm_scratch(args.b.shape[0], args.d.shape[0], exec),
                 exec);
  checks::grouped_gemm_k_overlap(args);
  serve(exec, "grouped_gemm_k", &BackendTable::grouped_gemm_k)(args, exec);
}

}  // namespace sonicmoe
