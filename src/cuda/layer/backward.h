// The steps of backward as separate functions, for a pass that has other work between them.
#pragma once

#include "cuda/layer/passes.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {

/// The arguments of one call; the functions below make the steps from it.
struct BackwardCall {
  const PassContext& pass;
  const BackwardArgs& args;
  const BackwardScratch& scratch;
  const Engine& engine;
  BackwardOrder order;
  GateLayout layout;
  RowGroups groups;
  Tensor dh;  ///< dh_rows()
  LoraPass lora;
  unsigned* arrival = nullptr;  ///< LaunchHints::arrival of dW1

  const Problem& problem() const { return pass.problem; }
  WeightOperands weights() const { return {problem(), args.weights, args.fp8_weights}; }
  Tensor rows(void* data, std::int64_t width) const {
    return tensor2(data, problem().dtype, groups.capacity, width);
  }
};

/// Makes the call with the order of steps that the engine asks for.
BackwardCall backward_call(const PassContext& pass, const BackwardArgs& args,
                           const BackwardScratch& scratch, const Engine& engine);

void add_row_lists(const BackwardCall& call, Steps& steps);
RowProduct hidden_grad_product(const BackwardCall& call);
/// dX~ = dH W1. Launched after dH, it may begin when dH's first rows are in memory; launched after
/// weight gradients, it may run beside them.
RowProduct input_grad_product(const BackwardCall& call, const RowProduct& hidden_grad);
/// Adds nothing if no bias gradient is asked for.
void add_bias_grads(const BackwardCall& call, Steps& steps);
void add_score_grad(const BackwardCall& call, Steps& steps);
void add_down_grad(const BackwardCall& call, Steps& steps);
void add_up_grads(const BackwardCall& call, Steps& steps);
void add_token_sum(const BackwardCall& call, const TokenRange& tokens, Steps& steps);

}  // namespace sonicmoe::cuda
