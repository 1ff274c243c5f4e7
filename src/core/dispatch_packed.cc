#include "core/backend_table.h"
#include "core/checks.h"

namespace sonicmoe {

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec) {
  checks::unpack_weights(packed, out, exec);
  checks::unpack_weights_overlap(packed, out);
  serve(exec, "unpack_weights", &BackendTable::unpack_weights)(packed, out, exec);
}

void moe_forward(const Problem& problem, const ForwardArgs& args, const PackedLayer& packed,
                 const Exec& exec) {
  const auto run = serve(exec, "moe_forward of packed weights", &BackendTable::packed_forward);
  ForwardArgs whole = args;
  whole.weights = checks::of_all_experts(problem, args.weights);
  checks::moe_forward(problem, whole, exec);
  checks::packed_layer(problem, args.weights, packed);
  checks::forward_buffers(args, moe_sizes(problem, checks::forward_pass(args), exec), exec);
  checks::fp8_weights(problem, args.fp8_weights, exec);
  const checks::UnpackedMemory memory = checks::unpacked_memory(args.weights);
  checks::packed_layer_overlap(memory, packed);
  checks::forward_overlap(args, memory);
  run(problem, args, packed, exec);
}

void moe_backward(const Problem& problem, const BackwardArgs& args, const PackedLayer& packed,
                  const Exec& exec) {
  const auto run = serve(exec, "moe_backward of packed weights", &BackendTable::packed_backward);
  BackwardArgs whole = args;
  whole.weights = checks::of_all_experts(problem, args.weights);
  checks::moe_backward(problem, whole, exec);
  checks::packed_layer(problem, args.weights, packed);
  for (const Tensor* grad : {&args.grads.gate, &args.grads.up, &args.grads.down}) {
    checks::absent(*grad, "a gradient of gate, up or down", "packed weights are frozen");
  }
  checks::backward_buffers(args, moe_sizes(problem, Pass::kBackward, exec), exec);
  checks::fp8_weights(problem, args.fp8_weights, exec);
  const checks::UnpackedMemory memory = checks::unpacked_memory(args.weights);
  checks::packed_layer_overlap(memory, packed);
  checks::backward_overlap(args, memory);
  run(problem, args, packed, exec);
}

}  // namespace sonicmoe
