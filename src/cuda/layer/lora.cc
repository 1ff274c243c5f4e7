#include "cuda/layer/lora.h"

#include "cuda/layer/backward.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

/// Indices into LoraPass::counters. dB_u may be two products.
enum Counter : int { kP, kU, kQ, kV, kDownA, kDownB, kUpA, kUpB, kUpSecondB };

bool has(const Tensor& t) { return t.data != nullptr; }

/// B of the up-projection as weights, so that the views of weights serve it too.
Weights up_b(const LowRank& up) { return {.gate = up.gate_b, .up = up.b}; }

/// inner = r(scale * rows W^T) for the `weights` of a factor, (E, r, depth).
RowProduct inner_product(const RowGroups& groups, const RowOperand& rows,
                         const WeightOperand& weights, const Tensor& inner, double scale,
                         const LaunchHints& hints) {
  return {.dtype = inner.dtype,
          .groups = groups,
          .rows = rows,
          .weights = weights,
          .epilogue = StoreOutput{.out = inner, .factor = static_cast<float>(scale)},
          .hints = hints};
}

RowGroups groups_of(const PassContext& pass) {
  return {&pass.metadata, nullptr, pass.problem.experts, row_capacity(pass.problem)};
}

/// The gradient of a factor: out[0] = left^T right. With kAlternate the columns of `right` go to
/// out[0] and out[1] in turn.
struct FactorGrad {
  const char* name;
  Counter counter;
  RowOperand left;
  Tensor right;
  Tensor out[2];
  GradParts parts = GradParts::kOne;
};
void add_factor_grad(const BackwardCall& c, const FactorGrad& grad, bool independent,
                     Steps& steps) {
  const Start start = independent ? Start::kIndependent : Start::kAfterPrevious;
  steps.add(grad.name,
            DepthProduct{.dtype = c.problem().dtype,
                         .groups = c.groups,
                         .left = grad.left,
                         .right = grad.right,
                         .right_part = 0,
                         .out = {grad.out[0], grad.out[1]},
                         .parts = grad.parts,
                         .mode = c.args.grad_mode,
                         .hints = {.start = start, .tile_counter = c.lora.counters + grad.counter},
                         .companion = Companion::kNone});
}

/// The gradients of gate_b and b as one tensor (E, 2n, r) whose rows lie as the columns of dH;
/// absent if they do not lie so.
Tensor joint_grad(const Tensor& gate, const Tensor& up, GateLayout layout) {
  if (!has(gate) || !has(up) || gate.dtype != up.dtype ||
      !std::equal(gate.stride, gate.stride + 3, up.stride)) {
    return {};
  }
  const std::int64_t row = gate.stride[1];
  const bool interleaved = layout == GateLayout::kInterleaved;
  if (interleaved && row % 2 != 0) return {};
  const std::int64_t apart = interleaved ? row / 2 : row * gate.shape[1];
  const auto* next = static_cast<const std::byte*>(gate.data) + apart * dtype_bytes(gate.dtype);
  if (up.data != next) return {};
  Tensor joint = gate;
  joint.shape[1] *= 2;
  if (interleaved) joint.stride[1] /= 2;
  return joint;
}

/// dH as one matrix (C, G n).
Tensor hidden_grad_rows(const BackwardCall& c) {
  return tensor2(c.dh.data, c.dh.dtype, c.dh.shape[0], c.dh.stride[0]);
}

}  // namespace

void add_factor_copies(const LoraPass& lora, Steps& steps) {
  if (lora.copies.count > 0) steps.add("factors", lora.copies);
}

std::optional<RowProduct> up_inner_product(const PassContext& pass, const ForwardArgs& args,
                                           const LoraPass& lora) {
  if (!has(lora.p)) return {};
  const LowRank& up = lora.factors.up;
  return inner_product(groups_of(pass), {args.x, pass.metadata.row_token},
                       {up.a, {}, WeightParts::kOne}, lora.p, up.scale,
                       {.tile_counter = lora.counters + kP});
}

std::optional<RowProduct> hidden_grad_inner_product(const BackwardCall& c) {
  if (!has(c.lora.q)) return {};
  const LowRank& down = c.lora.factors.down;
  return inner_product(c.groups, {c.args.dout, c.pass.metadata.row_token},
                       {transposed(down.b), {}, WeightParts::kOne}, c.lora.q, down.scale,
                       {.tile_counter = c.lora.counters + kQ});
}

void add_up_inner(const PassContext& pass, const ForwardArgs& args, const LoraPass& lora,
                  Steps& steps) {
  add_factor_copies(lora, steps);
  if (const auto p = up_inner_product(pass, args, lora)) steps.add("P", *p);
}

void add_down_inner(const PassContext& pass, const Tensor& a, const LoraPass& lora, Steps& steps) {
  if (!has(lora.u)) return;
  const LowRank& down = lora.factors.down;
  steps.add("U", inner_product(groups_of(pass), {a, nullptr}, {down.a, {}, WeightParts::kOne},
                               lora.u, down.scale, {.tile_counter = lora.counters + kU}));
}

void add_before_hidden_grad(const BackwardCall& c, Steps& steps) {
  add_factor_copies(c.lora, steps);
  if (const auto q = hidden_grad_inner_product(c)) steps.add("Q", *q);
}

