// Backward on CUDA: dH (with A' and dS), dW2, dX~, dW1, dX, and the biases.
#include "cuda/layer/backward.h"

#include "cuda/device/carver.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/moe.h"
#include "cuda/layer/passes.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

/// Indices into BackwardScratch::counters. dW1 may be two products, gate and up.
enum Counter : int {
  kCounterInputGrad = 0,
  kCounterDownGrad = 1,
  kCounterUpGrad = 2,
  kCounterSecondUpGrad = 3,
  kCounterHiddenGrad = 4,
  kCounterRelease = 8,  // in another 32-byte sector than the tile counters
};

unsigned* counter(const BackwardCall& c, Counter which) { return c.scratch.counters + which; }

bool has_up_grads(const Weights& g) { return g.gate.data != nullptr || g.up.data != nullptr; }
/// Whether a product gives gradients of W1 or of its factors; of W2 or of its factors.
bool has_up_grads(const BackwardArgs& args) {
  return has_up_grads(args.grads) || has_factor_grads(args.lora_grads.up);
}
bool has_down_grads(const BackwardArgs& args) {
  return args.grads.down.data != nullptr || has_factor_grads(args.lora_grads.down);
}

/// A weight gradient: rows of x or dO (`left`), gathered by token, times rows in expert order
/// (`right`).
struct WeightGrad {
  Tensor left;
  Tensor right;
  std::int32_t right_part;
  Tensor out[2];
  GradParts parts;
  Counter counter;
  Start start;
  unsigned* arrival = nullptr;  ///< LaunchHints::arrival
};

DepthProduct weight_grad_product(const BackwardCall& c, const WeightGrad& g) {
  return {.dtype = c.problem().dtype,
          .groups = c.groups,
          .left = {g.left, c.pass.metadata.row_token},
          .right = g.right,
          .right_part = g.right_part,
          .out = {g.out[0], g.out[1]},
          .parts = g.parts,
          .mode = c.args.grad_mode,
          .hints = {.start = g.start, .tile_counter = counter(c, g.counter), .arrival = g.arrival},
          .companion = c.order.companion};
}

Start start_of(bool independent) {
  return independent ? Start::kIndependent : Start::kAfterPrevious;
}

/// dW1 if gate and up are interleaved: the columns of dH alternate between gate and up. 16-bit
/// gradients alternate too and are one output matrix. fp32 gradients are two output matrices with
/// any strides.
WeightGrad interleaved_up_grad(const BackwardCall& c, Start start) {
  const Weights& g = c.args.grads;
  const Tensor gate = transposed(g.gate);
  const Tensor up = transposed(g.up);
  WeightGrad grad{
      c.args.x,        c.dh,           0,     {transposed(interleaved_rows(g.gate)), {}},
      GradParts::kOne, kCounterUpGrad, start, c.arrival};
  if ((gate.data != nullptr ? gate : up).dtype == DType::kF32) {
    grad.out[0] = gate;
    grad.out[1] = up;
    grad.parts = GradParts::kAlternate;
  }
  return grad;
}

/// Whether dW_gate and dW_up may be the two halves of one product: both are asked for, they have
/// the same dtype and order of dimensions, and n is a multiple of 64, so that no block of 64
/// columns has columns of both.
bool is_one_product(const Problem& p, const Tensor& gate, const Tensor& up) {
  constexpr std::int64_t kBorderStep = 64;
  return gate.data != nullptr && up.data != nullptr && gate.dtype == up.dtype &&
         (gate.stride[2] == 1) == (up.stride[2] == 1) && p.width % kBorderStep == 0;
}

/// For a call without rows: every gradient that is not accumulated becomes zero.
void clear_gradients(const BackwardArgs& args, cudaStream_t stream) {
  if (args.dx.data != nullptr) clear(args.dx, stream);
  if (args.dweights.data != nullptr) clear(args.dweights, stream);
  if (args.grad_mode == GradMode::kAccumulate) return;
  const Weights& g = args.grads;
  const LowRank& up = args.lora_grads.up;
  const LowRank& down = args.lora_grads.down;
  for (const Tensor* t : {&g.gate, &g.up, &g.down, &g.b_gate, &g.b_up, &g.b_down, &up.a, &up.b,
                          &up.gate_b, &down.a, &down.b}) {
    if (t->data != nullptr) clear(*t, stream);
  }
}

}  // namespace

BackwardCall backward_call(const PassContext& pass, const BackwardArgs& args,
                           const BackwardScratch& scratch, const Engine& engine) {
  const Problem& p = pass.problem;
  return {pass,
          args,
          scratch,
          engine,
          engine.backward_order(p, args),
          gate_layout(p, args.weights),
          {&pass.metadata, scratch.experts, p.experts, row_capacity(p)},
          dh_rows(p, args.weights, scratch.dh),
          lora_pass(p, args.weights, args.lora, scratch.lora, saved_p(p, args.saved.data),
                    scratch.counters + kLoraCounters)};
}

void add_row_lists(const BackwardCall& c, Steps& steps) {
  steps.add("metadata", BuildRowLists{c.args.routing.weights,
                                      {c.scratch.row_weights, c.scratch.experts, c.scratch.counters,
                                       kCounterBytes / 4},
                                      c.args.dweights});
}

