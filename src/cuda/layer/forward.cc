// Forward on CUDA: metadata, A (gather, up projection, activation), Y (down projection), O (sum).
#include "cuda/device/carver.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/moe.h"
#include "cuda/layer/passes.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

enum Counter : int { kCounterA, kCounterY };

}  // namespace

RangeLists take_range_lists(const Problem& p, Carver<256>& carver) {
  const std::int64_t records = metadata_layout(p, nullptr).most_records;
  return {carver.take<TileRecord>(records), carver.take<std::int32_t>(1)};
}

ForwardScratch forward_scratch(const Problem& p, Pass pass, void* base) {
  const std::int64_t capacity = row_capacity(p);
  const std::int64_t element = dtype_bytes(p.dtype);
  Carver<256> carver(base);
  ForwardScratch s{};
  if (p.precision == Precision::kFp8) {
    s.x = take_token_codes(carver, p.tokens, p.hidden);
    s.a.codes = take_row_codes(carver, capacity, p.width);
  }
  if (p.precision != Precision::kFp8 || p.down_rank != 0) {
    void* a = carver.take<std::byte>(capacity * p.width * element);
    s.a.elements = tensor2(a, p.dtype, capacity, p.width);
  }
  s.y = carver.take<std::byte>(capacity * p.hidden * element);
  s.counters = carver.take<unsigned>(kCounterBytes / 4);
  s.metadata = carver.take<std::byte>(metadata_scratch(p));
  if (pass == Pass::kInference) {
    s.saved = carver.take<std::byte>(metadata_layout(p, nullptr).bytes);
  }
  s.lora = take_lora_scratch(p, pass, carver);
  s.range = take_range_lists(p, carver);
  s.bytes = carver.used();
  return s;
}

RowProduct up_product(const PassContext& pass, const ForwardArgs& args,
                      const ForwardScratch& scratch) {
  const Problem& p = pass.problem;
  const std::int32_t* token = pass.metadata.row_token;
  const bool coded = p.precision == Precision::kFp8;
  return {.dtype = p.dtype,
          .groups = {&pass.metadata, nullptr, p.experts, row_capacity(p)},
          .rows = coded ? operand_of(scratch.x, token) : RowOperand{args.x, token},
          .weights = WeightOperands(p, args.weights, args.fp8_weights).up(),
          .epilogue =
              Activate{.h = kept_h(p, args.weights, args.h.data),
                       .a = scratch.a,
                       .bias_gate = is_gated(p.activation.kind) ? args.weights.b_gate : Tensor{},
                       .bias_up = args.weights.b_up,
                       .activation = p.activation,
                       .layout = h_layout(p, args.weights)},
          .hints = {.tile_counter = scratch.counters + kCounterA}};
}

RowProduct down_product(const PassContext& pass, const ForwardArgs& args,
                        const ForwardScratch& scratch, const Tensor& out) {
  const Problem& p = pass.problem;
  const bool coded = p.precision == Precision::kFp8;
  const bool scaled = p.form == RoutingForm::kGrouped;
  return {.dtype = p.dtype,
          .groups = {&pass.metadata, nullptr, p.experts, row_capacity(p)},
          .rows = coded ? operand_of(scratch.a.codes, nullptr)
                        : RowOperand{scratch.a.elements, nullptr},
          .weights = WeightOperands(p, args.weights, args.fp8_weights).down(),
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
  if (p.precision == Precision::kFp8) steps.add("q(X)", QuantizeRows{args.x, scratch.x});
  void* kept = args.saved.data == nullptr ? scratch.lora.p : saved_p(p, args.saved.data);
  const LoraPass lora =
      lora_pass(p, args.weights, args.lora, scratch.lora, kept, scratch.counters + kLoraCounters);
  add_up_inner(pass, args, lora, steps);
  RowProduct a = up_product(pass, args, scratch);
  a.low_rank = up_term(p, lora);
  add_product(pass, "A", a, &PackedLayer::up, steps);
  add_down_inner(pass, scratch.a.elements, lora, steps);
  const bool grouped = p.form == RoutingForm::kGrouped;
  RowProduct y =
      down_product(pass, args, scratch,
                   grouped ? args.out : tensor2(scratch.y, p.dtype, row_capacity(p), p.hidden));
  y.low_rank = down_term(lora);
  if (grouped) {
    // Row p of Y is row p of the output; rows in no group are zero.
    steps.add("Y", ClearRows{args.out});
    add_product(pass, "Y", y, &PackedLayer::down, steps);
    return;
  }
  add_product(pass, "Y", y, &PackedLayer::down, steps);
  steps.add(
      "O",
      TokenSum{scratch.y, args.routing.weights, args.out, {0, p.tokens}, Start::kAfterPrevious});
}

Sizes moe_sizes(const Problem& problem, Pass pass, const Engine& engine) {
  check_problem(problem, engine);
  Sizes sizes;
  if (pass != Pass::kInference) {
    sizes.h_bytes = h_bytes(problem);
    sizes.saved_bytes = saved_bytes(problem);
  }
  sizes.scratch_bytes = pass == Pass::kBackward ? backward_scratch(problem, engine, nullptr).bytes
                                                : forward_scratch(problem, pass, nullptr).bytes;
  return sizes;
}

namespace {

void run_forward(const Problem& problem, const ForwardArgs& args, const PackedLayer* packed,
                 const Exec& exec) {
  const Device& device = device_of(exec);
  check_rows("x", args.x);
  check_rows("out", args.out);
  if (problem.precision != Precision::kFp8) check_weights(problem, args.weights);
  if (problem.tokens == 0) return;
  if (row_capacity(problem) == 0) {
    clear_rows(args.out, stream_of(exec));
    return;
  }
  const bool training = args.saved.data != nullptr;
  const Pass kind = training ? Pass::kForward : Pass::kInference;
  const ForwardScratch scratch = forward_scratch(problem, kind, args.scratch.data);
  const PassContext pass{problem,
                         metadata_layout(problem, training ? args.saved.data : scratch.saved),
                         {packed, scratch.range}};
  Steps steps;
  add_forward_steps(pass, args, scratch, steps);
  run(steps, pass, device, exec);
}

}  // namespace

void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  run_forward(problem, args, nullptr, exec);
}

void packed_forward(const Problem& problem, const ForwardArgs& args, const PackedLayer& packed,
                    const Exec& exec) {
  run_forward(problem, args, &packed, exec);
}

void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec) {
  const Device& device = device_of(exec);
  check_problem(problem, *device.engine);
  check_weights(problem, weights);
  device.engine->quantizers->weights(device, problem, weights, out, stream_of(exec));
}

}  // namespace sonicmoe::cuda
