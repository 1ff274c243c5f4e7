// The public functions of routing. Each checks its arguments, then calls the backend's function.
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
namespace {

std::int64_t scratch_of(const RoundOptions& options, std::int64_t tokens, std::int64_t experts,
                        const Exec& exec) {
  return serve(exec, "round_scratch_bytes", &BackendTable::round_scratch_bytes)(options, tokens,
                                                                                experts, exec);
}

void check_scratch(const RoundOptions& options, const Tensor& logits, Buffer scratch,
                   const Exec& exec) {
  checks::buffer(scratch, "scratch", scratch_of(options, logits.shape[0], logits.shape[1], exec),
                 exec);
}

std::int64_t choice_scratch(std::int64_t tokens, std::int64_t experts, const Exec& exec) {
  return serve(exec, "expert_choice", &BackendTable::expert_choice_scratch_bytes)(tokens, experts);
}
std::int64_t losses_scratch(std::int64_t tokens, std::int64_t experts, const Exec& exec) {
  return serve(exec, "router_losses", &BackendTable::router_losses_scratch_bytes)(tokens, experts);
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  checks::route(options, logits, ids, weights, exec);
  checks::route_overlap(options, logits, ids, weights);
  serve(exec, "route", &BackendTable::route)(options, logits, ids, weights, exec);
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  checks::route_backward(options, logits, ids, dweights, dlogits, exec);
  checks::route_backward_overlap(options, logits, ids, dweights, dlogits);
  serve(exec, "route_backward", &BackendTable::route_backward)(options, logits, ids, dweights,
                                                               dlogits, exec);
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
  checks::pairs_overlap(options.route.bias, logits, pairs, scratch);
  serve(exec, "token_round", &BackendTable::token_round)(options, logits, pairs, scratch, exec);
}

void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, Buffer scratch,
                          const Exec& exec) {
  checks::token_round_backward(options, logits, pairs, dweight, dlogits, exec);
  check_scratch(options, logits, scratch, exec);
  checks::pairs_backward_overlap(options.route.bias, logits, pairs, dweight, dlogits, scratch);
  serve(exec, "token_round_backward", &BackendTable::token_round_backward)(
      options, logits, pairs, dweight, dlogits, scratch, exec);
}

std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                         const Exec& exec) {
  checks::routing_sizes(tokens, experts, exec);
  return choice_scratch(tokens, experts, exec);
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, Buffer scratch,
                   const Exec& exec) {
  checks::expert_choice(logits, capacity, pairs, exec);
  checks::buffer(scratch, "scratch", choice_scratch(logits.shape[0], logits.shape[1], exec), exec);
  checks::pairs_overlap({}, logits, pairs, scratch);
  serve(exec, "expert_choice", &BackendTable::expert_choice)(logits, capacity, pairs, scratch,
                                                             exec);
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                   const Exec& exec) {
  expert_choice(logits, capacity, pairs, Buffer{}, exec);
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, Buffer scratch, const Exec& exec) {
  checks::expert_choice_backward(logits, pairs, dweight, dlogits, exec);
  checks::buffer(scratch, "scratch", choice_scratch(logits.shape[0], logits.shape[1], exec), exec);
  checks::pairs_backward_overlap({}, logits, pairs, dweight, dlogits, scratch);
  serve(exec, "expert_choice_backward", &BackendTable::expert_choice_backward)(
      logits, pairs, dweight, dlogits, scratch, exec);
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& exec) {
  expert_choice_backward(logits, pairs, dweight, dlogits, Buffer{}, exec);
}

std::int64_t router_losses_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                         const Exec& exec) {
  checks::routing_sizes(tokens, experts, exec);
  return losses_scratch(tokens, experts, exec);
}

void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, Buffer scratch, const Exec& exec) {
  checks::router_losses(options, logits, ids, out, exec);
  checks::buffer(scratch, "scratch", losses_scratch(logits.shape[0], logits.shape[1], exec), exec);
  checks::router_losses_overlap(options, logits, ids, out, scratch);
  serve(exec, "router_losses", &BackendTable::router_losses)(options, logits, ids, out, scratch,
                                                             exec);
}

void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& exec) {
  router_losses(options, logits, ids, out, Buffer{}, exec);
}

void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec) {
  checks::router_losses_backward(options, logits, tokens_per_expert, dvalues, dlogits, exec);
  checks::router_losses_backward_overlap(options, logits, tokens_per_expert, dvalues, dlogits);
  serve(exec, "router_losses_backward", &BackendTable::router_losses_backward)(
      options, logits, tokens_per_expert, dvalues, dlogits, exec);
}

}  // namespace sonicmoe
