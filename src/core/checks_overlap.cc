// Refuses arguments of a call that share memory. These checks come last: they rely on tensors that
// other checks have accepted.
#include "core/checks.h"
#include "core/overlap.h"

namespace sonicmoe::checks {
namespace {

void add(Lent& lent, const Routing& r) {
  lent.add("routing.ids", r.ids);
  lent.add("routing.weights", r.weights);
  lent.add("routing.token", r.token);
  lent.add("routing.expert", r.expert);
  lent.add("routing.row_begin", r.row_begin);
  lent.add("routing.row_count", r.row_count);
}

void add(Lent& lent, const Weights& w, const UnpackedMemory& unpacked) {
  if (unpacked.first.data == nullptr) {
    lent.add("weights.gate", w.gate);
    lent.add("weights.up", w.up);
    lent.add("weights.down", w.down);
  } else {
    lent.add("weights.up", unpacked.first);
    lent.add("weights.down", unpacked.second);
  }
  lent.add("weights.b_gate", w.b_gate);
  lent.add("weights.b_up", w.b_up);
  lent.add("weights.b_down", w.b_down);
}

void add(Lent& lent, const Lora& lora) {
  lent.add("lora.up.a", lora.up.a);
  lent.add("lora.up.b", lora.up.b);
  lent.add("lora.up.gate_b", lora.up.gate_b);
  lent.add("lora.down.a", lora.down.a);
  lent.add("lora.down.b", lora.down.b);
}

/// Memory that a call only reads, as a tensor, rounded up to 4 bytes.
Tensor read_only(const Buffer& buffer) {
  return tensor1(buffer.data, DType::kI32, buffer.bytes / 4 + (buffer.bytes % 4 != 0 ? 1 : 0));
}

/// The buffers of a packed tensor as tensors.
struct PackedTensors {
  explicit PackedTensors(const PackedWeights& p)
      : codes(read_only(p.codes)),
        scales(read_only(p.scales)),
        nested_map(read_only(p.nested_map)),
        nested_scales(read_only(p.nested_scales)),
        nested_offset(read_only(p.nested_offset)) {}
  Tensor codes, scales, nested_map, nested_scales, nested_offset;
};

void add(Lent& lent, const PackedTensors& p) {
  lent.add("codes", p.codes);
  lent.add("scales", p.scales);
  lent.add("nested_map", p.nested_map);
  lent.add("nested_scales", p.nested_scales);
  lent.add("nested_offset", p.nested_offset);
}

void add(Lent& lent, const Pairs& pairs, Use use) {
  lent.add("pairs.token", pairs.token, use);
  lent.add("pairs.expert", pairs.expert, use);
  lent.add("pairs.weight", pairs.weight, use);
  lent.add("pairs.offsets", pairs.offsets, use);
}

template <class Args>
void gemm_overlap(const Args& args) {
  Lent lent;
  lent.add("scratch", args.scratch);
  lent.add("d", args.d, Use::kWritten);
  lent.add("a", args.a);
  lent.add("b", args.b);
  lent.add("offsets", args.offsets);
  lent.add("gather", args.gather);
  lent.refuse_shared_memory();
}

}  // namespace

void forward_overlap(const ForwardArgs& args, const UnpackedMemory& unpacked,
                     const Buffer& kept_x) {
  Lent lent;
  lent.add("kept_x", kept_x);
  lent.add("h", args.h);
  lent.add("saved", args.saved);
  lent.add("scratch", args.scratch);
  lent.add("out", args.out, Use::kWritten);
  lent.add("x", args.x);
  const Tensor fp8_weights = read_only(args.fp8_weights);
  lent.add("fp8_weights", fp8_weights);
  add(lent, args.routing);
  add(lent, args.weights, unpacked);
  add(lent, args.lora);
  lent.refuse_shared_memory();
}

void backward_overlap(const BackwardArgs& args, const UnpackedMemory& unpacked,
                      const Buffer& kept_x) {
  Lent lent;
  lent.add("kept_x", kept_x);
  lent.add("h", args.h);
  lent.add("saved", args.saved);
  lent.add("scratch", args.scratch);
  lent.add("dx", args.dx, Use::kWritten);
  lent.add("dweights", args.dweights, Use::kWritten);
  lent.add("grads.gate", args.grads.gate, Use::kWritten);
  lent.add("grads.up", args.grads.up, Use::kWritten);
  lent.add("grads.down", args.grads.down, Use::kWritten);
  lent.add("grads.b_gate", args.grads.b_gate, Use::kWritten);
  lent.add("grads.b_up", args.grads.b_up, Use::kWritten);
  lent.add("grads.b_down", args.grads.b_down, Use::kWritten);
  lent.add("lora_grads.up.a", args.lora_grads.up.a, Use::kWritten);
  lent.add("lora_grads.up.b", args.lora_grads.up.b, Use::kWritten);
  lent.add("lora_grads.up.gate_b", args.lora_grads.up.gate_b, Use::kWritten);
  lent.add("lora_grads.down.a", args.lora_grads.down.a, Use::kWritten);
  lent.add("lora_grads.down.b", args.lora_grads.down.b, Use::kWritten);
  lent.add("x", args.x);
  lent.add("dout", args.dout);
  const Tensor fp8_weights = read_only(args.fp8_weights);
  lent.add("fp8_weights", fp8_weights);
  add(lent, args.routing);
  add(lent, args.weights, unpacked);
  add(lent, args.lora);
  lent.refuse_shared_memory();
}

void unpack_weights_overlap(const PackedWeights& packed, const Tensor& out) {
  const PackedTensors tensors(packed);
  Lent lent;
  lent.add("out", out, Use::kWritten);
  add(lent, tensors);
  lent.refuse_shared_memory();
}

void packed_layer_overlap(const UnpackedMemory& memory, const PackedLayer& packed) {
  const PackedTensors up(packed.up), down(packed.down);
  Lent lent;
  lent.add("weights.up", memory.first);
  lent.add("weights.down", memory.second);
  add(lent, up);
  add(lent, down);
  lent.refuse_shared_memory();
}

void quantize_weights_overlap(const Weights& weights, const Buffer& out) {
  Lent lent;
  lent.add("fp8_weights", out);
  lent.add("weights.gate", weights.gate);
  lent.add("weights.up", weights.up);
  lent.add("weights.down", weights.down);
  lent.refuse_shared_memory();
}

void grouped_gemm_overlap(const GroupedGemm& args) { gemm_overlap(args); }
void grouped_gemm_k_overlap(const GroupedGemmK& args) { gemm_overlap(args); }

void route_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const Tensor& weights) {
  Lent lent;
  lent.add("ids", ids, Use::kWritten);
  lent.add("weights", weights, Use::kWritten);
  lent.add("logits", logits);
  lent.add("bias", options.bias);
  lent.refuse_shared_memory();
}

