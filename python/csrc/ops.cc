// The operators of the PyTorch package, against libtorch's stable ABI. No arithmetic here: tensors
// become views, scratch comes from torch's allocator, and the public C++ API does the rest.
//
// One file serves every torch from 2.10 on and every Python: it uses no header of CPython and no
// C++ type of libtorch. docs/pytorch.md says what each operator means.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "boxing.h"
#include "grouped_gemm.h"
#include "h_views.h"
#include "place.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/version.h"
#include "views.h"

namespace sonicmoe_torch {
namespace {

// ---- the layer ----------------------------------------------------------------------------------

/// What every operator of the layer takes, in the schema's order.
struct Layer {
  Array x;
  Array index;        // ids (T, K), or token (C), or row_begin (E)
  MaybeArray second;  // none, or expert (C), or row_count (E)
  MaybeArray weights;
  MaybeArray w_gate;  // given: w_up is the up projection alone
  Array w_up;
  Array w_down;
  MaybeArray b_up;
  MaybeArray b_down;
  std::string form;
  std::string activation;
  double alpha = 0;
  double limit = 0;
  std::string gate_layout;
  auto fields() {
    return std::tie(x, index, second, weights, w_gate, w_up, w_down, b_up, b_down, form, activation,
                    alpha, limit, gate_layout);
  }
};
constexpr const char* kLayerSchema =
    "Tensor x, Tensor index, Tensor? second, Tensor? weights, Tensor? w_gate, Tensor w_up, "
    "Tensor w_down, Tensor? b_up, Tensor? b_down, str form, str activation, float alpha, "
    "float limit, str gate_layout";

/// The same call in the library's terms.
struct Call {
  sonicmoe::Problem problem;
  sonicmoe::Routing routing;
  sonicmoe::Weights weights;
  sonicmoe::Tensor x;
};

sonicmoe::Weights weights_of(const Layer& a, const MaybeArray& w_gate, const MaybeArray& w_up,
                             const MaybeArray& w_down, const MaybeArray& b_up,
                             const MaybeArray& b_down) {
  const bool gated = sonicmoe::is_gated(sonicmoe::activation_from_name(a.activation.c_str()));
  sonicmoe::Weights w;
  const Halves first = gate_and_up(w_gate, w_up, gated && !a.w_gate.has_value(), a.gate_layout);
  w.gate = first.gate;
  w.up = first.up;
  if (b_up.has_value() && gated) {
    const Halves halves = split(*b_up, a.gate_layout, "b_up");
    w.b_gate = halves.gate;
    w.b_up = halves.up;
  } else {
    w.b_up = view(b_up, "b_up");
  }
  w.down = view(w_down, "w_down");
  w.b_down = view(b_down, "b_down");
  return w;
}

sonicmoe::RoutingForm form_of(const std::string& form) {
  if (form == "ids") return sonicmoe::RoutingForm::kIds;
  if (form == "pairs") return sonicmoe::RoutingForm::kPairs;
  if (form == "grouped") return sonicmoe::RoutingForm::kGrouped;
  throw std::invalid_argument("form is \"" + form + "\", must be one of: ids, pairs, grouped");
}

Call call_of(Layer& a) {
  expect_rank(a.x, 2, "x");
  a.x = readable_rows(a.x);
  expect_rank(a.w_up, 3, "w_up");
  expect_rank(a.w_down, 3, "w_down");
  if (a.w_gate.has_value()) expect_rank(*a.w_gate, 3, "w_up");
  if (a.b_up.has_value()) expect_rank(*a.b_up, 2, "b_up");
  Call c;
  c.problem.form = form_of(a.form);
  c.problem.tokens = a.x.size(0);
  c.problem.hidden = a.x.size(1);
  c.problem.experts = a.w_down.size(0);
  c.problem.width = a.w_down.size(2);
  c.problem.dtype = dtype_of(a.x, "x");
  c.problem.activation = {sonicmoe::activation_from_name(a.activation.c_str()), a.alpha, a.limit};
  c.routing.weights = view(a.weights, "weights");
  switch (c.problem.form) {
    case sonicmoe::RoutingForm::kIds:
      expect_rank(a.index, 2, "topk_ids");
      c.problem.top_k = a.index.size(1);
      c.routing.ids = view(a.index, "topk_ids");
      break;
    case sonicmoe::RoutingForm::kPairs:
      expect_rank(a.index, 1, "pairs.token");
      c.problem.capacity = a.index.size(0);
      c.routing.token = view(a.index, "pairs.token");
      c.routing.expert = view(a.second, "pairs.expert");
      break;
    case sonicmoe::RoutingForm::kGrouped:
      c.routing.row_begin = view(a.index, "expert_offsets");
      c.routing.row_count = view(a.second, "expert_offsets");
      break;
  }
  c.weights = weights_of(a, a.w_gate, a.w_up, a.w_down, a.b_up, a.b_down);
  c.x = view(a.x, "x");
  return c;
}

Array moe_inference(Layer& a) {
  const Place place(a.x);
  const Call c = call_of(a);
  const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kInference, place.exec());
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  const Scratch scratch(a.x, sizes.scratch_bytes);
  sonicmoe::moe_forward(c.problem,
                        {c.x, c.routing, c.weights, view(out, "out"), {}, {}, scratch.buffer()},
                        place.exec());
  return out;
}

/// moe_forward: the layer and, for autograd alone, the buffers that backward is to add to.
struct ForwardCall {
  Layer layer;
  MaybeArray g_gate;
  MaybeArray g_up;
  MaybeArray g_down;
  auto fields() { return std::tuple_cat(layer.fields(), std::tie(g_gate, g_up, g_down)); }
};

/// Bytes of metadata kept for backward: the bound that every backend promises, so that the shape is
/// known without asking one (fakes, symbolic T). _ops.py states the same.
std::int64_t saved_capacity(const sonicmoe::Problem& p) {
  return 20 * sonicmoe::row_capacity(p) + 16 * p.tokens + 1024 * p.experts;
}

/// The CPU's are cleared: what the backend leaves untouched must not differ between a run and its
/// recomputation. On CUDA that would be one more kernel, for bytes that no one compares.
Array new_metadata(const Array& like, std::int64_t bytes) {
  if (like.is_cuda()) return empty(like, {bytes}, ScalarType::Byte);
  return torch::stable::new_zeros(like, {bytes}, ScalarType::Byte);
}

std::tuple<Array, Array, Array> moe_forward(ForwardCall& a) {
  const Place place(a.layer.x);
  const Call c = call_of(a.layer);
  const Array& x = a.layer.x;
  const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kForward, place.exec());
  const std::int64_t rows = sonicmoe::row_capacity(c.problem);
  const std::int64_t width = sonicmoe::gate_factor(c.problem.activation.kind) * c.problem.width;
  Array out = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  Array h = empty(x, {rows, width}, x.scalar_type());
  Array saved = new_metadata(x, saved_capacity(c.problem));
  const Scratch scratch(x, sizes.scratch_bytes);
  sonicmoe::moe_forward(
      c.problem,
      {c.x, c.routing, c.weights, view(out, "out"), lend(h), lend(saved), scratch.buffer()},
      place.exec());
  return {out, h, saved};
}

