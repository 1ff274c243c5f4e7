// Forward and backward of the layer against the oracle.
#include <algorithm>
#include <cstddef>

#include "fuzz/world.h"
#include "verify/convert.h"
#include "verify/implementation.h"

namespace sonicmoe::fuzz {
namespace {

template <class T>
T sized() {
  T value{};
  value.size = sizeof(T);
  return value;
}

struct LayerCall {
  World& w;
  smoe_problem problem = sized<smoe_problem>();
  smoe_routing routing = sized<smoe_routing>();
  smoe_weights weights = sized<smoe_weights>();
  smoe_weights grads = sized<smoe_weights>();
  Arg *x = nullptr, *ids = nullptr, *scores = nullptr, *token = nullptr, *expert = nullptr;
  Arg *row_begin = nullptr, *row_count = nullptr;
  Arg* weight[6] = {};
  Arg* grad[6] = {};
  std::int64_t C = 0;

  explicit LayerCall(World& world) : w(world) {
    Random& r = w.random;
    problem.form = static_cast<std::int32_t>(r.in(0, 2));
    problem.dtype = static_cast<std::int32_t>(r.in(0, 3));
    w.rounded_to = static_cast<DType>(problem.dtype);
    problem.activation = static_cast<std::int32_t>(r.in(0, kActivationCount - 1));
    problem.tokens = r.percent(5) ? 0 : r.in(1, 9);
    problem.hidden = r.in(1, 20);
    problem.width = r.in(1, 20);
    problem.experts = r.in(1, 5);
    if (problem.form == SMOE_FORM_IDS) problem.top_k = r.in(1, 3);
    if (problem.form == SMOE_FORM_PAIRS) problem.capacity = r.in(0, 12);
    const auto kind = static_cast<ActivationKind>(problem.activation);
    if (activation_traits(kind).limit != 0.0 && r.percent(50)) problem.limit = 0.5;
    C = problem.form == SMOE_FORM_IDS     ? problem.tokens * problem.top_k
        : problem.form == SMOE_FORM_PAIRS ? problem.capacity
                                          : problem.tokens;
    x = &w.tensor("x", Access::kRead, problem.dtype, {problem.tokens, problem.hidden});
    add_routing();
    add_weights();
    add_fields();
  }

  bool gated() const { return smoe_activation_is_gated(problem.activation) == 1; }

  void add_routing() {
    const std::int64_t T = problem.tokens, E = problem.experts;
    const std::int32_t score = problem.dtype == SMOE_F64 ? SMOE_F64 : SMOE_F32;
    const auto type = [&] { return w.random.pick<std::int32_t>({SMOE_I32, SMOE_I64}); };
    if (problem.form == SMOE_FORM_IDS) {
      ids = &w.index("ids", type(), {T, problem.top_k}, -1, E);
      scores = &w.tensor("scores", Access::kRead, score, {T, problem.top_k});
    } else if (problem.form == SMOE_FORM_PAIRS) {
      token = &w.index("token", type(), {C}, -1, T);
      expert = &w.index("expert", type(), {C}, -1, E);
      scores = &w.tensor("scores", Access::kRead, score, {C});
    } else {
      const std::vector<std::int64_t> begins = groups();
      row_begin = &w.index("row_begin", type(), {E}, 0, 0);
      row_count = &w.index("row_count", type(), {E}, 0, 0);
      for (std::int64_t e = 0; e < E; ++e) {
        row_begin->integers[e] = begins[e];
        row_count->integers[e] = begins[e + 1] - begins[e];
      }
      if (E > 0) row_begin->integers[0] -= w.random.in(0, 2);
      if (w.random.percent(50)) scores = &w.tensor("scores", Access::kRead, score, {T});
    }
  }

  // Where the groups of rows begin, and past the last, which may lie beyond the buffer.
  std::vector<std::int64_t> groups() {
    std::vector<std::int64_t> begins = {0};
    for (std::int64_t e = 0; e < problem.experts; ++e) {
      begins.push_back(begins.back() + w.random.in(0, 4));
    }
    return begins;
  }

