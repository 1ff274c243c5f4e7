// The CPU's table of functions.
#include "cpu/backend.h"

namespace sonicmoe {
namespace {

std::int64_t no_scratch(std::int64_t, std::int64_t) { return 0; }

}  // namespace

const BackendTable* cpu_backend() {
  static constexpr BackendTable kBackend = [] {
    BackendTable backend;
    backend.name = "cpu";
    backend.buffer_alignment = 64;  // the alignment that host allocators of tensors give
    backend.moe_sizes = &cpu::moe_sizes;
    backend.h_rows = &cpu::h_rows;
    backend.quantize_weights = &cpu::quantize_weights;
    backend.unpack_weights = &cpu::unpack_weights;
    backend.moe_forward = &cpu::moe_forward;
    backend.moe_backward = &cpu::moe_backward;
    backend.grouped_gemm_scratch_bytes = &no_scratch;
    backend.grouped_gemm = &cpu::grouped_gemm;
    backend.grouped_gemm_k = &cpu::grouped_gemm_k;
    backend.route = &cpu::route;
    backend.route_backward = &cpu::route_backward;
    backend.round_scratch_bytes = &cpu::round_scratch_bytes;
    backend.token_round = &cpu::token_round;
    backend.token_round_backward = &cpu::token_round_backward;
    backend.expert_choice_scratch_bytes = &no_scratch;
    backend.expert_choice = [](const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                               Buffer, const Exec& exec) {
      cpu::expert_choice(logits, capacity, pairs, exec);
    };
    backend.expert_choice_backward = [](const Tensor& logits, const Pairs& pairs,
                                        const Tensor& dweight, const Tensor& dlogits, Buffer,
                                        const Exec& exec) {
      cpu::expert_choice_backward(logits, pairs, dweight, dlogits, exec);
    };
    backend.router_losses_scratch_bytes = &no_scratch;
    backend.router_losses = [](const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                               const RouterLosses& out, Buffer, const Exec& exec) {
      cpu::router_losses(options, logits, ids, out, exec);
    };
    backend.router_losses_backward = &cpu::router_losses_backward;
    return backend;
  }();
  return &kBackend;
}

}  // namespace sonicmoe