struct BackwardCall {
  Array dout;
  Layer layer;
  Array h;
  Array saved;
  std::int64_t needs = 0;
  auto fields() {
    return std::tuple_cat(std::tie(dout), layer.fields(), std::tie(h, saved, needs));
  }
};

/// The bits of `needs`: which gradients the caller wants.
enum Need : std::int64_t {
  kNeedX = 1,
  kNeedWeights = 2,
  kNeedGate = 4,
  kNeedUp = 8,
  kNeedDown = 16,
  kNeedBiasUp = 32,
  kNeedBiasDown = 64,
};

MaybeArray gradient_of(const BackwardCall& a, Need need, const MaybeArray& of) {
  if ((a.needs & need) == 0 || !of.has_value()) return std::nullopt;
  return empty_beside(*of);
}

Array or_nothing(const MaybeArray& t, const Array& like) { return t ? *t : nothing(like); }

/// dx is contiguous whatever the strides of x.
MaybeArray gradient_of_x(const BackwardCall& a) {
  if ((a.needs & kNeedX) == 0) return std::nullopt;
  const Array& x = a.layer.x;
  return empty(x, {x.size(0), x.size(1)}, x.scalar_type());
}

void run_backward(BackwardCall& a, const sonicmoe::Weights& grads, const MaybeArray& dx,
                  const MaybeArray& dweights, sonicmoe::GradMode mode) {
  const Place place(a.layer.x);
  const Call c = call_of(a.layer);
  a.dout = readable_rows(a.dout);
  const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kBackward, place.exec());
  const Scratch scratch(a.layer.x, sizes.scratch_bytes);
  sonicmoe::BackwardArgs args;
  args.x = c.x;
  args.routing = c.routing;
  args.weights = c.weights;
  args.dout = view(a.dout, "grad");
  args.h = lend(a.h);
  args.saved = lend(a.saved);
  args.scratch = scratch.buffer();
  args.dx = view(dx, "dx");
  args.dweights = view(dweights, "dweights");
  args.grads = grads;
  args.grad_mode = mode;
  sonicmoe::moe_backward(c.problem, args, place.exec());
}

