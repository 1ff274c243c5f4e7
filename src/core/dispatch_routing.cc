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

namespace {

/// One of the sequences into which the losses divide the tokens.
struct Sequence {
  std::int64_t index, tokens;

  /// Its rows of a (T, ...) tensor.
  Tensor rows(Tensor t) const {
    t.data = at(t, index * tokens);
    t.shape[0] = tokens;
    return t;
  }
  /// Its row of an (S, ...) tensor. A tensor of rank 1 belongs to the only sequence.
  Tensor entry(const Tensor& t) const {
    if (t.rank != 2) return t;
    Tensor row = tensor1(at(t, index), t.dtype, t.shape[1]);
    row.stride[0] = t.stride[1];
    return row;
  }

 private:
  static void* at(const Tensor& t, std::int64_t row) {
    return static_cast<char*>(t.data) + row * t.stride[0] * dtype_bytes(t.dtype);
  }
};

template <class Body>
void for_sequences(const Tensor& logits, const Tensor& values, const Body& body) {
  const std::int64_t sequences = values.rank == 2 ? values.shape[0] : 1;
  const std::int64_t tokens = logits.shape[0] / sequences;
  for (std::int64_t i = 0; i < sequences; ++i) body(Sequence{i, tokens});
}

}  // namespace

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
  const auto losses = serve(exec, "router_losses", &BackendTable::router_losses);
  for_sequences(logits, out.values, [&](const Sequence& s) {
    losses(options, s.rows(logits), s.rows(ids),
           {s.entry(out.values), s.entry(out.tokens_per_expert)}, scratch, exec);
  });
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
  const auto backward =
      serve(exec, "router_losses_backward", &BackendTable::router_losses_backward);
  for_sequences(logits, dvalues, [&](const Sequence& s) {
    backward(options, s.rows(logits), s.entry(tokens_per_expert), s.entry(dvalues), s.rows(dlogits),
             exec);
  });
}

}  // namespace sonicmoe
