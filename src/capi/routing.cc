// The C functions of routing, rounding, expert choice and the auxiliary losses.
#include "capi/convert.h"

using namespace sonicmoe;

extern "C" {

smoe_status smoe_route(const smoe_route_options* options, const smoe_tensor* logits,
                       const smoe_tensor* ids, const smoe_tensor* weights, const smoe_exec* exec) {
  return capi::guarded([&] {
    route(capi::route_options(options), capi::required(logits, "logits"),
          capi::required(ids, "ids"), capi::required(weights, "weights"), capi::exec(exec));
  });
}

smoe_status smoe_route_backward(const smoe_route_options* options, const smoe_tensor* logits,
                                const smoe_tensor* ids, const smoe_tensor* dweights,
                                const smoe_tensor* dlogits, const smoe_exec* exec) {
  return capi::guarded([&] {
    route_backward(capi::route_options(options), capi::required(logits, "logits"),
                   capi::required(ids, "ids"), capi::required(dweights, "dweights"),
                   capi::required(dlogits, "dlogits"), capi::exec(exec));
  });
}

smoe_status smoe_round_capacity(const smoe_round_options* options, int64_t tokens, int64_t experts,
                                int64_t* capacity) {
  return capi::guarded([&] {
    capi::refuse_null(capacity, "capacity");
    *capacity = round_capacity(capi::round_options(options), tokens, experts);
  });
}

smoe_status smoe_round_scratch_bytes(const smoe_round_options* options, int64_t tokens,
                                     int64_t experts, const smoe_exec* exec, int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = round_scratch_bytes(capi::round_options(options), tokens, experts, capi::exec(exec));
  });
}

smoe_status smoe_token_round(const smoe_round_options* options, const smoe_tensor* logits,
                             const smoe_pairs* pairs, void* scratch, int64_t scratch_bytes,
                             const smoe_exec* exec) {
  return capi::guarded([&] {
    token_round(capi::round_options(options), capi::required(logits, "logits"), capi::pairs(pairs),
                {scratch, scratch_bytes}, capi::exec(exec));
  });
}

smoe_status smoe_token_round_backward(const smoe_round_options* options, const smoe_tensor* logits,
                                      const smoe_pairs* pairs, const smoe_tensor* dweight,
                                      const smoe_tensor* dlogits, void* scratch,
                                      int64_t scratch_bytes, const smoe_exec* exec) {
  return capi::guarded([&] {
    token_round_backward(capi::round_options(options), capi::required(logits, "logits"),
                         capi::pairs(pairs), capi::required(dweight, "dweight"),
                         capi::required(dlogits, "dlogits"), {scratch, scratch_bytes},
                         capi::exec(exec));
  });
}

smoe_status smoe_expert_choice(const smoe_tensor* logits, int64_t capacity, const smoe_pairs* pairs,
                               const smoe_exec* exec) {
  return capi::guarded([&] {
    expert_choice(capi::required(logits, "logits"), capacity, capi::pairs(pairs), capi::exec(exec));
  });
}

smoe_status smoe_expert_choice_backward(const smoe_tensor* logits, const smoe_pairs* pairs,
                                        const smoe_tensor* dweight, const smoe_tensor* dlogits,
                                        const smoe_exec* exec) {
  return capi::guarded([&] {
    expert_choice_backward(capi::required(logits, "logits"), capi::pairs(pairs),
                           capi::required(dweight, "dweight"), capi::required(dlogits, "dlogits"),
                           capi::exec(exec));
  });
}

smoe_status smoe_expert_choice_scratch_bytes(int64_t tokens, int64_t experts, const smoe_exec* exec,
                                             int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = expert_choice_scratch_bytes(tokens, experts, capi::exec(exec));
  });
}

smoe_status smoe_expert_choice_in_scratch(const smoe_tensor* logits, int64_t capacity,
                                          const smoe_pairs* pairs, void* scratch,
                                          int64_t scratch_bytes, const smoe_exec* exec) {
  return capi::guarded([&] {
    expert_choice(capi::required(logits, "logits"), capacity, capi::pairs(pairs),
                  Buffer{scratch, scratch_bytes}, capi::exec(exec));
  });
}

smoe_status smoe_expert_choice_backward_in_scratch(const smoe_tensor* logits,
                                                   const smoe_pairs* pairs,
                                                   const smoe_tensor* dweight,
                                                   const smoe_tensor* dlogits, void* scratch,
                                                   int64_t scratch_bytes, const smoe_exec* exec) {
  return capi::guarded([&] {
    expert_choice_backward(capi::required(logits, "logits"), capi::pairs(pairs),
                           capi::required(dweight, "dweight"), capi::required(dlogits, "dlogits"),
                           Buffer{scratch, scratch_bytes}, capi::exec(exec));
  });
}

smoe_status smoe_router_losses_scratch_bytes(int64_t tokens, int64_t experts, const smoe_exec* exec,
                                             int64_t* bytes) {
  return capi::guarded([&] {
    capi::refuse_null(bytes, "bytes");
    *bytes = router_losses_scratch_bytes(tokens, experts, capi::exec(exec));
  });
}

smoe_status smoe_router_losses_in_scratch(const smoe_route_options* options,
                                          const smoe_tensor* logits, const smoe_tensor* ids,
                                          const smoe_tensor* values,
                                          const smoe_tensor* tokens_per_expert, void* scratch,
                                          int64_t scratch_bytes, const smoe_exec* exec) {
  return capi::guarded([&] {
    const RouterLosses out{capi::required(values, "values"),
                           capi::required(tokens_per_expert, "tokens_per_expert")};
    router_losses(capi::route_options(options), capi::required(logits, "logits"),
                  capi::required(ids, "ids"), out, Buffer{scratch, scratch_bytes},
                  capi::exec(exec));
  });
}

smoe_status smoe_router_losses(const smoe_route_options* options, const smoe_tensor* logits,
                               const smoe_tensor* ids, const smoe_tensor* values,
                               const smoe_tensor* tokens_per_expert, const smoe_exec* exec) {
  return capi::guarded([&] {
    const RouterLosses out{capi::required(values, "values"),
                           capi::required(tokens_per_expert, "tokens_per_expert")};
    router_losses(capi::route_options(options), capi::required(logits, "logits"),
                  capi::required(ids, "ids"), out, capi::exec(exec));
  });
}

smoe_status smoe_router_losses_backward(const smoe_route_options* options,
                                        const smoe_tensor* logits,
                                        const smoe_tensor* tokens_per_expert,
                                        const smoe_tensor* dvalues, const smoe_tensor* dlogits,
                                        const smoe_exec* exec) {
  return capi::guarded([&] {
    router_losses_backward(capi::route_options(options), capi::required(logits, "logits"),
                           capi::required(tokens_per_expert, "tokens_per_expert"),
                           capi::required(dvalues, "dvalues"), capi::required(dlogits, "dlogits"),
                           capi::exec(exec));
  });
}

}  // extern "C"