using LayerGradients = std::tuple<Array, Array, Array, Array, Array, Array, Array>;

LayerGradients moe_backward(BackwardCall& a) {
  const Layer& l = a.layer;
  const MaybeArray dx = gradient_of_x(a);
  const MaybeArray dweights = gradient_of(a, kNeedWeights, l.weights);
  const MaybeArray dgate = gradient_of(a, kNeedGate, l.w_gate);
  const MaybeArray dup = gradient_of(a, kNeedUp, l.w_up);
  const MaybeArray ddown = gradient_of(a, kNeedDown, l.w_down);
  const MaybeArray db_up = gradient_of(a, kNeedBiasUp, l.b_up);
  const MaybeArray db_down = gradient_of(a, kNeedBiasDown, l.b_down);
  run_backward(a, weights_of(l, dgate, dup, ddown, db_up, db_down), dx, dweights,
               sonicmoe::GradMode::kWrite);
  return {or_nothing(dx, l.x),     or_nothing(dweights, l.x), or_nothing(dgate, l.x),
          or_nothing(dup, l.x),    or_nothing(ddown, l.x),    or_nothing(db_up, l.x),
          or_nothing(db_down, l.x)};
}

struct AccumulateCall {
  BackwardCall backward;
  MaybeArray g_gate;
  Array g_up;
  Array g_down;
  auto fields() { return std::tuple_cat(backward.fields(), std::tie(g_gate, g_up, g_down)); }
};

/// Adds the weights' gradients to g_*. Bias gradients are fresh, in fp32.
std::tuple<Array, Array, Array, Array> moe_backward_accumulate(AccumulateCall& a) {
  const Layer& l = a.backward.layer;
  const MaybeArray dx = gradient_of_x(a.backward);
  const MaybeArray dweights = gradient_of(a.backward, kNeedWeights, l.weights);
  const auto zeros = [&](Need need, const MaybeArray& of) -> MaybeArray {
    if ((a.backward.needs & need) == 0 || !of.has_value()) return std::nullopt;
    return torch::stable::new_zeros(*of, of->sizes(), ScalarType::Float);
  };
  const MaybeArray db_up = zeros(kNeedBiasUp, l.b_up);
  const MaybeArray db_down = zeros(kNeedBiasDown, l.b_down);
  run_backward(a.backward, weights_of(l, a.g_gate, a.g_up, a.g_down, db_up, db_down), dx, dweights,
               sonicmoe::GradMode::kAccumulate);
  return {or_nothing(dx, l.x), or_nothing(dweights, l.x), or_nothing(db_up, l.x),
          or_nothing(db_down, l.x)};
}

// ---- routing ------------------------------------------------------------------------------------

struct RouteCall {
  Array logits;
  MaybeArray bias;
  std::int64_t k = 0;
  std::string score;
  bool renormalize = false;
  double scale = 1;
  std::int64_t n_group = 0;
  std::int64_t topk_group = 0;
  auto fields() {
    return std::tie(logits, bias, k, score, renormalize, scale, n_group, topk_group);
  }
};
constexpr const char* kRouteSchema =
    "Tensor logits, Tensor? bias, int k, str score, bool renormalize, float scale, int n_group, "
    "int topk_group";

