#include "calls.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "core/numeric.h"

namespace sonicmoe::faults {
namespace {

constexpr std::uint8_t kPoison = 0x5a;

std::int64_t bytes_of(std::int32_t dtype) {
  return dtype == SMOE_BF16 || dtype == SMOE_F16  ? 2
         : dtype == SMOE_F32 || dtype == SMOE_I32 ? 4
                                                  : 8;
}

void store(void* data, std::int32_t dtype, std::int64_t i, double value) {
  switch (dtype) {
    case SMOE_F32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      break;
    case SMOE_BF16:
      static_cast<BF16*>(data)[i] = to_bf16(static_cast<float>(value));
      break;
    case SMOE_F16:
      static_cast<F16*>(data)[i] = to_f16(static_cast<float>(value));
      break;
    case SMOE_F64:
      static_cast<double*>(data)[i] = value;
      break;
    case SMOE_I32:
      static_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value);
      break;
    default:
      static_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(value);
  }
}

std::int64_t count_of(const smoe_tensor& t) {
  return std::accumulate(t.shape, t.shape + t.rank, std::int64_t{1}, std::multiplies<>());
}

void fill_normal(const smoe_tensor* t, double scale, Random& random) {
  for (std::int64_t i = 0; i < count_of(*t); ++i)
    store(t->data, t->dtype, i, scale * random.normal());
}
void fill_integers(const smoe_tensor* t, std::int64_t low, std::int64_t high, Random& random) {
  for (std::int64_t i = 0; i < count_of(*t); ++i) {
    store(t->data, t->dtype, i, static_cast<double>(random.between(low, high)));
  }
}

void must_work(smoe_status status, const char* what) {
  if (status != SMOE_OK) throw std::runtime_error(std::string(what) + ": " + smoe_last_error());
}

std::int32_t score_dtype(std::int32_t dtype) { return dtype == SMOE_F64 ? SMOE_F64 : SMOE_F32; }

template <class T>
T pick(Random& random, std::initializer_list<T> values) {
  return values.begin()[random.between(0, static_cast<std::int64_t>(values.size()) - 1)];
}

}  // namespace

void Call::reset() {
  for (Block& b : blocks_) std::memcpy(b.bytes.data(), b.initial.data(), b.bytes.size());
}

bool Call::untouched() const {
  return std::all_of(blocks_.begin(), blocks_.end(),
                     [](const Block& b) { return b.bytes == b.initial; });
}

std::vector<std::uint8_t> Call::results() const {
  std::vector<std::uint8_t> all;
  for (const Block& b : blocks_) {
    if (b.role == Role::kResult) all.insert(all.end(), b.bytes.begin(), b.bytes.end());
  }
  return all;
}

bool Call::has_results(const std::vector<std::uint8_t>& expected) const {
  auto at = expected.begin();
  for (const Block& b : blocks_) {
    if (b.role != Role::kResult) continue;
    if (expected.end() - at < std::ssize(b.bytes)) return false;
    if (!std::equal(b.bytes.begin(), b.bytes.end(), at)) return false;
    at += std::ssize(b.bytes);
  }
  return at == expected.end();
}

Block* Call::block(Role role, std::int64_t bytes) {
  blocks_.push_back(
      {role, {}, Bytes(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)), kPoison)});
  return &blocks_.back();
}

smoe_tensor* Call::tensor(Role role, std::int32_t dtype, const std::vector<std::int64_t>& shape) {
  auto* t = make<smoe_tensor>();
  t->dtype = dtype;
  t->rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    t->shape[i] = shape[i];
    t->stride[i] = stride;
    stride *= shape[i];
  }
  t->data = block(role, std::max<std::int64_t>(stride, 1) * bytes_of(dtype))->bytes.data();
  return t;
}

void Call::ready(std::function<smoe_status()> invoke) {
  invoke_ = std::move(invoke);
  for (Block& b : blocks_) b.initial = b.bytes;
}

std::uint64_t Random::bits() {
  state_ = state_ * 6364136223846793005u + 1442695040888963407u;
  std::uint64_t x = state_;
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  return x ^ (x >> 29);
}

std::int64_t Random::between(std::int64_t low, std::int64_t high) {
  return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
}

double Random::normal() {
  // The sum of four uniform numbers, scaled to variance 1: no library function, so no other bits.
  double sum = -2.0;
  for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits() >> 11) * 0x1p-53;
  return sum * 1.7320508075688772;
}

