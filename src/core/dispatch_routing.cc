// Public functions of routing: check, then hand over to the backend.
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
namespace {

std::int64_t scratch_of(const RoundOptions& options, std::int64_t tokens, std::int64_t experts,
                        const Exec& exec) {
  return serve(exec, "round_scratch_bytes", &cpu::round_scratch_bytes,
               &CudaBackend::round_scratch_bytes)(options, tokens, experts, exec);
}

void check_scratch(const RoundOptions& options, const Tensor& logits, Buffer scratch,
                   const Exec& exec) {
  checks::buffer(scratch, "scratch", scratch_of(options, logits.shape[0], logits.shape[1], exec),
                 exec);
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  checks::route(options, logits, ids, weights, exec);
  serve(exec, "route", &cpu::route, &CudaBackend::route)(options, logits, ids, weights, exec);
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  checks::route_backward(options, logits, ids, dweights, dlogits, exec);
  serve(exec, "route_backward", &cpu::route_backward, &CudaBackend::route_backward)(
      options, logits, ids, dweights, dlogits, exec);
}

std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                 std::int64_t experts, const Exec& exec) {
  checks::exec(exec);
  round_capacity(options, tokens, experts);  // refuses what token_round would refuse
  return scratch_of(options, tokens, experts, exec);
}

void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec) {
  checks::token_round(options, logits, pairs, exec);
  check_scratch(options, logits, scratch, exec);
  serve(exec, "token_round", &cpu::token_round, &CudaBackend::token_round)(options, logits, pairs,
                                                                           scratch, exec);
}

void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, Buffer scratch,
                          const Exec& exec) {
  checks::token_round_backward(options, logits, pairs, dweight, dlogits, exec);
  check_scratch(options, logits, scratch, exec);
  serve(exec, "token_round_backward", &cpu::token_round_backward,
        &CudaBackend::token_round_backward)(options, logits, pairs, dweight, dlogits, scratch,
                                            exec);
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                   const Exec& exec) {
  checks::expert_choice(logits, capacity, pairs, exec);
  serve(exec, "expert_choice", &cpu::expert_choice, &CudaBackend::expert_choice)(logits, capacity,
                                                                                 pairs, exec);
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& exec) {
  checks::expert_choice_backward(logits, pairs, dweight, dlogits, exec);
  serve(exec, "expert_choice_backward", &cpu::expert_choice_backward,
        &CudaBackend::expert_choice_backward)(logits, pairs, dweight, dlogits, exec);
}

void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& exec) {
  checks::router_losses(options, logits, ids, out, exec);
  serve(exec, "router_losses", &cpu::router_losses, &CudaBackend::router_losses)(options, logits,
                                                                                 ids, out, exec);
}

void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec) {
  checks::router_losses_backward(options, logits, tokens_per_expert, dvalues, dlogits, exec);
  serve(exec, "router_losses_backward", &cpu::router_losses_backward,
        &CudaBackend::router_losses_backward)(options, logits, tokens_per_expert, dvalues, dlogits,
                                              exec);
}

}  // namespace sonicmoe