sonicmoe::RouteOptions options_of(const RouteCall& a) {
  expect_rank(a.logits, 2, "logits");
  sonicmoe::RouteOptions o;
  o.top_k = a.k;
  o.score = sonicmoe::score_mode_from_name(a.score.c_str());
  o.renormalize = a.renormalize ? 1 : 0;
  o.scale = a.scale;
  o.bias = view(a.bias, "bias");
  o.n_group = a.n_group;
  o.topk_group = a.topk_group;
  return o;
}

Array like_logits(const Array& logits) {
  expect_rank(logits, 2, "logits");
  return empty(logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
}

std::tuple<Array, Array> route(RouteCall& a) {
  const sonicmoe::RouteOptions options = options_of(a);
  // A k that the library is about to refuse must not size an allocation first.
  const std::int64_t slots = a.k > 0 && a.k <= a.logits.size(1) ? a.k : 1;
  Array ids = empty(a.logits, {a.logits.size(0), slots}, ScalarType::Long);
  Array weights = empty(a.logits, {a.logits.size(0), slots}, score_dtype(a.logits));
  sonicmoe::route(options, view(a.logits, "logits"), view(ids, "ids"), view(weights, "weights"),
                  Place(a.logits).exec());
  return {weights, ids};
}

struct RouteBackwardCall {
  Array dweights;
  Array ids;
  RouteCall route;
  auto fields() { return std::tuple_cat(std::tie(dweights, ids), route.fields()); }
};

Array route_backward(RouteBackwardCall& a) {
  Array dlogits = like_logits(a.route.logits);
  sonicmoe::route_backward(options_of(a.route), view(a.route.logits, "logits"), view(a.ids, "ids"),
                           view(a.dweights, "dweights"), view(dlogits, "dlogits"),
                           Place(a.route.logits).exec());
  return dlogits;
}

/// Weights come first, as in every operator here: what is differentiable stands before indices.
struct PairArrays {
  Array weight;
  Array token;
  Array expert;
  Array offsets;
  auto fields() { return std::tie(weight, token, expert, offsets); }
  sonicmoe::Pairs views() const {
    return {view(token, "token"), view(expert, "expert"), view(weight, "weight"),
            view(offsets, "offsets")};
  }
  std::tuple<Array, Array, Array, Array> results() const {
    return {weight, token, expert, offsets};
  }
};

PairArrays new_pairs(const Array& logits, std::int64_t capacity) {
  return {empty(logits, {capacity}, score_dtype(logits)),
          empty(logits, {capacity}, ScalarType::Int), empty(logits, {capacity}, ScalarType::Int),
          empty(logits, {logits.size(1) + 1}, ScalarType::Long)};
}

struct RoundCall {
  RouteCall route;
  Array seed;  // () int64 in host memory: it may change every step without a recompilation
  std::int64_t tile = 0;
  std::string mode;
  auto fields() { return std::tuple_cat(route.fields(), std::tie(seed, tile, mode)); }
};

sonicmoe::RoundOptions options_of(const RoundCall& a) {
  if (a.seed.numel() != 1 || a.seed.scalar_type() != ScalarType::Long || !a.seed.is_cpu()) {
    throw std::invalid_argument("seed must be an int or one int64 element in host memory");
  }
  sonicmoe::RoundOptions o;
  o.route = options_of(a.route);
  o.tile = a.tile;
  o.mode = sonicmoe::rounding_mode_from_name(a.mode.c_str());
  o.seed = static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(a.seed.data_ptr()));
  return o;
}

std::tuple<Array, Array, Array, Array> token_round(RoundCall& a) {
  const sonicmoe::RoundOptions options = options_of(a);
  const Array& logits = a.route.logits;
  const Place place(logits);
  const std::int64_t tokens = logits.size(0);
  const std::int64_t experts = logits.size(1);
  const PairArrays pairs = new_pairs(logits, sonicmoe::round_capacity(options, tokens, experts));
  const Scratch scratch(logits,
                        sonicmoe::round_scratch_bytes(options, tokens, experts, place.exec()));
  sonicmoe::token_round(options, view(logits, "logits"), pairs.views(), scratch.buffer(),
                        place.exec());
  return pairs.results();
}