namespace {

bool needs_v(const BackwardCall& c) {
  return has(c.lora.v) && (has(c.args.dx) || has(c.args.lora_grads.up.a));
}
bool needs_u(const BackwardCall& c) { return has(c.args.lora_grads.down.b); }

}  // namespace

void add_after_hidden_grad(const BackwardCall& c, Steps& steps) {
  const Problem& p = c.problem();
  const LowRank& up = c.lora.factors.up;
  const LowRank& down = c.lora.factors.down;
  if (needs_v(c)) {
    steps.add("V", inner_product(c.groups, {c.dh, nullptr}, up_operand_transposed(p, up_b(up)),
                                 c.lora.v, up.scale, {.tile_counter = c.lora.counters + kV}));
  }
  if (!needs_u(c)) return;
  steps.add("U'", inner_product(c.groups, {c.rows(c.scratch.a, p.width), nullptr},
                                {down.a, {}, WeightParts::kOne}, c.lora.u, down.scale,
                                {.start = needs_v(c) ? Start::kIndependent : Start::kAfterPrevious,
                                 .tile_counter = c.lora.counters + kU}));
}

std::optional<Start> start_of_input_grad(const BackwardCall& c) {
  if (needs_u(c)) return Start::kIndependent;
  if (needs_v(c)) return Start::kAfterPrevious;
  return {};
}

bool has_factor_grads(const LowRank& g) { return has(g.a) || has(g.b) || has(g.gate_b); }

void add_down_factor_grads(const BackwardCall& c, bool independent, Steps& steps) {
  const LowRank& g = c.args.lora_grads.down;
  const RowOperand a{c.rows(c.scratch.a, c.problem().width), nullptr};
  const RowOperand dout{c.args.dout, c.pass.metadata.row_token};
  if (has(g.a)) {
    add_factor_grad(c, {"dA_d", kDownA, a, c.lora.q, {transposed(g.a), {}}}, independent, steps);
  }
  if (has(g.b)) {
    add_factor_grad(c, {"dB_d", kDownB, dout, c.lora.u, {g.b, {}}}, independent || has(g.a), steps);
  }
}

void add_up_factor_grads(const BackwardCall& c, bool independent, Steps& steps) {
  const LowRank& g = c.args.lora_grads.up;
  const RowOperand x{c.args.x, c.pass.metadata.row_token};
  const auto add = [&](const FactorGrad& grad) {
    add_factor_grad(c, grad, independent, steps);
    independent = true;
  };
  if (has(g.a)) add({"dA_u", kUpA, x, c.lora.v, {transposed(g.a), {}}});
  if (!has(g.b) && !has(g.gate_b)) return;
  RowOperand rows{hidden_grad_rows(c), nullptr};
  const Tensor joint = joint_grad(g.gate_b, g.b, c.layout);
  if (has(joint) || c.layout == GateLayout::kNone) {
    add({"dB_u", kUpB, rows, c.lora.p, {has(joint) ? joint : g.b, {}}});
  } else if (c.layout == GateLayout::kInterleaved) {
    add({"dB_u",
         kUpB,
         {c.lora.p, nullptr},
         rows.rows,
         {transposed(g.gate_b), transposed(g.b)},
         GradParts::kAlternate});
  } else {
    const std::int64_t width = c.problem().width;
    rows.rows.shape[1] = width;
    if (has(g.gate_b)) add({"dB_u", kUpB, rows, c.lora.p, {g.gate_b, {}}});
    rows.rows.data = static_cast<std::byte*>(rows.rows.data) + width * dtype_bytes(rows.rows.dtype);
    if (has(g.b)) add({"dB_u", kUpSecondB, rows, c.lora.p, {g.b, {}}});
  }
}

std::string lora_refusal(const Problem& p) {
  if (p.up_rank % 8 != 0 || p.down_rank % 8 != 0) {
    return "up_rank is " + std::to_string(p.up_rank) + " and down_rank " +
           std::to_string(p.down_rank) + ", must be multiples of 8 on CUDA";
  }
  return {};
}

void check_factor_grads(const Problem& p, const BackwardArgs& args) {
  const LowRank& up = args.lora_grads.up;
  const LowRank& down = args.lora_grads.down;
  check_grad("lora_grads.up.a", up.a);
  check_grad("lora_grads.down.a", down.a);
  check_grad("lora_grads.down.b", down.b);
  if (gate_layout(p, args.weights) != GateLayout::kInterleaved) {
    check_grad("lora_grads.up.gate_b", up.gate_b);
    check_grad("lora_grads.up.b", up.b);
    return;
  }
  const Tensor joint = joint_grad(up.gate_b, up.b, GateLayout::kInterleaved);
  const auto needs_joint = [](const Tensor& t) { return has(t) && t.dtype != DType::kF32; };
  if (!has(joint) && (needs_joint(up.gate_b) || needs_joint(up.b))) {
    throw Error(Status::kUnsupported,
                "lora_grads.up.gate_b and lora_grads.up.b must alternate along n, as gate and up "
                "do, or be fp32 on CUDA, which stores them as one tensor");
  }
  check_grad("lora_grads.up.b", joint);
}

}  // namespace sonicmoe::cuda
