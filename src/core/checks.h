// The checks of every public function. They run before any work and refuse every error in the
// arguments that the host can see. The host cannot see values on the device (ids, offsets,
// counts): these are never refused, and each of their bit patterns has a defined meaning.
//
// The functions *_overlap come after all other checks of a call: no buffer may share a byte with
// anything, and no output an element with another argument.
#pragma once

#include "core/check_tensor.h"
#include "core/exchange_step.h"
#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::checks {

void exec(const Exec& exec);

/// The row capacity C. Reads only form, tokens, top_k and capacity; the other fields may still be
/// unchecked.
std::int64_t rows(const Problem& problem);
void problem(const Problem& problem);
void moe_sizes(const Problem& problem, Pass pass, const Exec& exec);
/// Checks the tensors only. The sizes of the buffers depend on the backend: see forward_buffers.
void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec);
void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec);
/// Checks the ranks and the dtype of the low-rank factors of a problem; part of problem().
void low_rank(const Problem& problem);
/// Checks that each projection has factors exactly if its rank is above 0; part of moe_forward()
/// and moe_backward().
void factors(const Problem& problem, const Lora& lora);
/// Checks the gradients of factors that `args` asks for. `dtypes`: those of weight gradients.
void factor_grads(const Problem& problem, const BackwardArgs& args, DTypes dtypes);
/// Checks Problem::precision, Problem::kept_h and the sizes that they need; part of problem().
void precision(const Problem& problem);
void quantize_weights(const Problem& problem, const Weights& weights, const Exec& exec);
/// Checks that `given` is large enough for the quantised weights of an fp8 problem, and empty for
/// any other problem.
void fp8_weights(const Problem& problem, const Buffer& given, const Exec& exec);
void quantize_weights_overlap(const Weights& weights, const Buffer& out);
void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec);
void unpack_weights_overlap(const PackedWeights& packed, const Tensor& out);
/// Checks of a pass on packed weights, besides those of the pass: `weights` is memory for some of
/// the experts.
void packed_layer(const Problem& problem, const Weights& weights, const PackedLayer& packed);
/// `weights`, a pass's memory for some experts, as if it had all of them.
Weights of_all_experts(const Problem& problem, Weights weights);
/// The memory into which a pass unpacks: two ranges, or one if they share bytes.
struct UnpackedMemory {
  Buffer first, second;
};
UnpackedMemory unpacked_memory(const Weights& weights);
void packed_layer_overlap(const UnpackedMemory& memory, const PackedLayer& packed);
/// Of the weights, checks gate and up only.
void h_views(const Problem& problem, const Weights& weights, const Exec& exec);
/// The pass that the buffers of a forward ask for: training if h or saved is given, else inference.
Pass forward_pass(const ForwardArgs& args);
void forward_buffers(const ForwardArgs& args, const Sizes& needed, const Exec& exec);
void backward_buffers(const BackwardArgs& args, const Sizes& needed, const Exec& exec);
/// With `unpacked`, the gate, up and down of args.weights are memory in it. `kept_x` is that of an
/// exchange.
void forward_overlap(const ForwardArgs& args, const UnpackedMemory& unpacked = {},
                     const Buffer& kept_x = {});
void backward_overlap(const BackwardArgs& args, const UnpackedMemory& unpacked = {},
                      const Buffer& kept_x = {});

void grouped_gemm(const GroupedGemm& args, const Exec& exec);
void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec);
void grouped_gemm_overlap(const GroupedGemm& args);
void grouped_gemm_k_overlap(const GroupedGemmK& args);
void grouped_gemm_sizes(std::int64_t rows, std::int64_t experts, const Exec& exec);

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec);
void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec);
void route_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const Tensor& weights);
void route_backward_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                            const Tensor& dweights, const Tensor& dlogits);
/// Options and sizes of a rounding, without its tensors.
void round_options(const RoundOptions& options, std::int64_t tokens, std::int64_t experts);
void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 const Exec& exec);
void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, const Exec& exec);
void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                   const Exec& exec);
void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& exec);
/// `bias` is the bias of the route options; empty for expert choice.
void pairs_overlap(const Tensor& bias, const Tensor& logits, const Pairs& pairs,
                   const Buffer& scratch);
void pairs_backward_overlap(const Tensor& bias, const Tensor& logits, const Pairs& pairs,
                            const Tensor& dweight, const Tensor& dlogits, const Buffer& scratch);
/// Checks T and E of a call that asks for the size of scratch.
void routing_sizes(std::int64_t tokens, std::int64_t experts, const Exec& exec);
void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& exec);
void router_losses_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                           const RouterLosses& out, const Buffer& scratch);
void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec);
void router_losses_backward_overlap(const RouteOptions& options, const Tensor& logits,
                                    const Tensor& tokens_per_expert, const Tensor& dvalues,
                                    const Tensor& dlogits);

void exchange_shape(const ExchangeShape& shape);
/// `needed` is the size of a symmetric buffer.
void exchange_options(const ExchangeOptions& options, std::int64_t needed, const Exec& exec);
/// Whether a step of `problem` fits an exchange of this shape, apart from its rows.
void exchange_problem(const ExchangeShape& shape, const Problem& problem);
/// Whether a rank's layer may have so many rows.
void exchange_rows(const ExchangeShape& shape, const Problem& problem, std::int64_t rows);
void exchange_part(ExchangePart part);
/// Refuses a part that is not the next one of `pass`.
void exchange_order(const ExchangeState& state, Pass pass, ExchangePart part);
void exchange_forward(const ExchangeShape& shape, const Problem& problem, const ForwardArgs& args,
                      const Exec& exec);
void exchange_backward(const ExchangeShape& shape, const Problem& problem, const BackwardArgs& args,
                       const Exec& exec);

}  // namespace sonicmoe::checks
