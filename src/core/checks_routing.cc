// The checks of routing, rounding, expert choice and the auxiliary losses.
#include <algorithm>
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/score.h"

namespace sonicmoe::checks {
namespace {

constexpr std::int32_t kScoreModeCount = 4;
constexpr std::int32_t kRoundingModeCount = 6;

void at_most(const char* name, std::int64_t value, const std::string& bound_name,
             std::int64_t bound) {
  if (value > bound) {
    refuse(std::string(name) + " is " + std::to_string(value) + ", must be at most " + bound_name +
           " = " + std::to_string(bound));
  }
}

void groups(const RouteOptions& o, std::int64_t experts) {
  at_least("n_group", o.n_group, 0);
  if (o.n_group == 0) {
    if (o.topk_group != 0) {
      refuse("topk_group is " + std::to_string(o.topk_group) + ", must be 0 without n_group");
    }
    return;
  }
  if (experts % o.n_group != 0) {
    refuse("n_group is " + std::to_string(o.n_group) +
           ", must divide E = " + std::to_string(experts));
  }
  at_least("topk_group", o.topk_group, 1);
  at_most("topk_group", o.topk_group, "n_group", o.n_group);
  at_most("top_k", o.top_k, "topk_group * E / n_group", o.topk_group * (experts / o.n_group));
}

void route_options(const RouteOptions& o, std::int64_t experts) {
  known("score", static_cast<std::int32_t>(o.score), kScoreModeCount);
  known("renormalize", o.renormalize, 2);
  finite("scale", o.scale);
  at_least("top_k", o.top_k, 1);
  at_most("top_k", o.top_k, "E", experts);
  groups(o, experts);
  if (given(o.bias)) {
    if (!key::pointwise(o.score)) {
      refuse(std::string("bias is given, must be empty: ") + score_mode_name(o.score) +
             " has no selection bias");
    }
    input(o.bias, "bias", {{"E", experts}}, DType::kF32);
  }
}

struct Extents {
  Dim T, E;
};
Extents logits_extents(const Tensor& logits) {
  rank(logits, "logits", "(T, E)", 2);
  const Dim T{"T", logits.shape[0]};
  const Dim E{"E", logits.shape[1]};
  at_least("T of logits", T.size, 0);
  at_least("E of logits", E.size, 1);
  input(logits, "logits", {T, E}, kFloats);
  below_2_31("T", T.size);
  below_2_31("E", E.size);
  return {T, E};
}

// The shapes of the losses' values and counts: of all tokens, or of S sequences if `values` has
// rank 2.
struct LossShapes {
  Shape values, counts;
};
LossShapes loss_shapes(const Tensor& values, const char* name, const Extents& s) {
  if (values.rank != 2) return {{{"2", 2}}, {s.E}};
  const Dim S{"S", values.shape[0]};
  at_least(("S of " + std::string(name)).c_str(), S.size, 1);
  if (s.T.size % S.size != 0) {
    refuse("S of " + std::string(name) + " is " + std::to_string(S.size) +
           ", must divide T = " + std::to_string(s.T.size));
  }
  return {{S, {"2", 2}}, {S, s.E}};
}

DType score_dtype(const Tensor& logits) {
  return logits.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

Dim slots(const RouteOptions& o, const Extents& s) {
  below_2_31("tokens * top_k", product("tokens * top_k", {s.T.size, o.top_k}));
  return {"K", o.top_k};
}

// Forward calls write pairs (rule = output), backward calls read them (rule = input).
using PairsRule = void (*)(const Tensor&, const char*, const Shape&, DTypes);
void pairs_of(const Pairs& p, const Tensor& logits, std::int64_t capacity, PairsRule rule) {
  const Dim C{"C", capacity};
  rule(p.token, "pairs.token", {C}, DType::kI32);
  rule(p.expert, "pairs.expert", {C}, DType::kI32);
  rule(p.weight, "pairs.weight", {C}, score_dtype(logits));
  rule(p.offsets, "pairs.offsets", {{"E+1", logits.shape[1] + 1}}, DType::kI64);
}

std::int64_t choice_capacity(std::int64_t experts, std::int64_t tokens, std::int64_t capacity) {
  at_least("capacity", capacity, 1);
  const std::int64_t rows = product("E * capacity", {experts, std::min(capacity, tokens)});
  below_2_31("E * min(capacity, T)", rows);
  return rows;
}

}  // namespace

void route(const RouteOptions& o, const Tensor& logits, const Tensor& ids, const Tensor& weights,
           const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  route_options(o, s.E.size);
  const Dim K = slots(o, s);
  output(ids, "ids", {s.T, K}, kIndices);
  output(weights, "weights", {s.T, K}, score_dtype(logits));
}

void route_backward(const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  route_options(o, s.E.size);
  const Dim K = slots(o, s);
  input(ids, "ids", {s.T, K}, kIndices);
  input(dweights, "dweights", {s.T, K}, score_dtype(logits));
  output(dlogits, "dlogits", {s.T, s.E}, logits.dtype);
}

void round_options(const RoundOptions& o, std::int64_t tokens, std::int64_t experts) {
  at_least("tokens", tokens, 0);
  at_least("experts", experts, 1);
  below_2_31("tokens", tokens);
  below_2_31("experts", experts);
  array_bytes("tokens * experts in bytes", {tokens, experts, 8});
  route_options(o.route, experts);
  at_least("tile", o.tile, 1);
  known("mode", static_cast<std::int32_t>(o.mode), kRoundingModeCount);
}

void token_round(const RoundOptions& o, const Tensor& logits, const Pairs& pairs, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  round_options(o, s.T.size, s.E.size);
  pairs_of(pairs, logits, round_capacity(o, s.T.size, s.E.size), output);
}

void token_round_backward(const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  round_options(o, s.T.size, s.E.size);
  const std::int64_t capacity = round_capacity(o, s.T.size, s.E.size);
  pairs_of(pairs, logits, capacity, input);
  input(dweight, "dweight", {{"C", capacity}}, score_dtype(logits));
  output(dlogits, "dlogits", {s.T, s.E}, logits.dtype);
}

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  pairs_of(pairs, logits, choice_capacity(s.E.size, s.T.size, capacity), output);
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  rank(pairs.token, "pairs.token", "(C)", 1);
  const std::int64_t capacity = pairs.token.shape[0];
  below_2_31("C", capacity);
  if (capacity < 0 || capacity % s.E.size != 0) {
    refuse(
        "pairs.token has " + std::to_string(capacity) +
        " entries, must have E * min(capacity, T), a multiple of E = " + std::to_string(s.E.size));
  }
  pairs_of(pairs, logits, capacity, input);
  input(dweight, "dweight", {{"C", capacity}}, score_dtype(logits));
  output(dlogits, "dlogits", {s.T, s.E}, logits.dtype);
}

void routing_sizes(std::int64_t tokens, std::int64_t experts, const Exec& e) {
  exec(e);
  at_least("tokens", tokens, 0);
  at_least("experts", experts, 1);
  below_2_31("tokens", tokens);
  below_2_31("experts", experts);
  array_bytes("tokens * experts in bytes", {tokens, experts, 8});
}

void router_losses(const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  route_options(o, s.E.size);
  input(ids, "ids", {s.T, slots(o, s)}, kIndices);
  const LossShapes shapes = loss_shapes(out.values, "values", s);
  output(out.values, "values", shapes.values, score_dtype(logits));
  output(out.tokens_per_expert, "tokens_per_expert", shapes.counts, DType::kI64);
}

void router_losses_backward(const RouteOptions& o, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& e) {
  exec(e);
  const Extents s = logits_extents(logits);
  route_options(o, s.E.size);
  slots(o, s);
  const LossShapes shapes = loss_shapes(dvalues, "dvalues", s);
  input(tokens_per_expert, "tokens_per_expert", shapes.counts, DType::kI64);
  input(dvalues, "dvalues", shapes.values, score_dtype(logits));
  output(dlogits, "dlogits", {s.T, s.E}, logits.dtype);
}

}  // namespace sonicmoe::checks