LayerSpec random_layer(Random& random) {
  LayerSpec s;
  s.form = pick(random, {SMOE_FORM_IDS, SMOE_FORM_PAIRS, SMOE_FORM_GROUPED});
  s.dtype = pick(random, {SMOE_F32, SMOE_BF16, SMOE_F16, SMOE_F64});
  s.activation = static_cast<std::int32_t>(random.between(SMOE_SWIGLU, SMOE_SWIGLU_STEP));
  s.grad_mode = pick(random, {SMOE_GRAD_WRITE, SMOE_GRAD_ACCUMULATE});
  s.threads = static_cast<std::int32_t>(random.between(1, 5));
  s.tokens = random.between(0, 300);
  s.hidden = random.between(1, 80);
  s.width = random.between(1, 80);
  s.experts = random.between(1, 9);
  s.top_k = random.between(1, std::min<std::int64_t>(4, s.experts));
  s.bias = static_cast<std::int32_t>(random.between(0, 1));
  s.seed = random.bits();
  if (s.dtype == SMOE_BF16 && random.between(0, 1) == 0) {
    s.precision = SMOE_PRECISION_FP8;
    s.hidden = 128 * random.between(1, 2);
    s.width = 128;
    s.experts = std::min<std::int64_t>(s.experts, 4);
    s.top_k = std::min(s.top_k, s.experts);
  }
  return s;
}

std::string describe(const LayerSpec& s) {
  constexpr const char* kForms[] = {"ids", "pairs", "grouped"};
  constexpr const char* kTypes[] = {"f32", "bf16", "f16", "f64"};
  return std::string(kForms[s.form]) + " " + kTypes[s.dtype] + " activation " +
         std::to_string(s.activation) + " T" + std::to_string(s.tokens) + " d" +
         std::to_string(s.hidden) + " n" + std::to_string(s.width) + " E" +
         std::to_string(s.experts) + " K" + std::to_string(s.top_k) + (s.bias ? " bias" : "") +
         (s.grad_mode == SMOE_GRAD_ACCUMULATE ? " accumulate" : "") +
         (s.precision == SMOE_PRECISION_FP8 ? " fp8" : "") + " threads " +
         std::to_string(s.threads);
}

namespace {

/// The structs of one layer call, filled by the functions below.
struct Layer {
  const LayerSpec& spec;
  Call& call;
  Random random;
  smoe_problem* problem;
  smoe_exec* exec;
  std::int64_t capacity = 0;

  Layer(const LayerSpec& s, Call& c)
      : spec(s),
        call(c),
        random(s.seed),
        problem(c.make<smoe_problem>()),
        exec(c.make<smoe_exec>()) {
    problem->form = s.form;
    problem->dtype = s.dtype;
    problem->activation = s.activation;
    problem->tokens = s.tokens;
    problem->hidden = s.hidden;
    problem->width = s.width;
    problem->experts = s.experts;
    if (s.form == SMOE_FORM_IDS) problem->top_k = s.top_k;
    if (s.form == SMOE_FORM_PAIRS) problem->capacity = s.tokens * s.top_k + 17;
    problem->precision = s.precision;
    exec->num_threads = s.threads;
    must_work(smoe_row_capacity(problem, &capacity), "row capacity");
  }

  smoe_tensor* normal(std::int32_t dtype, const std::vector<std::int64_t>& shape, double scale) {
    smoe_tensor* t = call.tensor(Role::kInput, dtype, shape);
    fill_normal(t, scale, random);
    return t;
  }
  bool gated() const { return smoe_activation_is_gated(spec.activation) == 1; }

  std::vector<std::int64_t> weights_shape() const {
    if (spec.form == SMOE_FORM_IDS) return {spec.tokens, spec.top_k};
    return {capacity};
  }