  void add_weights() {
    const std::int64_t d = problem.hidden, n = problem.width, E = problem.experts;
    const char* names[] = {"gate", "up", "down", "b_gate", "b_up", "b_down"};
    const std::vector<std::int64_t> shapes[] = {{E, n, d}, {E, n, d}, {E, d, n},
                                                {E, n},    {E, n},    {E, d}};
    const bool up_bias = w.random.percent(40), down_bias = w.random.percent(40);
    for (int i = 0; i < 6; ++i) {
      const bool of_gate = i == 0 || i == 3;
      if (of_gate && !gated()) continue;
      if ((i == 3 || i == 4) && !up_bias) continue;
      if (i == 5 && !down_bias) continue;
      weight[i] =
          &w.tensor(names[i], i < 3 ? Access::kParameter : Access::kRead, problem.dtype, shapes[i]);
    }
  }

  void add_gradients(std::int32_t mode) {
    const bool fp32 = mode == SMOE_GRAD_ACCUMULATE || w.random.percent(40);
    const std::int32_t dtype = problem.dtype == SMOE_F64 ? SMOE_F64
                               : fp32                    ? SMOE_F32
                                                         : problem.dtype;
    for (int i = 0; i < 6; ++i) {
      if (weight[i] == nullptr || w.random.percent(15)) continue;
      const smoe_tensor& t = weight[i]->c.tensor;
      grad[i] =
          &w.tensor("d" + weight[i]->name, Access::kWritten, dtype, {t.shape, t.shape + t.rank});
    }
  }

  void add_fields() {
    w.begin_exec();
    w.size_field("problem.size", &problem.size);
    w.field("form", &problem.form);
    w.field("dtype", &problem.dtype);
    w.field("activation", &problem.activation);
    w.field("tokens", &problem.tokens);
    w.field("hidden", &problem.hidden);
    w.field("width", &problem.width);
    w.field("experts", &problem.experts);
    w.field("top_k", &problem.top_k);
    w.field("capacity", &problem.capacity);
    w.field("alpha", &problem.alpha);
    w.field("limit", &problem.limit);
    w.field("precision", &problem.precision);
    w.field("kept_h", &problem.kept_h);
    w.size_field("routing.size", &routing.size);
    w.size_field("weights.size", &weights.size);
  }

  static const smoe_tensor* pointer(const Arg* arg) {
    return arg == nullptr ? nullptr : arg->pointer();
  }
  static Tensor view(const Arg* arg) { return arg == nullptr ? Tensor{} : arg->view(); }

  void bind() {
    routing.ids = pointer(ids);
    routing.weights = pointer(scores);
    routing.token = pointer(token);
    routing.expert = pointer(expert);
    routing.row_begin = pointer(row_begin);
    routing.row_count = pointer(row_count);
    bind(weights, weight);
    bind(grads, grad);
  }
  static void bind(smoe_weights& c, Arg* const* args) {
    c.gate = pointer(args[0]);
    c.up = pointer(args[1]);
    c.down = pointer(args[2]);
    c.b_gate = pointer(args[3]);
    c.b_up = pointer(args[4]);
    c.b_down = pointer(args[5]);
  }

  Problem cpp_problem() const {
    Problem p;
    p.tokens = problem.tokens;
    p.hidden = problem.hidden;
    p.width = problem.width;
    p.experts = problem.experts;
    p.top_k = problem.top_k;
    p.capacity = problem.capacity;
    p.form = static_cast<RoutingForm>(problem.form);
    p.dtype = static_cast<DType>(problem.dtype);
    p.activation = {static_cast<ActivationKind>(problem.activation), problem.alpha, problem.limit};
    return p;
  }
  Routing cpp_routing() const {
    return {view(ids), view(scores), view(token), view(expert), view(row_begin), view(row_count)};
  }
  Weights cpp_weights() const {
    return {view(weight[0]), view(weight[1]), view(weight[2]),
            view(weight[3]), view(weight[4]), view(weight[5])};
  }
  Sizes sizes(std::int32_t pass) {
    smoe_sizes s = sized<smoe_sizes>();
    if (smoe_moe_sizes(&problem, pass, nullptr, &s) != SMOE_OK) throw Fault(smoe_last_error());
    return {s.h_bytes, s.saved_bytes, s.scratch_bytes};
  }

