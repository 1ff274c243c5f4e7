// Forward on CUDA: metadata, A (gather, up projection, activation), Y (down projection), O (sum).
#include "cuda/device/carver.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/fp8_passes.h"
#include "cuda/layer/moe.h"
#include "cuda/layer/passes.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

enum Counter : int { kCounterA, kCounterY };

}  // namespace

ForwardScratch forward_scratch(const Problem& p, Pass pass, void* base) {
  const std::int64_t capacity = row_capacity(p);
  const std::int64_t element = dtype_bytes(p.dtype);
  Carver<256> carver(base);
  ForwardScratch s{};
  s.a = carver.take<std::byte>(capacity * p.width * element);
  s.y = carver.take<std::byte>(capacity * p.hidden * element);
  s.counters = carver.take<unsigned>(kCounterBytes / 4);
  s.metadata = carver.take<std::byte>(metadata_scratch(p));
  if (pass == Pass::kInference) {
    s.saved = carver.take<std::byte>(metadata_layout(p, nullptr).bytes);
  }
  s.lora = take_lora_scratch(p, pass, carver);
  s.bytes = carver.used();
  return s;
}

LoraPass forward_lora(const Problem& p, const ForwardArgs& args, const ForwardScratch& scratch) {
  void* kept = args.saved.data == nullptr ? scratch.lora.p : saved_p(p, args.saved.data);
  return lora_pass(p, args.weights, args.lora, scratch.lora, kept,
                   scratch.counters + kLoraCounters);
}

RowProduct up_product(const PassContext& pass, const ForwardArgs& args,
                      const ForwardScratch& scratch) {
  const Problem& p = pass.problem;
  const std::int64_t capacity = row_capacity(p);
  const bool gated = is_gated(p.activation.kind);
  const bool training = args.h.data != nullptr;
  return {.dtype = p.dtype,
          .groups = {&pass.metadata, nullptr, p.experts, capacity},
          .rows = {args.x, pass.metadata.row_token},
          .weights = up_operand(p, args.weights),
          .low_rank = up_term(p, forward_lora(p, args, scratch)),
          .epilogue = Activate{.h = training ? h_rows(p, args.weights, args.h.data) : Tensor{},
                               .a = tensor2(scratch.a, p.dtype, capacity, p.width),
                               .bias_gate = gated ? args.weights.b_gate : Tensor{},
                               .bias_up = args.weights.b_up,
                               .activation = p.activation,
                               .layout = gate_layout(p, args.weights)},
          .hints = {.tile_counter = scratch.counters + kCounterA}};
}

RowProduct down_product(const PassContext& pass, const ForwardArgs& args,
                        const ForwardScratch& scratch, const Tensor& out) {
  const Problem& p = pass.problem;
  const std::int64_t capacity = row_capacity(p);
  const bool scaled = p.form == RoutingForm::kGrouped;
  return {.dtype = p.dtype,
          .groups = {&pass.metadata, nullptr, p.experts, capacity},
          .rows = {tensor2(scratch.a, p.dtype, capacity, p.width), nullptr},
          .weights = {args.weights.down, {}, WeightParts::kOne},
          .low_rank = down_term(forward_lora(p, args, scratch)),
          .epilogue = StoreOutput{.out = out,
                                  .bias = args.weights.b_down,
                                  .scale = scaled ? args.routing.weights : Tensor{}},
          .hints = {.tile_counter = scratch.counters + kCounterY}};
}

void add_forward_steps(const PassContext& pass, const ForwardArgs& args,
                       const ForwardScratch& scratch, Steps& steps) {
  const Problem& p = pass.problem;
  steps.add("metadata",
            BuildMetadata{args.routing, {scratch.metadata, scratch.counters, kCounterBytes / 4}});
  const LoraPass lora = forward_lora(p, args, scratch);
  add_up_inner(pass, args, lora, steps);
  steps.add("A", up_product(pass, args, scratch));
  add_down_inner(pass, tensor2(scratch.a, p.dtype, row_capacity(p), p.width), lora, steps);
  if (p.form == RoutingForm::kGrouped) {
    // Row p of Y is row p of the output; rows in no group are zero.
    steps.add("Y", ClearRows{args.out});
    steps.add("Y", down_product(pass, args, scratch, args.out));
    return;
  }
  steps.add("Y", down_product(pass, args, scratch,
                              tensor2(scratch.y, p.dtype, row_capacity(p), p.hidden)));
  steps.add(
      "O",
      TokenSum{scratch.y, args.routing.weights, args.out, {0, p.tokens}, Start::kAfterPrevious});
}

Sizes moe_sizes(const Problem& problem, Pass pass, const Engine& engine) {
  check_problem(problem, engine);
  Sizes sizes;
  const bool fp8 = problem.precision == Precision::kFp8;
  if (pass != Pass::kInference) {
    sizes.h_bytes = fp8 ? fp8_h_bytes(problem)
                        : gate_factor(problem.activation.kind) * row_capacity(problem) *
                              problem.width * dtype_bytes(problem.dtype);
    sizes.saved_bytes = saved_bytes(problem);
  }
  if (pass == Pass::kBackward) {
    sizes.scratch_bytes = fp8 ? fp8_backward_scratch(problem, engine, nullptr).bytes
                              : backward_scratch(problem, engine, nullptr).bytes;
  } else {
    sizes.scratch_bytes = fp8 ? fp8_forward_scratch(problem, pass, nullptr).bytes
                              : forward_scratch(problem, pass, nullptr).bytes;
  }
  return sizes;
}

void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  const Device& device = device_of(exec);
  check_problem(problem, *device.engine);
  check_rows("x", args.x);
  check_rows("out", args.out);
  const bool fp8 = problem.precision == Precision::kFp8;
  if (!fp8) check_weights(problem, args.weights);
  if (problem.tokens == 0) return;
  if (row_capacity(problem) == 0) {
    clear_rows(args.out, stream_of(exec));
    return;
  }
  const Pass kind = args.saved.data == nullptr ? Pass::kInference : Pass::kForward;
  const auto add_steps = [&](const auto& scratch, const ForwardScratch& layer, auto add) {
    void* saved = kind == Pass::kInference ? layer.saved : args.saved.data;
    const PassContext pass{problem, metadata_layout(problem, saved)};
    Steps steps;
    add(pass, args, scratch, steps);
    run(steps, pass, device, exec);
  };
  if (fp8) {
    const Fp8ForwardScratch scratch = fp8_forward_scratch(problem, kind, args.scratch.data);
    add_steps(scratch, scratch.layer, &add_fp8_forward_steps);
  } else {
    const ForwardScratch scratch = forward_scratch(problem, kind, args.scratch.data);
    add_steps(scratch, scratch, &add_forward_steps);
  }
}

void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec) {
  const Device& device = device_of(exec);
  check_problem(problem, *device.engine);
  check_weights(problem, weights);
  device.engine->fp8->quantize_weights(device, problem, weights, out, stream_of(exec));
}

}  // namespace sonicmoe::cuda