  smoe_routing* routing() {
    auto* r = call.make<smoe_routing>();
    const std::int64_t e = spec.experts;
    if (spec.form == SMOE_FORM_IDS) {
      smoe_tensor* ids = call.tensor(Role::kInput, SMOE_I64, {spec.tokens, spec.top_k});
      fill_integers(ids, -1, e - 1, random);
      r->ids = ids;
    } else if (spec.form == SMOE_FORM_PAIRS) {
      smoe_tensor* token = call.tensor(Role::kInput, SMOE_I32, {capacity});
      smoe_tensor* expert = call.tensor(Role::kInput, SMOE_I32, {capacity});
      fill_integers(token, -1, spec.tokens, random);
      fill_integers(expert, -1, e, random);
      r->token = token;
      r->expert = expert;
    } else {
      smoe_tensor* begin = call.tensor(Role::kInput, SMOE_I64, {e});
      smoe_tensor* count = call.tensor(Role::kInput, SMOE_I64, {e});
      const std::int64_t step = spec.tokens / e;
      for (std::int64_t i = 0; i < e; ++i) {
        store(begin->data, SMOE_I64, i, static_cast<double>(i * step));
        store(count->data, SMOE_I64, i, static_cast<double>(random.between(-1, step)));
      }
      r->row_begin = begin;
      r->row_count = count;
    }
    r->weights = normal(score_dtype(spec.dtype), weights_shape(), 1.0);
    return r;
  }

  smoe_weights* weights(Role role, std::int32_t dtype) {
    auto* w = call.make<smoe_weights>();
    const std::int64_t d = spec.hidden, n = spec.width, e = spec.experts;
    const auto one = [&](const std::vector<std::int64_t>& shape) {
      smoe_tensor* t = call.tensor(role, dtype, shape);
      fill_normal(t, 0.2, random);
      return t;
    };
    if (gated()) w->gate = one({e, n, d});
    w->up = one({e, n, d});
    w->down = one({e, d, n});
    if (spec.bias == 0) return w;
    if (gated()) w->b_gate = one({e, n});
    w->b_up = one({e, n});
    w->b_down = one({e, d});
    return w;
  }

  /// Memory for the quantised weights; none without fp8.
  Bytes* fp8_weights(Role role) {
    if (spec.precision == SMOE_PRECISION_TENSORS) return nullptr;
    std::int64_t bytes = 0;
    must_work(smoe_fp8_weights_bytes(problem, exec, &bytes), "bytes of fp8_weights");
    return &call.block(role, bytes)->bytes;
  }
  smoe_forward_args* forward(std::int32_t pass, Role output) {
    smoe_sizes sizes{};
    sizes.size = sizeof sizes;
    must_work(smoe_moe_sizes(problem, pass, exec, &sizes), "forward sizes");
    auto* a = call.make<smoe_forward_args>();
    a->x = normal(spec.dtype, {spec.tokens, spec.hidden}, 1.0);
    a->routing = routing();
    a->weights = weights(Role::kInput, spec.dtype);
    a->out = call.tensor(output, spec.dtype, {spec.tokens, spec.hidden});
    if (pass == SMOE_FORWARD) {
      a->h = call.block(output, sizes.h_bytes)->bytes.data();
      a->h_bytes = sizes.h_bytes;
      a->saved = call.block(Role::kScratch, sizes.saved_bytes)->bytes.data();
      a->saved_bytes = sizes.saved_bytes;
    }
    a->scratch = call.block(Role::kScratch, sizes.scratch_bytes)->bytes.data();
    a->scratch_bytes = sizes.scratch_bytes;
    if (Bytes* quantised = fp8_weights(Role::kInput)) {
      const auto size = static_cast<std::int64_t>(quantised->size());
      must_work(smoe_quantize_weights(problem, a->weights, quantised->data(), size, exec),
                "quantising");
      a->fp8_weights = quantised->data();
      a->fp8_weights_bytes = size;
    }
    return a;
  }

  smoe_backward_args* backward(const smoe_forward_args& f) {
    smoe_sizes sizes{};
    sizes.size = sizeof sizes;
    must_work(smoe_moe_sizes(problem, SMOE_BACKWARD, exec, &sizes), "backward sizes");
    auto* a = call.make<smoe_backward_args>();
    a->grad_mode = spec.grad_mode;
    a->x = f.x;
    a->routing = f.routing;
    a->weights = f.weights;
    a->fp8_weights = f.fp8_weights;
    a->fp8_weights_bytes = f.fp8_weights_bytes;
    a->dout = normal(spec.dtype, {spec.tokens, spec.hidden}, 1.0);
    a->h = f.h;
    a->h_bytes = f.h_bytes;
    a->saved = f.saved;
    a->saved_bytes = f.saved_bytes;
    a->scratch = call.block(Role::kScratch, sizes.scratch_bytes)->bytes.data();
    a->scratch_bytes = sizes.scratch_bytes;
    a->dx = call.tensor(Role::kResult, spec.dtype, {spec.tokens, spec.hidden});
    a->dweights = call.tensor(Role::kResult, score_dtype(spec.dtype), weights_shape());
    const bool adds = spec.grad_mode == SMOE_GRAD_ACCUMULATE;
    a->grads = weights(Role::kResult, adds ? score_dtype(spec.dtype) : spec.dtype);
    return a;
  }
};

}  // namespace