struct RoundBackwardCall {
  Array dweight;
  PairArrays pairs;
  RoundCall round;
  auto fields() { return std::tuple_cat(std::tie(dweight), pairs.fields(), round.fields()); }
};

Array token_round_backward(RoundBackwardCall& a) {
  const sonicmoe::RoundOptions options = options_of(a.round);
  const Array& logits = a.round.route.logits;
  const Place place(logits);
  Array dlogits = like_logits(logits);
  const Scratch scratch(
      logits, sonicmoe::round_scratch_bytes(options, logits.size(0), logits.size(1), place.exec()));
  sonicmoe::token_round_backward(options, view(logits, "logits"), a.pairs.views(),
                                 view(a.dweight, "dweight"), view(dlogits, "dlogits"),
                                 scratch.buffer(), place.exec());
  return dlogits;
}

struct ExpertChoiceCall {
  Array logits;
  std::int64_t capacity = 0;
  auto fields() { return std::tie(logits, capacity); }
};

std::tuple<Array, Array, Array, Array> expert_choice(ExpertChoiceCall& a) {
  expect_rank(a.logits, 2, "logits");
  const std::int64_t each = std::max<std::int64_t>(0, std::min(a.capacity, a.logits.size(0)));
  const PairArrays pairs = new_pairs(a.logits, a.logits.size(1) * each);
  const Place place(a.logits);
  const Scratch scratch(a.logits, sonicmoe::expert_choice_scratch_bytes(
                                      a.logits.size(0), a.logits.size(1), place.exec()));
  sonicmoe::expert_choice(view(a.logits, "logits"), a.capacity, pairs.views(), scratch.buffer(),
                          place.exec());
  return pairs.results();
}

struct ExpertChoiceBackwardCall {
  Array dweight;
  PairArrays pairs;
  Array logits;
  auto fields() { return std::tuple_cat(std::tie(dweight), pairs.fields(), std::tie(logits)); }
};

Array expert_choice_backward(ExpertChoiceBackwardCall& a) {
  Array dlogits = like_logits(a.logits);
  const Place place(a.logits);
  const Scratch scratch(a.logits, sonicmoe::expert_choice_scratch_bytes(
                                      a.logits.size(0), a.logits.size(1), place.exec()));
  sonicmoe::expert_choice_backward(view(a.logits, "logits"), a.pairs.views(),
                                   view(a.dweight, "dweight"), view(dlogits, "dlogits"),
                                   scratch.buffer(), place.exec());
  return dlogits;
}

struct LossesCall {
  Array ids;
  RouteCall route;
  auto fields() { return std::tuple_cat(std::tie(ids), route.fields()); }
};

std::tuple<Array, Array> router_losses(LossesCall& a) {
  const Array& logits = a.route.logits;
  const sonicmoe::RouteOptions options = options_of(a.route);
  Array values = empty(logits, {2}, score_dtype(logits));
  Array counts = empty(logits, {logits.size(1)}, ScalarType::Long);
  const Place place(logits);
  const Scratch scratch(
      logits, sonicmoe::router_losses_scratch_bytes(logits.size(0), logits.size(1), place.exec()));
  sonicmoe::router_losses(options, view(logits, "logits"), view(a.ids, "ids"),
                          {view(values, "values"), view(counts, "tokens_per_expert")},
                          scratch.buffer(), place.exec());
  return {values, counts};
}

struct LossesBackwardCall {
  Array dvalues;
  Array counts;
  RouteCall route;
  auto fields() { return std::tuple_cat(std::tie(dvalues, counts), route.fields()); }
};

Array router_losses_backward(LossesBackwardCall& a) {
  Array dlogits = like_logits(a.route.logits);
  sonicmoe::router_losses_backward(options_of(a.route), view(a.route.logits, "logits"),
                                   view(a.counts, "tokens_per_expert"), view(a.dvalues, "dvalues"),
                                   view(dlogits, "dlogits"), Place(a.route.logits).exec());
  return dlogits;
}

