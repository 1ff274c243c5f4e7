// Routing, rounding, expert choice and the losses: ids and pairs exactly, values by the oracle.
#include <algorithm>
#include <limits>

#include "fuzz/world.h"
#include "verify/convert.h"
#include "verify/oracle_router.h"
#include "verify/routing_reference.h"

namespace sonicmoe::fuzz {
namespace {

using oracle::Matrix;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Router {
  World& w;
  std::int64_t T, E, K;
  smoe_route_options options{};
  Arg* logits;
  Arg* bias = nullptr;

  explicit Router(World& world) : w(world) {
    Random& r = w.random;
    T = r.percent(5) ? 0 : r.in(1, 9);
    E = r.in(1, 20);
    K = r.in(1, std::min<std::int64_t>(E, 5));
    options.size = sizeof(options);
    options.score = static_cast<std::int32_t>(r.in(0, SMOE_SCORE_SQRT_SOFTPLUS));
    options.top_k = K;
    options.scale = r.percent(30) ? 2.5 : 0.0;
    options.renormalize = static_cast<std::int32_t>(r.in(0, 1));
    logits = &w.tensor("logits", Access::kRead, static_cast<std::int32_t>(r.in(0, 3)), {T, E});
    if (E % 2 == 0 && K <= E / 2 && r.percent(30)) options.n_group = 2, options.topk_group = 1;
    w.begin_exec();
    w.size_field("options.size", &options.size);
    w.field("score", &options.score);
    w.field("top_k", &options.top_k);
    w.field("scale", &options.scale);
    w.field("n_group", &options.n_group);
    w.field("topk_group", &options.topk_group);
    w.field("renormalize", &options.renormalize);
    w.field("options.reserved", &options.reserved);
  }

  void add_bias() {
    if (options.score < SMOE_SCORE_SIGMOID || w.random.percent(50)) return;
    bias = &w.tensor("bias", Access::kRead, SMOE_F32, {E});
    bias->c.tensor.stride[0] = 1;  // as the reference reads it
  }
  std::int32_t score_dtype() const {
    return logits->c.tensor.dtype == SMOE_F64 ? SMOE_F64 : SMOE_F32;
  }
  void bind() { options.bias = bias == nullptr ? nullptr : bias->pointer(); }

  // After place(): some logits are awkward.
  void add_specials() const {
    const Tensor t = logits->view();
    if (w.spoilt() || !w.random.percent(20) || t.data == nullptr) return;
    for (std::int64_t i = 0; i < oracle::element_count(t); ++i) {
      if (!w.random.percent(30)) continue;
      oracle::store(t.data, t.dtype, oracle::element_offset(t, i),
                    w.random.pick<double>({kInfinity, -kInfinity, NAN, 0.0, 1.0}));
    }
  }
  RouteOptions cpp() const {
    RouteOptions o;
    o.top_k = options.top_k;
    o.score = static_cast<ScoreMode>(options.score);
    o.renormalize = options.renormalize;
    if (options.scale != 0.0) o.scale = options.scale;
    if (bias != nullptr) o.bias = bias->view();
    o.n_group = options.n_group;
    o.topk_group = options.topk_group;
    return o;
  }
  template <class Real>
  reference::Rows<Real> values() const {
    reference::Rows<Real> rows;
    for (const std::vector<double>& given : World::rows(logits->view())) {
      std::vector<Real>& row = rows.emplace_back();
      for (const double v : given) {
        row.push_back(reference::cleaned<Real>(v, logits->view().dtype));
      }
    }
    return rows;
  }
  Matrix<double> matrix() const {
    Matrix<double> m(T, E);
    const auto rows = values<double>();
    for (std::int64_t t = 0; t < T; ++t) std::copy(rows[t].begin(), rows[t].end(), m.row(t));
    return m;
  }
};

template <class Real>
void expect_choice(const Router& router, const Tensor& ids, const Tensor& weights) {
  const auto rows = router.values<Real>();
  std::vector<double> id_values, weight_values;
  for (const std::vector<Real>& row : rows) {
    const reference::Choice<Real> choice = reference::choose(router.cpp(), row);
    for (const int id : choice.ids) id_values.push_back(id);
    for (const Real weight : choice.weights) weight_values.push_back(weight);
  }
  for (std::size_t i = 0; i < id_values.size(); ++i) {
    const auto value = static_cast<std::int64_t>(id_values[i]);
    if (ids.dtype == DType::kI64) {
      static_cast<std::int64_t*>(ids.data)[i] = value;
    } else {
      static_cast<std::int32_t*>(ids.data)[i] = static_cast<std::int32_t>(value);
    }
  }
  oracle::write(weights, weight_values);
}

void fuzz_route_forward(Router& r) {
  World& w = r.w;
  const auto type = w.random.pick<std::int32_t>({SMOE_I32, SMOE_I64});
  Arg& ids = w.tensor("ids", Access::kWritten, type, {r.T, r.K});
  Arg& weights = w.tensor("weights", Access::kWritten, r.score_dtype(), {r.T, r.K});
  w.spoil(60);
  w.place();
  r.add_specials();
  r.bind();
  const Tensor want_ids = w.spoilt() ? Tensor{} : w.expected(ids);
  const Tensor want_weights = w.spoilt() ? Tensor{} : w.expected(weights);
  const bool served = w.call([&] {
    return smoe_route(&r.options, r.logits->pointer(), ids.pointer(), weights.pointer(),
                      w.exec_pointer());
  });
  if (!served || w.spoilt()) return;
  const bool wide = r.logits->c.tensor.dtype == SMOE_F64;
  (wide ? expect_choice<double> : expect_choice<float>)(r, want_ids, want_weights);
  w.compare(ids, want_ids);
  w.compare(weights, want_weights);
}

void fuzz_route_backward(Router& r) {
  World& w = r.w;
  const bool wild = w.random.percent(30);
  Arg& ids = w.index("ids", w.random.pick<std::int32_t>({SMOE_I32, SMOE_I64}), {r.T, r.K},
                     wild ? -2 : 0, wild ? r.E + 1 : 0);
  if (!wild) {  // distinct experts
    for (std::size_t i = 0; i < ids.integers.size(); ++i) {
      ids.integers[i] = (static_cast<std::int64_t>(i) * 7 + static_cast<std::int64_t>(i) / r.K) %
                        std::max<std::int64_t>(r.E, 1);
    }
    for (std::int64_t t = 0; t < r.T; ++t) {
      for (std::int64_t k = 0; k < r.K; ++k) ids.integers[t * r.K + k] = (t + k) % r.E;
    }
    ids.c.tensor.stride[0] = r.K, ids.c.tensor.stride[1] = 1;
  }
  Arg& dweights = w.tensor("dweights", Access::kRead, r.score_dtype(), {r.T, r.K});
  Arg& dlogits = w.tensor("dlogits", Access::kWritten, r.logits->c.tensor.dtype, {r.T, r.E});
  w.spoil(60);
  w.place();
  r.bind();
  const Tensor want = w.spoilt() || wild ? Tensor{} : w.expected(dlogits);
  const bool served = w.call([&] {
    return smoe_route_backward(&r.options, r.logits->pointer(), ids.pointer(), dweights.pointer(),
                               dlogits.pointer(), w.exec_pointer());
  });
  if (!served || want.data == nullptr) return;
  Matrix<std::int64_t> chosen(r.T, r.K);
  chosen.values = ids.integers;
  Matrix<double> gradient(r.T, r.K);
  gradient.values = oracle::read(dweights.view());
  oracle::write(want, oracle::route_backward(r.cpp(), r.matrix(), chosen, gradient).values);
  w.compare(dlogits, want);
}

struct PairArgs {
  smoe_pairs c{};
  Arg *token, *expert, *weight, *offsets;

