// The functions of the CPU backend; backend.cc puts them in its table (core/backend_table.h).
#pragma once

#include "core/backend_table.h"

namespace sonicmoe {

const BackendTable* cpu_backend();

}  // namespace sonicmoe

namespace sonicmoe::cpu {

Sizes moe_sizes(const Problem& problem, Pass pass, const Exec& exec);
void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec);
void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec);
/// H at `data`: (C, G, n).
Tensor h_rows(const Problem& problem, const Weights& weights, void* data);
void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec);
void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec);

void grouped_gemm(const GroupedGemm& args, const Exec& exec);
void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec);

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
void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                   const Exec& exec);
void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& exec);
void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& exec);
void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec);

}  // namespace sonicmoe::cpu