CallPtr layer_call(const LayerSpec& spec, std::int32_t pass) {
  constexpr const char* kPasses[] = {"inference: ", "forward: ", "backward: "};
  auto call = std::make_unique<Call>(kPasses[pass] + describe(spec));
  Layer layer(spec, *call);
  const smoe_problem* problem = layer.problem;
  const smoe_exec* exec = layer.exec;
  if (pass != SMOE_BACKWARD) {
    const smoe_forward_args* args = layer.forward(pass, Role::kResult);
    call->ready([=] { return smoe_moe_forward(problem, args, exec); });
    return call;
  }
  const smoe_forward_args* forward = layer.forward(SMOE_FORWARD, Role::kInput);
  must_work(smoe_moe_forward(problem, forward, exec), "forward before backward");
  const smoe_backward_args* args = layer.backward(*forward);
  call->ready([=] { return smoe_moe_backward(problem, args, exec); });
  return call;
}

CallPtr quantize_call(const LayerSpec& spec) {
  auto call = std::make_unique<Call>("quantize: " + describe(spec));
  Layer layer(spec, *call);
  const smoe_weights* weights = layer.weights(Role::kInput, spec.dtype);
  Bytes* to = layer.fp8_weights(Role::kResult);
  call->ready([=, problem = layer.problem, exec = layer.exec] {
    return smoe_quantize_weights(problem, weights, to->data(),
                                 static_cast<std::int64_t>(to->size()), exec);
  });
  return call;
}

CallPtr refused_call(const LayerSpec& spec) {
  auto call = std::make_unique<Call>("refused: " + describe(spec));
  Layer layer(spec, *call);
  smoe_forward_args* args = layer.forward(SMOE_FORWARD, Role::kResult);
  args->out = call->tensor(Role::kResult, spec.dtype, {spec.tokens + 1, spec.hidden});
  call->ready([=, problem = layer.problem, exec = layer.exec] {
    return smoe_moe_forward(problem, args, exec);
  });
  return call;
}

RouterSpec random_router(Random& random) {
  RouterSpec s;
  s.dtype = pick(random, {SMOE_F32, SMOE_BF16, SMOE_F16, SMOE_F64});
  s.score = static_cast<std::int32_t>(random.between(0, SMOE_SCORE_SQRT_SOFTPLUS));
  s.mode = static_cast<std::int32_t>(random.between(0, SMOE_ROUND_BALANCED));
  s.renormalize = static_cast<std::int32_t>(random.between(0, 1));
  s.threads = static_cast<std::int32_t>(random.between(1, 5));
  s.tokens = random.between(0, 700);
  s.experts = 4 * random.between(2, 20);
  s.top_k = random.between(1, 4);
  s.groups = random.between(0, 1) * 4;
  s.tile = random.between(1, 64);
  s.seed = random.bits();
  return s;
}

std::string describe(const RouterSpec& s) {
  constexpr const char* kTypes[] = {"f32", "bf16", "f16", "f64"};
  return std::string(kTypes[s.dtype]) + " score " + std::to_string(s.score) + " mode " +
         std::to_string(s.mode) + " T" + std::to_string(s.tokens) + " E" +
         std::to_string(s.experts) + " K" + std::to_string(s.top_k) + " groups " +
         std::to_string(s.groups) + " tile " + std::to_string(s.tile) + " threads " +
         std::to_string(s.threads);
}

namespace {

/// The structs of one router call.
struct RouterCall {
  const RouterSpec& spec;
  Call& call;
  Random random;
  smoe_exec* exec;
  smoe_route_options* options;
  smoe_tensor* logits;