void route_backward_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                            const Tensor& dweights, const Tensor& dlogits) {
  Lent lent;
  lent.add("dlogits", dlogits, Use::kWritten);
  lent.add("logits", logits);
  lent.add("ids", ids);
  lent.add("dweights", dweights);
  lent.add("bias", options.bias);
  lent.refuse_shared_memory();
}

void pairs_overlap(const Tensor& bias, const Tensor& logits, const Pairs& pairs,
                   const Buffer& scratch) {
  Lent lent;
  lent.add("scratch", scratch);
  add(lent, pairs, Use::kWritten);
  lent.add("logits", logits);
  lent.add("bias", bias);
  lent.refuse_shared_memory();
}

void pairs_backward_overlap(const Tensor& bias, const Tensor& logits, const Pairs& pairs,
                            const Tensor& dweight, const Tensor& dlogits, const Buffer& scratch) {
  Lent lent;
  lent.add("scratch", scratch);
  lent.add("dlogits", dlogits, Use::kWritten);
  lent.add("logits", logits);
  lent.add("dweight", dweight);
  lent.add("bias", bias);
  add(lent, pairs, Use::kRead);
  lent.refuse_shared_memory();
}

void router_losses_overlap(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                           const RouterLosses& out, const Buffer& scratch) {
  Lent lent;
  lent.add("scratch", scratch);
  lent.add("values", out.values, Use::kWritten);
  lent.add("tokens_per_expert", out.tokens_per_expert, Use::kWritten);
  lent.add("logits", logits);
  lent.add("ids", ids);
  lent.add("bias", options.bias);
  lent.refuse_shared_memory();
}

void router_losses_backward_overlap(const RouteOptions& options, const Tensor& logits,
                                    const Tensor& tokens_per_expert, const Tensor& dvalues,
                                    const Tensor& dlogits) {
  Lent lent;
  lent.add("dlogits", dlogits, Use::kWritten);
  lent.add("logits", logits);
  lent.add("tokens_per_expert", tokens_per_expert);
  lent.add("dvalues", dvalues);
  lent.add("bias", options.bias);
  lent.refuse_shared_memory();
}

}  // namespace sonicmoe::checks
