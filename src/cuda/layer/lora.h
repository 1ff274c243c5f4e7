// The low-rank factors of a pass (sonicmoe/low_rank.h): narrow products with them, the terms that
// they add to the products with the weights, and their gradients.
#pragma once

#include <optional>
#include <string>

#include "cuda/device/carver.h"
#include "cuda/layer/engine.h"
#include "cuda/layer/steps.h"

namespace sonicmoe::cuda {

struct BackwardCall;

/// Arrays in the scratch of a pass with low-rank factors.
struct LoraScratch {
  Pass pass;
  void* p;        ///< (C, up_rank) P; at inference only
  void* u;        ///< (C, down_rank) U, in backward U'
  void* q;        ///< (C, down_rank) Q; in backward only
  void* v;        ///< (C, up_rank) V; in backward only
  void* factors;  ///< copies of all factors
};
LoraScratch take_lora_scratch(const Problem& problem, Pass pass, Carver<256>& carver);

/// Bytes of the saved memory: the metadata, then P. saved_p() is the address of P in it.
std::int64_t saved_bytes(const Problem& problem);
void* saved_p(const Problem& problem, void* saved);

/// The rows and factors of the low-rank products of a pass. Tensors of rank 0 are absent.
struct LoraPass {
  Lora factors;        ///< in the dtype and order that products need: the caller's, or copies
  CopyFactors copies;  ///< to be made before the products
  Tensor p, u, q, v;   ///< as in LoraScratch
  unsigned* counters;  ///< tile counters
};
/// `p` and `counters` are those of the pass.
LoraPass lora_pass(const Problem& problem, const Weights& weights, const Lora& lora,
                   const LoraScratch& scratch, void* p, unsigned* counters);

/// The terms of A, Y, dH and dX~; none without factors.
std::optional<LowRankTerm> up_term(const Problem& problem, const LoraPass& lora);
std::optional<LowRankTerm> down_term(const LoraPass& lora);
std::optional<LowRankTerm> hidden_grad_term(const LoraPass& lora);
std::optional<LowRankTerm> input_grad_term(const LoraPass& lora);

/// Adds the copies of factors, which come first in a pass.
void add_factor_copies(const LoraPass& lora, Steps& steps);
/// P = scale_u X A_u^T and Q = scale_d dO B_d, of all rows; absent without factors.
std::optional<RowProduct> up_inner_product(const PassContext& pass, const ForwardArgs& args,
                                           const LoraPass& lora);
std::optional<RowProduct> hidden_grad_inner_product(const BackwardCall& call);

/// Forward: adds the copies of factors and P, before A; adds U, before Y.
void add_up_inner(const PassContext& pass, const ForwardArgs& args, const LoraPass& lora,
                  Steps& steps);
void add_down_inner(const PassContext& pass, const Tensor& a, const LoraPass& lora, Steps& steps);

/// Backward: adds the copies of factors and Q, before dH; adds V and U', after dH.
void add_before_hidden_grad(const BackwardCall& call, Steps& steps);
void add_after_hidden_grad(const BackwardCall& call, Steps& steps);
/// When dX~ may begin if it follows these steps; absent if they are none.
std::optional<Start> start_of_input_grad(const BackwardCall& call);

bool has_factor_grads(const LowRank& grads);
/// Add the gradients of the factors that are asked for, after V and U'. `independent`: the previous
/// launch has waited for these.
void add_down_factor_grads(const BackwardCall& call, bool independent, Steps& steps);
void add_up_factor_grads(const BackwardCall& call, bool independent, Steps& steps);

/// Why CUDA cannot serve the ranks of a problem; empty if it can.
std::string lora_refusal(const Problem& problem);
/// Refuses gradients of factors that CUDA cannot store.
void check_factor_grads(const Problem& problem, const BackwardArgs& args);

}  // namespace sonicmoe::cuda
