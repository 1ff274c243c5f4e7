// Routing on CUDA: the functions of sonicmoe/routing.h for bf16, fp16 and fp32 logits, E <= 1024
// and K <= 32. Ids, pairs and their order are those of the CPU backend, bit for bit. No host
// synchronisation, no allocation.
#pragma once

#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec);
void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec);
std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                 std::int64_t experts, const Exec& exec);
void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec);
void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, Buffer scratch,
                          const Exec& exec);

std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts);
void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, Buffer scratch,
                   const Exec& exec);
void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, Buffer scratch, const Exec& exec);
std::int64_t router_losses_scratch_bytes(std::int64_t tokens, std::int64_t experts);
void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, Buffer scratch, const Exec& exec);
void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec);

}  // namespace sonicmoe::cuda