RowProduct hidden_grad_product(const BackwardCall& c) {
  const Problem& p = c.problem();
  const std::int32_t* token = c.pass.metadata.row_token;
  const bool coded = p.precision == Precision::kFp8;
  return {.dtype = p.dtype,
          .groups = c.groups,
          .rows = coded ? operand_of(c.scratch.dout, token) : RowOperand{c.args.dout, token},
          .weights = c.weights().down_transposed(),
          .low_rank = hidden_grad_term(c.lora),
          .epilogue = ActivateGrad{.h = kept_h(p, c.args.weights, c.args.h.data),
                                   .dh = {c.dh, c.scratch.dh_codes},
                                   .a = c.rows(c.scratch.a, p.width),
                                   .row_weight = c.scratch.row_weights,
                                   .score_parts = c.scratch.score_parts,
                                   .score_tiles = c.engine.score_tiles(p),
                                   .activation = p.activation,
                                   .layout = c.layout},
          .hints = {
              .tile_counter = counter(c, kCounterHiddenGrad),
              .release_counter = c.order.input_grad_first ? counter(c, kCounterRelease) : nullptr}};
}

RowProduct input_grad_product(const BackwardCall& c, const RowProduct& hidden_grad) {
  LaunchHints hints{.tile_counter = counter(c, kCounterInputGrad)};
  if (!c.order.input_grad_first && (has_up_grads(c.args) || has_down_grads(c.args))) {
    hints.start = Start::kIndependent;
  } else if (const std::optional<Start> start = start_of_input_grad(c)) {
    hints.start = *start;
  } else if (c.order.input_grad_first) {
    hints.start = Start::kWithRowsOf;
    hints.source = &hidden_grad;
  }
  const bool coded = c.problem().precision == Precision::kFp8;
  return {.dtype = c.problem().dtype,
          .groups = c.groups,
          .rows = coded ? operand_of(c.scratch.dh_codes, nullptr) : RowOperand{c.dh, nullptr},
          .weights = c.weights().up_transposed(),
          .low_rank = input_grad_term(c.lora),
          .epilogue = StoreOutput{.out = c.rows(c.scratch.dx, c.problem().hidden)},
          .hints = hints};
}

void add_down_grad(const BackwardCall& c, Steps& steps) {
  const Tensor& down = c.args.grads.down;
  if (down.data == nullptr) return;
  steps.add("dW2", weight_grad_product(c, {c.args.dout,
                                           c.rows(c.scratch.a, c.problem().width),
                                           0,
                                           {down, {}},
                                           GradParts::kOne,
                                           kCounterDownGrad,
                                           start_of(c.order.input_grad_first)}));
}

void add_up_grads(const BackwardCall& c, Steps& steps) {
  const Problem& p = c.problem();
  const Weights& g = c.args.grads;
  if (!has_up_grads(g)) return;
  // If an earlier product has waited for dH, dH is complete before this product begins.
  const bool second = c.order.input_grad_first || has_down_grads(c.args);
  if (c.layout == GateLayout::kInterleaved) {
    steps.add("dW1", weight_grad_product(c, interleaved_up_grad(c, start_of(second))));
    return;
  }
  const Tensor gate = transposed(g.gate);
  const Tensor up = transposed(g.up);
  if (is_one_product(p, gate, up)) {
    steps.add("dW1", weight_grad_product(c, {c.args.x,
                                             c.rows(c.scratch.dh, 2 * p.width),
                                             0,
                                             {gate, up},
                                             GradParts::kHalves,
                                             kCounterUpGrad,
                                             start_of(second),
                                             c.arrival}));
    return;
  }
  if (gate.data != nullptr) {
    steps.add("dW1", weight_grad_product(c, {c.args.x,
                                             c.dh,
                                             0,
                                             {gate, {}},
                                             GradParts::kOne,
                                             kCounterUpGrad,
                                             start_of(second),
                                             c.arrival}));
  }
  if (up.data != nullptr) {
    const std::int32_t part = c.layout == GateLayout::kConcatenated ? 1 : 0;
    steps.add("dW1", weight_grad_product(c, {c.args.x,
                                             c.dh,
                                             part,
                                             {up, {}},
                                             GradParts::kOne,
                                             kCounterSecondUpGrad,
                                             start_of(second || gate.data != nullptr),
                                             c.arrival}));
  }
}

void add_bias_grads(const BackwardCall& c, Steps& steps) {
  const Problem& p = c.problem();
  const Weights& g = c.args.grads;
  const auto add_hidden = [&](const Tensor& out, std::int64_t first, const Tensor* odd) {
    if (out.data == nullptr && (odd == nullptr || odd->data == nullptr)) return;
    const void* rows = static_cast<const std::byte*>(c.dh.data) + first * dtype_bytes(p.dtype);
    steps.add("biases",
              ColumnSum{rows, c.dh.stride[0], nullptr, nullptr, out, c.args.grad_mode, odd});
  };
  if (c.layout == GateLayout::kInterleaved) {
    add_hidden(g.b_gate, 0, &g.b_up);
  } else {
    add_hidden(g.b_gate, 0, nullptr);
    add_hidden(g.b_up, c.layout == GateLayout::kConcatenated ? p.width : 0, nullptr);
  }
  if (g.b_down.data != nullptr) {
    steps.add("biases",
              ColumnSum{c.args.dout.data, c.args.dout.stride[0], c.pass.metadata.row_token,
                        c.scratch.row_weights, g.b_down, c.args.grad_mode});
  }
}