struct NoArguments {
  auto fields() { return std::tuple<>(); }
};

std::string version(NoArguments&) { return sonicmoe::version_string(); }

struct DeviceCall {
  std::int64_t ordinal = 0;
  auto fields() { return std::tie(ordinal); }
};

/// Why a CUDA device cannot be used, or nothing.
std::string cuda_problem(DeviceCall& a) {
  try {
    device_handle(static_cast<std::int32_t>(a.ordinal));
    return "";
  } catch (const sonicmoe::Error& error) {
    return error.what();
  }
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("moe_inference", &box<&moe_inference>);
  m.impl("moe_forward", &box<&moe_forward>);
  m.impl("moe_backward", &box<&moe_backward>);
  m.impl("moe_backward_accumulate", &box<&moe_backward_accumulate>);
  m.impl("h_views", &box<&h_views>);
  m.impl("grouped_gemm", &box<&grouped_gemm>);
  m.impl("grouped_gemm_k", &box<&grouped_gemm_k>);
  m.impl("route", &box<&route>);
  m.impl("route_backward", &box<&route_backward>);
  m.impl("token_round", &box<&token_round>);
  m.impl("token_round_backward", &box<&token_round_backward>);
  m.impl("expert_choice", &box<&expert_choice>);
  m.impl("expert_choice_backward", &box<&expert_choice_backward>);
  m.impl("router_losses", &box<&router_losses>);
  m.impl("router_losses_backward", &box<&router_losses_backward>);
}

}  // namespace
}  // namespace sonicmoe_torch

STABLE_TORCH_LIBRARY(sonicmoe_cpp, m) {
  const auto def = [&m](const std::string& schema) { m.def(schema.c_str()); };
  const std::string layer = sonicmoe_torch::kLayerSchema;
  const std::string gemm = sonicmoe_torch::kGroupedGemmSchema;
  const std::string options = sonicmoe_torch::kRouteSchema;
  const std::string pairs = "Tensor weight, Tensor token, Tensor expert, Tensor offsets";
  const std::string rounding = options + ", Tensor seed, int tile, str mode";
  const std::string backward = "Tensor dout, " + layer + ", Tensor h, Tensor saved, int needs";

  def("version() -> str");
  def("cuda_problem(int ordinal) -> str");
  def("moe_inference(" + layer + ") -> Tensor");
  def("moe_forward(" + layer + ", Tensor? g_gate, Tensor? g_up, Tensor? g_down) -> " +
      "(Tensor out, Tensor h, Tensor saved)");
  def("moe_backward(" + backward + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("moe_backward_accumulate(" + backward +
      ", Tensor(a!)? g_gate, Tensor(b!) g_up, Tensor(c!) g_down) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  def(std::string("h_views(") + sonicmoe_torch::kHViewsSchema + ") -> (int, int, int)");
  def("grouped_gemm(" + gemm + ") -> Tensor");
  def("grouped_gemm_k(" + gemm + ") -> Tensor");
  def("route(" + options + ") -> (Tensor weights, Tensor ids)");
  def("route_backward(Tensor dweights, Tensor ids, " + options + ") -> Tensor");
  def("token_round(" + rounding + ") -> (" + pairs + ")");
  def("token_round_backward(Tensor dweight, " + pairs + ", " + rounding + ") -> Tensor");
  def("expert_choice(Tensor logits, SymInt capacity) -> (" + pairs + ")");
  def("expert_choice_backward(Tensor dweight, " + pairs + ", Tensor logits) -> Tensor");
  def("router_losses(Tensor ids, " + options + ") -> (Tensor values, Tensor tokens_per_expert)");
  def("router_losses_backward(Tensor dvalues, Tensor tokens_per_expert, " + options +
      ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CompositeExplicitAutograd, m) {
  using namespace sonicmoe_torch;
  m.impl("version", &box<&version>);
  m.impl("cuda_problem", &box<&cuda_problem>);
}

// One function serves both: the backend is that of the tensors (place.h).
STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CPU, m) { sonicmoe_torch::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CUDA, m) { sonicmoe_torch::implement(m); }
