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

}  // namespace sonicmoe::cuda