  RouterCall(const RouterSpec& s, Call& c)
      : spec(s),
        call(c),
        random(s.seed),
        exec(c.make<smoe_exec>()),
        options(c.make<smoe_route_options>()),
        logits(c.tensor(Role::kInput, s.dtype, {s.tokens, s.experts})) {
    exec->num_threads = s.threads;
    options->score = s.score;
    options->top_k = s.top_k;
    options->renormalize = s.renormalize;
    options->n_group = s.groups;
    options->topk_group = s.groups / 2;
    fill_normal(logits, 1.0, random);
  }

  std::int32_t real() const { return score_dtype(spec.dtype); }
  smoe_tensor* scores(Role role, const std::vector<std::int64_t>& shape) {
    smoe_tensor* t = call.tensor(role, real(), shape);
    fill_normal(t, 1.0, random);
    return t;
  }
  smoe_tensor* ids(Role role) { return call.tensor(role, SMOE_I64, {spec.tokens, spec.top_k}); }
  smoe_tensor* dlogits() {
    return call.tensor(Role::kResult, spec.dtype, {spec.tokens, spec.experts});
  }
  smoe_pairs* pairs(Role role, std::int64_t capacity) {
    auto* p = call.make<smoe_pairs>();
    p->token = call.tensor(role, SMOE_I32, {capacity});
    p->expert = call.tensor(role, SMOE_I32, {capacity});
    p->weight = call.tensor(role, real(), {capacity});
    p->offsets = call.tensor(role, SMOE_I64, {spec.experts + 1});
    return p;
  }

  void route(Router which) {
    const bool backward = which == Router::kRouteBackward;
    const Role role = backward ? Role::kInput : Role::kResult;
    const smoe_tensor* chosen = ids(role);
    const smoe_tensor* weights = scores(role, {spec.tokens, spec.top_k});
    const auto forward = [=, this, o = options, l = logits, e = exec] {
      return smoe_route(o, l, chosen, weights, e);
    };
    if (!backward) return call.ready(forward);
    must_work(forward(), "route before its backward");
    const smoe_tensor* dweights = scores(Role::kInput, {spec.tokens, spec.top_k});
    const smoe_tensor* to = dlogits();
    call.ready([=, o = options, l = logits, e = exec] {
      return smoe_route_backward(o, l, chosen, dweights, to, e);
    });
  }

  void round(Router which) {
    const bool backward = which == Router::kRoundBackward;
    auto* round = call.make<smoe_round_options>();
    round->mode = spec.mode;
    round->route = options;
    round->tile = spec.tile;
    round->seed = spec.seed;
    std::int64_t capacity = 0;
    std::int64_t bytes = 0;
    must_work(smoe_round_capacity(round, spec.tokens, spec.experts, &capacity), "round capacity");
    must_work(smoe_round_scratch_bytes(round, spec.tokens, spec.experts, exec, &bytes), "scratch");
    const smoe_pairs* p = pairs(backward ? Role::kInput : Role::kResult, capacity);
    void* scratch = call.block(Role::kScratch, bytes)->bytes.data();
    const auto forward = [=, l = logits, e = exec] {
      return smoe_token_round(round, l, p, scratch, bytes, e);
    };
    if (!backward) return call.ready(forward);
    must_work(forward(), "rounding before its backward");
    const smoe_tensor* dweight = scores(Role::kInput, {capacity});
    const smoe_tensor* to = dlogits();
    call.ready([=, l = logits, e = exec] {
      return smoe_token_round_backward(round, l, p, dweight, to, scratch, bytes, e);
    });
  }

  void choose(Router which) {
    const bool backward = which == Router::kExpertChoiceBackward;
    const std::int64_t each = spec.tokens / 3 + 1;
    const std::int64_t capacity = spec.experts * std::min(each, spec.tokens);
    const smoe_pairs* p = pairs(backward ? Role::kInput : Role::kResult, capacity);
    const auto forward = [=, l = logits, e = exec] { return smoe_expert_choice(l, each, p, e); };
    if (!backward) return call.ready(forward);
    must_work(forward(), "expert choice before its backward");
    const smoe_tensor* dweight = scores(Role::kInput, {capacity});
    const smoe_tensor* to = dlogits();
    call.ready(
        [=, l = logits, e = exec] { return smoe_expert_choice_backward(l, p, dweight, to, e); });
  }

