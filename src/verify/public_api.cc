// public_api() has a file of its own, so that a program without a backend can link the rest of the
// harness.
#include "core/backend_table.h"
#include "verify/implementation.h"

namespace sonicmoe::verify {

Implementation public_api(const Exec& exec) {
  Implementation i;
  i.name = backend_name(exec.backend);
  i.memory = host_memory();
  i.moe_sizes = [exec](const Problem& p, Pass pass) { return sonicmoe::moe_sizes(p, pass, exec); };
  i.quantize_weights = [exec](const Problem& p, const Weights& weights, const Buffer& out) {
    sonicmoe::quantize_weights(p, weights, out, exec);
  };
  i.moe_forward = [exec](const Problem& p, const ForwardArgs& args) {
    sonicmoe::moe_forward(p, args, exec);
  };
  i.moe_backward = [exec](const Problem& p, const BackwardArgs& args) {
    sonicmoe::moe_backward(p, args, exec);
  };
  i.grouped_gemm = [exec](const GroupedGemm& args) { sonicmoe::grouped_gemm(args, exec); };
  i.grouped_gemm_k = [exec](const GroupedGemmK& args) { sonicmoe::grouped_gemm_k(args, exec); };
  i.grouped_gemm_scratch = [exec](std::int64_t rows, std::int64_t experts) {
    return sonicmoe::grouped_gemm_scratch_bytes(rows, experts, exec);
  };
  i.route = [exec](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                   const Tensor& weights) { sonicmoe::route(o, logits, ids, weights, exec); };
  i.route_backward = [exec](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                            const Tensor& dweights, const Tensor& dlogits) {
    sonicmoe::route_backward(o, logits, ids, dweights, dlogits, exec);
  };
  i.round_scratch_bytes = [exec](const RoundOptions& o, std::int64_t tokens, std::int64_t experts) {
    return sonicmoe::round_scratch_bytes(o, tokens, experts, exec);
  };
  i.token_round = [exec](const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                         Buffer scratch) {
    sonicmoe::token_round(o, logits, pairs, scratch, exec);
  };
  i.token_round_backward = [exec](const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                                  const Tensor& dweight, const Tensor& dlogits, Buffer scratch) {
    sonicmoe::token_round_backward(o, logits, pairs, dweight, dlogits, scratch, exec);
  };
  i.unpack_weights = [exec](const PackedWeights& packed, const Tensor& out) {
    sonicmoe::unpack_weights(packed, out, exec);
  };
  return i;
}

}  // namespace sonicmoe::verify