  PairArgs(World& w, Access access, std::int32_t score, std::int64_t C, std::int64_t E) {
    c.size = sizeof(c);
    w.size_field("pairs.size", &c.size);
    const auto list = [&](const char* name, std::int64_t last) {
      Arg& arg = w.index(name, SMOE_I32, {C}, -2, last);
      arg.access = access;
      return &arg;
    };
    token = list("token", 11);
    expert = list("expert", E + 1);
    weight = &w.tensor("weight", access, score, {C});
    offsets = &w.index("offsets", SMOE_I64, {E + 1}, -2, C + 3);
    offsets->access = access;
  }
  void bind() {
    c.token = token->pointer();
    c.expert = expert->pointer();
    c.weight = weight->pointer();
    c.offsets = offsets->pointer();
  }
};

template <class Values>
void put(const Tensor& want, const Values& values, double rest) {
  std::vector<double> all(static_cast<std::size_t>(want.shape[0]), rest);
  for (std::size_t i = 0; i < values.size(); ++i) all[i] = static_cast<double>(values[i]);
  if (want.dtype != DType::kI32 && want.dtype != DType::kI64) return oracle::write(want, all);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (want.dtype == DType::kI64) {
      static_cast<std::int64_t*>(want.data)[i] = static_cast<std::int64_t>(all[i]);
    } else {
      static_cast<std::int32_t*>(want.data)[i] = static_cast<std::int32_t>(all[i]);
    }
  }
}

template <class Real>
void compare_pairs(World& w, const PairArgs& pairs, const reference::PairList<Real>& list,
                   std::int64_t E) {
  const auto check = [&w](const Arg& arg, const auto& values, double rest) {
    if (arg.view().shape[0] == 0) return;
    const Tensor want = w.expected(arg);
    put(want, values, rest);
    w.compare(arg, want);
  };
  check(*pairs.token, list.token, -1);
  check(*pairs.expert, list.expert, static_cast<double>(E));
  check(*pairs.weight, list.weight, 0);
  check(*pairs.offsets, list.offsets, 0);
}

// E experts, each with its `count` best tokens by softmax over E, in the order of the tokens.
template <class Real>
reference::PairList<Real> best_tokens(const reference::Rows<Real>& rows, std::int64_t E,
                                      std::int64_t count) {
  reference::PairList<Real> list;
  reference::Rows<Real> p;
  for (const auto& row : rows) p.push_back(reference::softmax(row));
  for (std::int64_t e = 0; e < E; ++e) {
    list.offsets.push_back(e * count);
    std::vector<int> order(rows.size());
    for (std::size_t t = 0; t < rows.size(); ++t) order[t] = static_cast<int>(t);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return p[a][e] > p[b][e]; });
    order.resize(static_cast<std::size_t>(count));
    std::sort(order.begin(), order.end());
    for (const int t : order) {
      list.token.push_back(t);
      list.expert.push_back(static_cast<int>(e));
      list.weight.push_back(p[t][e]);
    }
  }
  list.offsets.push_back(E * count);
  return list;
}