  void losses(Router which) {
    const bool backward = which == Router::kLossesBackward;
    smoe_tensor* chosen = ids(Role::kInput);
    fill_integers(chosen, -1, spec.experts - 1, random);
    const Role role = backward ? Role::kInput : Role::kResult;
    const smoe_tensor* values = scores(role, {2});
    const smoe_tensor* counts = call.tensor(role, SMOE_I64, {spec.experts});
    const auto forward = [=, o = options, l = logits, e = exec] {
      return smoe_router_losses(o, l, chosen, values, counts, e);
    };
    if (!backward) return call.ready(forward);
    must_work(forward(), "losses before their backward");
    const smoe_tensor* to = dlogits();
    call.ready([=, o = options, l = logits, e = exec] {
      return smoe_router_losses_backward(o, l, counts, values, to, e);
    });
  }
};

}  // namespace

CallPtr router_call(const RouterSpec& spec, Router which) {
  constexpr const char* kNames[kRouterCalls] = {
      "route: ",         "route backward: ",         "rounding: ", "rounding backward: ",
      "expert choice: ", "expert choice backward: ", "losses: ",   "losses backward: "};
  auto call = std::make_unique<Call>(kNames[static_cast<int>(which)] + describe(spec));
  RouterCall router(spec, *call);
  switch (which) {
    case Router::kRoute:
    case Router::kRouteBackward:
      router.route(which);
      break;
    case Router::kRound:
    case Router::kRoundBackward:
      router.round(which);
      break;
    case Router::kExpertChoice:
    case Router::kExpertChoiceBackward:
      router.choose(which);
      break;
    default:
      router.losses(which);
  }
  return call;
}

GemmSpec random_gemm(Random& random) {
  GemmSpec s;
  s.dtype = pick(random, {SMOE_F32, SMOE_BF16, SMOE_F16, SMOE_F64});
  s.gather = static_cast<std::int32_t>(random.between(0, 1));
  s.threads = static_cast<std::int32_t>(random.between(1, 5));
  s.rows = random.between(1, 700);
  s.experts = random.between(1, 9);
  s.n = random.between(1, 100);
  s.k = random.between(1, 100);
  s.seed = random.bits();
  return s;
}

CallPtr gemm_call(const GemmSpec& s, Grouped which) {
  const bool columns = which == Grouped::kColumns;
  auto call = std::make_unique<Call>(
      std::string(columns ? "grouped_gemm_k: " : "grouped_gemm: ") + "dtype " +
      std::to_string(s.dtype) + " R" + std::to_string(s.rows) + " E" + std::to_string(s.experts) +
      " n" + std::to_string(s.n) + " k" + std::to_string(s.k) + (s.gather ? " gather" : "") +
      " threads " + std::to_string(s.threads));
  Random random(s.seed);
  auto* exec = call->make<smoe_exec>();
  exec->num_threads = s.threads;
  auto* args = call->make<smoe_grouped_gemm_args>();
  smoe_tensor* a = call->tensor(Role::kInput, s.dtype, {s.rows, s.k});
  smoe_tensor* b = columns ? call->tensor(Role::kInput, s.dtype, {s.rows, s.n})
                           : call->tensor(Role::kInput, s.dtype, {s.experts, s.n, s.k});
  fill_normal(a, 1.0, random);
  fill_normal(b, 1.0, random);
  args->a = a;
  args->b = b;
  args->d = columns ? call->tensor(Role::kResult, s.dtype, {s.experts, s.k, s.n})
                    : call->tensor(Role::kResult, s.dtype, {s.rows, s.n});
  smoe_tensor* offsets = call->tensor(Role::kInput, SMOE_I64, {s.experts + 1});
  for (std::int64_t e = 0; e <= s.experts; ++e) {
    store(offsets->data, SMOE_I64, e, static_cast<double>(e * s.rows / s.experts));
  }
  args->offsets = offsets;
  if (s.gather != 0) {
    smoe_tensor* gather = call->tensor(Role::kInput, SMOE_I32, {2 * s.rows});
    fill_integers(gather, 0, s.rows - 1, random);
    gather->shape[0] = s.rows;
    gather->stride[0] = 2;  // strided: the library makes its own copy
    args->gather = gather;
  }
  if (columns) {
    call->ready([=] { return smoe_grouped_gemm_k(args, exec); });
  } else {
    call->ready([=] { return smoe_grouped_gemm(args, exec); });
  }
  return call;
}

}  // namespace sonicmoe::faults