void add_score_grad(const BackwardCall& c, Steps& steps) {
  if (c.args.dweights.data == nullptr) return;
  steps.add("dS", ScoreGrad{c.scratch.score_parts, c.engine.score_tiles(c.problem()), c.args.dout,
                            c.args.weights.b_down, c.args.dweights, c.order.input_grad_first});
}

void add_token_sum(const BackwardCall& c, const TokenRange& tokens, Steps& steps) {
  steps.add("dX",
            TokenSum{c.scratch.dx, {}, c.args.dx, tokens, start_of(c.order.input_grad_first)});
}

BackwardScratch backward_scratch(const Problem& p, const Engine& engine, void* base) {
  const std::int64_t capacity = row_capacity(p);
  const std::int64_t element = dtype_bytes(p.dtype);
  Carver<256> carver(base);
  BackwardScratch s{};
  s.dh = carver.take<std::byte>(gate_factor(p.activation.kind) * capacity * p.width * element);
  s.a = carver.take<std::byte>(capacity * p.width * element);
  s.dx = carver.take<std::byte>(capacity * p.hidden * element);
  s.row_weights = carver.take<float>(capacity);
  s.score_parts = carver.take<float>(capacity * engine.score_tiles(p));
  s.experts = carver.take<ExpertRecord>(p.experts);
  s.counters = carver.take<unsigned>(kCounterBytes / 4);
  if (p.precision == Precision::kFp8) {
    s.dout = take_token_codes(carver, p.tokens, p.hidden);
    s.dh_codes = take_row_codes(carver, capacity,
                                gate_factor(p.activation.kind) * fp8::whole_blocks(p.width));
  }
  s.lora = take_lora_scratch(p, Pass::kBackward, carver);
  s.range = take_range_lists(p, carver);
  s.bytes = carver.used();
  return s;
}

void add_backward_steps(const PassContext& pass, const BackwardArgs& args,
                        const BackwardScratch& scratch, const Engine& engine, Steps& steps) {
  const BackwardCall c = backward_call(pass, args, scratch, engine);
  const bool input_first = c.order.input_grad_first;
  const std::int64_t early = c.order.tokens_beside_down_grad;
  add_row_lists(c, steps);
  if (pass.problem.precision == Precision::kFp8) {
    steps.add("q(dO)", QuantizeRows{args.dout, scratch.dout});
  }
  add_before_hidden_grad(c, steps);
  const RowProduct& hidden_grad =
      add_product(pass, "dH", hidden_grad_product(c), &PackedLayer::down, steps);
  const auto add_input_grad = [&] {
    add_product(pass, "dX~", input_grad_product(c, hidden_grad), &PackedLayer::up, steps);
  };
  add_bias_grads(c, steps);
  if (!input_first) add_score_grad(c, steps);
  add_after_hidden_grad(c, steps);
  if (input_first) add_input_grad();
  add_down_grad(c, steps);
  add_down_factor_grads(c, input_first || args.grads.down.data != nullptr, steps);
  if (early > 0) add_token_sum(c, {0, early}, steps);
  add_up_grads(c, steps);
  add_up_factor_grads(c, input_first || has_down_grads(args) || has_up_grads(args.grads), steps);
  if (input_first) add_score_grad(c, steps);
  if (args.dx.data == nullptr) return;
  if (!input_first) add_input_grad();
  add_token_sum(c, {early, pass.problem.tokens - early}, steps);
}

namespace {

void run_backward(const Problem& problem, const BackwardArgs& args, const PackedLayer* packed,
                  const Exec& exec) {
  const Device& device = device_of(exec);
  check_rows("x", args.x);
  check_rows("dout", args.dout);
  if (args.dx.data != nullptr) check_rows("dx", args.dx);
  check_weights(problem, args.weights);
  check_grads(problem, args.weights, args.grads);
  check_factor_grads(problem, args);
  if (row_capacity(problem) == 0 || problem.tokens == 0) {
    clear_gradients(args, stream_of(exec));
    return;
  }
  const BackwardScratch scratch = backward_scratch(problem, *device.engine, args.scratch.data);
  const PassContext pass{
      problem, metadata_layout(problem, args.saved.data), {packed, scratch.range}};
  Steps steps;
  add_backward_steps(pass, args, scratch, *device.engine, steps);
  run(steps, pass, device, exec);
}

}  // namespace

void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  run_backward(problem, args, nullptr, exec);
}

void packed_backward(const Problem& problem, const BackwardArgs& args, const PackedLayer& packed,
                     const Exec& exec) {
  run_backward(problem, args, &packed, exec);
}

}  // namespace sonicmoe::cuda