  // H by the oracle, in the layout that it reads back.
  Buffer oracle_h(std::vector<std::byte>& storage) const {
    const Problem p = cpp_problem();
    storage.resize(static_cast<std::size_t>(2 * C * p.width * dtype_bytes(p.dtype) + 64));
    return {storage.data(), std::ssize(storage)};
  }
  std::vector<double> routing_values() const {
    std::vector<double> all;
    for (const Arg* arg : {ids, token, expert, row_begin, row_count}) {
      if (arg == nullptr || !arg->is_placed) continue;
      const Tensor t = arg->view();
      if (t.dtype != DType::kI32 && t.dtype != DType::kI64) continue;
      for (std::int64_t i = 0; i < oracle::element_count(t); ++i) {
        all.push_back(static_cast<double>(oracle::load_integer(t, i)));
      }
    }
    return all;
  }
};

const verify::Implementation& oracle_layer() {
  static const verify::Implementation oracle =
      verify::oracle_implementation(oracle::Precision::kSame);
  return oracle;
}

/// Only an exchange keeps rows. A struct of a version that ends before `offset` has no such field.
void require_no_kept_rows(std::uint32_t size, std::size_t offset, std::int64_t bytes) {
  if (size >= offset + sizeof(bytes) && bytes != 0)
    throw Fault("kept rows are accepted by the layer");
}

void fuzz_forward(LayerCall& l) {
  World& w = l.w;
  Arg& out =
      w.tensor("out", Access::kWritten, l.problem.dtype, {l.problem.tokens, l.problem.hidden});
  const bool training = w.random.percent(50);
  const Sizes needed = l.sizes(training ? SMOE_FORWARD : SMOE_INFERENCE);
  Lent& h = w.buffer("h", needed.h_bytes);
  Lent& saved = w.buffer("saved", needed.saved_bytes);
  Lent& scratch = w.buffer("scratch", needed.scratch_bytes);
  h.is_null = saved.is_null = !training;
  smoe_forward_args args = sized<smoe_forward_args>();
  w.size_field("args.size", &args.size);
  w.field("kept_x_bytes", &args.kept_x_bytes);
  w.spoil(60);
  w.place();
  l.bind();
  args.x = l.x->pointer();
  args.routing = &l.routing;
  args.weights = &l.weights;
  args.out = out.pointer();
  args.h = h.data;
  args.h_bytes = h.bytes;
  args.saved = saved.data;
  args.saved_bytes = saved.bytes;
  args.scratch = scratch.data;
  args.scratch_bytes = scratch.bytes;
  if (!w.call([&] { return smoe_moe_forward(&l.problem, &args, w.exec_pointer()); })) return;
  require_no_kept_rows(args.size, offsetof(smoe_forward_args, kept_x_bytes), args.kept_x_bytes);
  ForwardArgs reference;
  reference.x = l.x->view();
  reference.routing = l.cpp_routing();
  reference.weights = l.cpp_weights();
  reference.out = w.expected(out);
  // Groups that overlap have no one result.
  if (reference.out.data == nullptr || (w.spoilt() && l.problem.form == SMOE_FORM_GROUPED)) return;
  oracle_layer().moe_forward(l.cpp_problem(), reference);
  w.compare(out, reference.out);
}

void fuzz_backward(LayerCall& l) {
  World& w = l.w;
  const std::int32_t mode = static_cast<std::int32_t>(w.random.in(0, 1));
  const std::int64_t T = l.problem.tokens, d = l.problem.hidden;
  Arg& dout = w.tensor("dout", Access::kRead, l.problem.dtype, {T, d});
  const Sizes forward = l.sizes(SMOE_FORWARD), backward = l.sizes(SMOE_BACKWARD);
  Lent& h = w.buffer("h", forward.h_bytes);
  Lent& saved = w.buffer("saved", forward.saved_bytes);
  Lent& scratch = w.buffer("scratch", std::max(forward.scratch_bytes, backward.scratch_bytes));
  w.place();
  l.bind();
  std::vector<std::byte> dense(static_cast<std::size_t>(T * d * 8 + 8));
  smoe_tensor ran = sized<smoe_tensor>();
  ran = {ran.size, l.problem.dtype, 2, 0, dense.data(), {T, d, 0}, {d, 1, 0}};
  smoe_forward_args f = sized<smoe_forward_args>();
  f = {f.size,     0,           l.x->pointer(), &l.routing,    &l.weights, &ran, h.data,  h.bytes,
       saved.data, saved.bytes, scratch.data,   scratch.bytes, nullptr,    0,    nullptr, nullptr,
       0};
  if (smoe_moe_forward(&l.problem, &f, &w.exec) != SMOE_OK) throw Fault(smoe_last_error());
  ForwardArgs ours{l.x->view(), l.cpp_routing(), l.cpp_weights(), {}, {}, {}, {}};
  ours.out = tensor2(dense.data(), static_cast<DType>(l.problem.dtype), T, d);
  std::vector<std::byte> storage;
  ours.h = l.oracle_h(storage);
  oracle_layer().moe_forward(l.cpp_problem(), ours);
  const std::vector<double> routing = l.routing_values();

  h.is_read = saved.is_read = true;
  scratch.needed = scratch.bytes = backward.scratch_bytes;
  l.add_gradients(mode);
  Arg* dx =
      w.random.percent(80) ? &w.tensor("dx", Access::kWritten, l.problem.dtype, {T, d}) : nullptr;
  Arg* dscores = nullptr;
  if (l.scores != nullptr && w.random.percent(80)) {
    const smoe_tensor& t = l.scores->c.tensor;
    dscores = &w.tensor("dscores", Access::kWritten, t.dtype, {t.shape, t.shape + t.rank});
  }
  smoe_backward_args args = sized<smoe_backward_args>();
  args.grad_mode = mode;
  w.size_field("args.size", &args.size);
  w.field("grad_mode", &args.grad_mode);
  w.field("kept_x_bytes", &args.kept_x_bytes);
  w.size_field("grads.size", &l.grads.size);
  w.spoil(60);
  w.place();
  l.bind();
  if (l.routing_values() != routing) return;  // not the routing that forward saved
  args.x = l.x->pointer();
  args.routing = &l.routing;
  args.weights = &l.weights;
  args.dout = dout.pointer();
  args.h = h.data;
  args.h_bytes = h.bytes;
  args.saved = saved.data;
  args.saved_bytes = saved.bytes;
  args.scratch = scratch.data;
  args.scratch_bytes = scratch.bytes;
  args.dx = LayerCall::pointer(dx);
  args.dweights = LayerCall::pointer(dscores);
  args.grads = &l.grads;
  BackwardArgs want;
  std::vector<std::pair<const Arg*, Tensor*>> outputs = {{dx, &want.dx}, {dscores, &want.dweights}};
  Tensor* grads[] = {&want.grads.gate,   &want.grads.up,   &want.grads.down,
                     &want.grads.b_gate, &want.grads.b_up, &want.grads.b_down};
  for (int i = 0; i < 6; ++i) outputs.push_back({l.grad[i], grads[i]});
  for (auto& [arg, tensor] : outputs) {
    if (arg != nullptr && !w.spoilt()) *tensor = w.expected(*arg);
  }
  if (!w.call([&] { return smoe_moe_backward(&l.problem, &args, w.exec_pointer()); })) return;
  require_no_kept_rows(args.size, offsetof(smoe_backward_args, kept_x_bytes), args.kept_x_bytes);
  if (w.spoilt()) return;
  want.x = ours.x = l.x->view();
  want.routing = l.cpp_routing();
  want.weights = l.cpp_weights();
  want.dout = dout.view();
  want.h = ours.h;
  want.grad_mode = static_cast<GradMode>(args.grad_mode);
  oracle_layer().moe_backward(l.cpp_problem(), want);
  for (const auto& [arg, tensor] : outputs) {
    if (arg != nullptr) w.compare(*arg, *tensor);
  }
}

void fuzz_h_views(LayerCall& l) {
  World& w = l.w;
  Lent& h = w.buffer("h", l.sizes(SMOE_FORWARD).h_bytes);
  smoe_tensor gate = sized<smoe_tensor>(), up = sized<smoe_tensor>();
  w.size_field("gate.size", &gate.size);
  w.spoil(60);
  w.place();
  l.bind();
  if (!w.call([&] {
        return smoe_h_views(&l.problem, &l.weights, h.data, h.bytes, w.exec_pointer(), &gate, &up);
      })) {
    if (up.rank != 0 || gate.rank != 0) throw Fault("a refused call wrote its views");
    return;
  }
  if (up.rank != 2 || up.shape[1] != l.problem.width) throw Fault("up is no view of (C, n)");
  if (gate.rank != (l.gated() ? 2 : 0)) throw Fault("gate is given where there is none, or not");
}

}  // namespace

void fuzz_layer(World& world) {
  LayerCall layer(world);
  const std::int64_t which = world.random.in(0, 9);
  if (which == 0) return fuzz_h_views(layer);
  which < 5 ? fuzz_forward(layer) : fuzz_backward(layer);
}

}  // namespace sonicmoe::fuzz