void fuzz_losses_forward(Router& r) {
  World& w = r.w;
  Arg& values = w.tensor("values", Access::kWritten, r.score_dtype(), {2});
  Arg& counts = w.tensor("tokens_per_expert", Access::kWritten, SMOE_I64, {r.E});
  Arg& ids =
      w.index("ids", w.random.pick<std::int32_t>({SMOE_I32, SMOE_I64}), {r.T, r.K}, -2, r.E + 1);
  w.spoil(60);
  w.place();
  r.bind();
  const Tensor want = w.spoilt() ? Tensor{} : w.expected(values);
  const Tensor want_counts = w.spoilt() ? Tensor{} : w.expected(counts);
  const bool served = w.call([&] {
    return smoe_router_losses(&r.options, r.logits->pointer(), ids.pointer(), values.pointer(),
                              counts.pointer(), w.exec_pointer());
  });
  if (!served || want.data == nullptr) return;
  Matrix<std::int64_t> chosen(r.T, r.K);
  for (std::int64_t i = 0; i < r.T * r.K; ++i) {
    chosen.values[i] = oracle::load_integer(ids.view(), i);
    if (chosen.values[i] >= r.E) chosen.values[i] = -1;
  }
  const oracle::Losses losses = oracle::router_losses(r.cpp(), r.matrix(), chosen);
  oracle::write(want, {losses.load_balancing, losses.z});
  w.compare(values, want);
  if (want_counts.data == nullptr) return;
  put(want_counts, losses.tokens_per_expert, 0);
  w.compare(counts, want_counts);
}

void fuzz_losses_backward(Router& r) {
  World& w = r.w;
  Arg& dlogits = w.tensor("dlogits", Access::kWritten, r.logits->c.tensor.dtype, {r.T, r.E});
  Arg& counts = w.index("tokens_per_expert", SMOE_I64, {r.E}, 0, 9);
  Arg& dvalues = w.tensor("dvalues", Access::kRead, r.score_dtype(), {2});
  w.spoil(60);
  w.place();
  r.bind();
  const Tensor want = w.spoilt() ? Tensor{} : w.expected(dlogits);
  const bool served = w.call([&] {
    return smoe_router_losses_backward(&r.options, r.logits->pointer(), counts.pointer(),
                                       dvalues.pointer(), dlogits.pointer(), w.exec_pointer());
  });
  if (!served || want.data == nullptr) return;
  const std::vector<double> d = oracle::read(dvalues.view());
  oracle::write(
      want,
      oracle::router_losses_backward(r.cpp(), r.matrix(), counts.integers, d[0], d[1]).values);
  w.compare(dlogits, want);
}

}  // namespace

void fuzz_route(World& world) {
  Router router(world);
  router.add_bias();
  world.random.percent(50) ? fuzz_route_forward(router) : fuzz_route_backward(router);
}

void fuzz_round(World& w) {
  Router r(w);
  r.add_bias();
  smoe_round_options options{};
  options.size = sizeof(options);
  options.route = &r.options;
  options.tile = w.random.in(1, 6);
  options.mode = static_cast<std::int32_t>(w.random.in(0, 5));
  options.seed = w.random.bits();
  std::int64_t C = 0, bytes = 0;
  if (smoe_round_capacity(&options, r.T, r.E, &C) != SMOE_OK ||
      smoe_round_scratch_bytes(&options, r.T, r.E, nullptr, &bytes) != SMOE_OK) {
    throw Fault(smoe_last_error());
  }
  const bool backward = w.random.percent(40);
  PairArgs pairs(w, backward ? Access::kRead : Access::kWritten, r.score_dtype(), C, r.E);
  Lent& scratch = w.buffer("scratch", bytes);
  w.size_field("round options.size", &options.size);
  w.field("tile", &options.tile);
  w.field("mode", &options.mode);
  Arg *dweight = nullptr, *dlogits = nullptr;
  if (backward) {
    dweight = &w.tensor("dweight", Access::kRead, r.score_dtype(), {C});
    dlogits = &w.tensor("dlogits", Access::kWritten, r.logits->c.tensor.dtype, {r.T, r.E});
  }
  w.spoil(60);
  w.place();
  r.add_specials();
  r.bind();
  pairs.bind();
  if (backward) {  // pairs of any value: nothing but memory is checked
    w.call([&] {
      return smoe_token_round_backward(&options, r.logits->pointer(), &pairs.c, dweight->pointer(),
                                       dlogits->pointer(), scratch.data, scratch.bytes,
                                       w.exec_pointer());
    });
    return;
  }
  const bool served = w.call([&] {
    return smoe_token_round(&options, r.logits->pointer(), &pairs.c, scratch.data, scratch.bytes,
                            w.exec_pointer());
  });
  if (!served || w.spoilt()) return;
  const RoundOptions cpp{r.cpp(), options.tile, static_cast<RoundingMode>(options.mode),
                         options.seed};
  const auto experts = static_cast<int>(r.E);
  if (r.logits->c.tensor.dtype == SMOE_F64) {
    compare_pairs(w, pairs, reference::round_tokens(cpp, r.values<double>(), experts), r.E);
  } else {
    compare_pairs(w, pairs, reference::round_tokens(cpp, r.values<float>(), experts), r.E);
  }
}

void fuzz_choice(World& w) {
  Router r(w);
  std::int64_t capacity = w.random.in(1, 12);
  const std::int64_t count = std::min(capacity, r.T), C = r.E * count;
  const bool backward = w.random.percent(40), in_scratch = w.random.percent(50);
  PairArgs pairs(w, backward ? Access::kRead : Access::kWritten, r.score_dtype(), C, r.E);
  Arg *dweight = nullptr, *dlogits = nullptr;
  if (backward) {
    dweight = &w.tensor("dweight", Access::kRead, r.score_dtype(), {C});
    dlogits = &w.tensor("dlogits", Access::kWritten, r.logits->c.tensor.dtype, {r.T, r.E});
  } else {
    w.field("capacity", &capacity);
  }
  w.spoil(60);
  w.place();
  pairs.bind();
  const smoe_exec* exec = w.exec_pointer();
  const smoe_tensor* logits = r.logits->pointer();
  if (backward) {
    w.call([&] {
      return in_scratch
                 ? smoe_expert_choice_backward_in_scratch(logits, &pairs.c, dweight->pointer(),
                                                          dlogits->pointer(), nullptr, 0, exec)
                 : smoe_expert_choice_backward(logits, &pairs.c, dweight->pointer(),
                                               dlogits->pointer(), exec);
    });
    return;
  }
  const bool served = w.call([&] {
    return in_scratch ? smoe_expert_choice_in_scratch(logits, capacity, &pairs.c, nullptr, 0, exec)
                      : smoe_expert_choice(logits, capacity, &pairs.c, exec);
  });
  if (!served || w.spoilt()) return;
  if (r.logits->c.tensor.dtype == SMOE_F64) {
    compare_pairs(w, pairs, best_tokens(r.values<double>(), r.E, count), r.E);
  } else {
    compare_pairs(w, pairs, best_tokens(r.values<float>(), r.E, count), r.E);
  }
}

void fuzz_losses(World& w) {
  Router r(w);
  r.add_bias();
  w.random.percent(50) ? fuzz_losses_forward(r) : fuzz_losses_backward(r);
}

}  // namespace sonicmoe::fuzz
