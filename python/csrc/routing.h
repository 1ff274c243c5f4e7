// Routers and their losses as operators.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "sonicmoe/routing.h"
#include "views.h"

namespace sonicmoe_torch {

// The arguments that every routing operator takes, except expert choice.
#define SONICMOE_ROUTE(ARGUMENT)                \
  ARGUMENT(Array, logits)                       \
  ARGUMENT(MaybeArray, bias)                    \
  ARGUMENT(std::int64_t, k)                     \
  ARGUMENT(std::int64_t, score) /* ScoreMode */ \
  ARGUMENT(bool, renormalize)                   \
  ARGUMENT(double, scale)                       \
  ARGUMENT(std::int64_t, n_group)               \
  ARGUMENT(std::int64_t, topk_group)
struct RouteCall {
  SONICMOE_ARGUMENTS(SONICMOE_ROUTE)
};

inline sonicmoe::RouteOptions options_of(const RouteCall& a) {
  expect_rank(a.logits, 2, "logits");
  sonicmoe::RouteOptions o;
  o.top_k = a.k;
  o.score = enumerator("score", a.score, sonicmoe::ScoreMode::kSqrtSoftplus);
  o.renormalize = a.renormalize ? 1 : 0;
  o.scale = a.scale;
  o.bias = view(a.bias, "bias");
  o.n_group = a.n_group;
  o.topk_group = a.topk_group;
  return o;
}

inline Array like_logits(const Array& logits) {
  expect_rank(logits, 2, "logits");
  return empty(logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
}

inline std::tuple<Array, Array> route(RouteCall& a) {
  const sonicmoe::RouteOptions options = options_of(a);
  // The library refuses a bad k in the call below. The results are allocated before this call, with
  // k = 1 in place of a bad k.
  const std::int64_t slots = a.k > 0 && a.k <= a.logits.size(1) ? a.k : 1;
  Array ids = empty(a.logits, {a.logits.size(0), slots}, ScalarType::Long);
  Array weights = empty(a.logits, {a.logits.size(0), slots}, score_dtype(a.logits));
  sonicmoe::route(options, view(a.logits, "logits"), view(ids, "ids"), view(weights, "weights"),
                  DeviceScope(a.logits).exec());
  return {weights, ids};
}

#define SONICMOE_ROUTE_GRADIENT(ARGUMENT) \
  ARGUMENT(Array, dweights)               \
  ARGUMENT(Array, ids)
struct RouteGradient {
  SONICMOE_ARGUMENTS(SONICMOE_ROUTE_GRADIENT)
};
using RouteBackwardCall = Joined<RouteGradient, RouteCall>;

inline Array route_backward(RouteBackwardCall& a) {
  Array dlogits = like_logits(a.logits);
  sonicmoe::route_backward(options_of(a), view(a.logits, "logits"), view(a.ids, "ids"),
                           view(a.dweights, "dweights"), view(dlogits, "dlogits"),
                           DeviceScope(a.logits).exec());
  return dlogits;
}

/// The weight comes first: _autograd.py differentiates only the first result of an operator.
#define SONICMOE_PAIRS(ARGUMENT) \
  ARGUMENT(Array, weight)        \
  ARGUMENT(Array, token)         \
  ARGUMENT(Array, expert)        \
  ARGUMENT(Array, offsets)
struct PairArrays {
  SONICMOE_ARGUMENTS(SONICMOE_PAIRS)
  sonicmoe::Pairs views() const {
    return {view(token, "token"), view(expert, "expert"), view(weight, "weight"),
            view(offsets, "offsets")};
  }
  std::tuple<Array, Array, Array, Array> results() const {
    return {weight, token, expert, offsets};
  }
};

inline PairArrays new_pairs(const Array& logits, std::int64_t capacity) {
  return {.weight = empty(logits, {capacity}, score_dtype(logits)),
          .token = empty(logits, {capacity}, ScalarType::Int),
          .expert = empty(logits, {capacity}, ScalarType::Int),
          .offsets = empty(logits, {logits.size(1) + 1}, ScalarType::Long)};
}

#define SONICMOE_ROUNDING(ARGUMENT)                                                        \
  ARGUMENT(Array, seed) /* () int64 in host memory: one compiled graph serves all seeds */ \
  ARGUMENT(std::int64_t, tile)                                                             \
  ARGUMENT(std::int64_t, mode) /* RoundingMode */
struct Rounding {
  SONICMOE_ARGUMENTS(SONICMOE_ROUNDING)
};
using RoundCall = Joined<RouteCall, Rounding>;

inline sonicmoe::RoundOptions options_of(const RoundCall& a) {
  if (a.seed.numel() != 1 || a.seed.scalar_type() != ScalarType::Long || !a.seed.is_cpu()) {
    throw std::invalid_argument("seed must be an int or one int64 element in host memory");
  }
  expect_memory(a.seed, "seed");
  sonicmoe::RoundOptions o;
  o.route = options_of(static_cast<const RouteCall&>(a));
  o.tile = a.tile;
  o.mode = enumerator("mode", a.mode, sonicmoe::RoundingMode::kBalanced);
  o.seed = static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(a.seed.data_ptr()));
  return o;
}

inline std::tuple<Array, Array, Array, Array> token_round(RoundCall& a) {
  const sonicmoe::RoundOptions options = options_of(a);
  const Array& logits = a.logits;
  const DeviceScope device(logits);
  const std::int64_t tokens = logits.size(0);
  const std::int64_t experts = logits.size(1);
  const PairArrays pairs = new_pairs(logits, sonicmoe::round_capacity(options, tokens, experts));
  const Scratch scratch(logits,
                        sonicmoe::round_scratch_bytes(options, tokens, experts, device.exec()));
  sonicmoe::token_round(options, view(logits, "logits"), pairs.views(), scratch.buffer(),
                        device.exec());
  return pairs.results();
}

#define SONICMOE_PAIR_GRADIENT(ARGUMENT) ARGUMENT(Array, dweight)
struct PairGradient {
  SONICMOE_ARGUMENTS(SONICMOE_PAIR_GRADIENT)
};
using RoundBackwardCall = Joined<PairGradient, PairArrays, RoundCall>;

inline Array token_round_backward(RoundBackwardCall& a) {
  const sonicmoe::RoundOptions options = options_of(a);
  const Array& logits = a.logits;
  const DeviceScope device(logits);
  Array dlogits = like_logits(logits);
  const Scratch scratch(logits, sonicmoe::round_scratch_bytes(options, logits.size(0),
                                                              logits.size(1), device.exec()));
  sonicmoe::token_round_backward(options, view(logits, "logits"), a.views(),
                                 view(a.dweight, "dweight"), view(dlogits, "dlogits"),
                                 scratch.buffer(), device.exec());
  return dlogits;
}

struct ExpertChoiceCall {
  Array logits;
  std::int64_t capacity = 0;
  auto fields() { return std::tie(logits, capacity); }
  static std::string schema() { return "Tensor logits, SymInt capacity"; }
};

inline std::tuple<Array, Array, Array, Array> expert_choice(ExpertChoiceCall& a) {
  expect_rank(a.logits, 2, "logits");
  const std::int64_t each = std::max<std::int64_t>(0, std::min(a.capacity, a.logits.size(0)));
  const PairArrays pairs = new_pairs(a.logits, a.logits.size(1) * each);
  const DeviceScope device(a.logits);
  const Scratch scratch(a.logits, sonicmoe::expert_choice_scratch_bytes(
                                      a.logits.size(0), a.logits.size(1), device.exec()));
  sonicmoe::expert_choice(view(a.logits, "logits"), a.capacity, pairs.views(), scratch.buffer(),
                          device.exec());
  return pairs.results();
}

#define SONICMOE_LOGITS(ARGUMENT) ARGUMENT(Array, logits)
struct Logits {
  SONICMOE_ARGUMENTS(SONICMOE_LOGITS)
};
using ExpertChoiceBackwardCall = Joined<PairGradient, PairArrays, Logits>;

inline Array expert_choice_backward(ExpertChoiceBackwardCall& a) {
  Array dlogits = like_logits(a.logits);
  const DeviceScope device(a.logits);
  const Scratch scratch(a.logits, sonicmoe::expert_choice_scratch_bytes(
                                      a.logits.size(0), a.logits.size(1), device.exec()));
  sonicmoe::expert_choice_backward(view(a.logits, "logits"), a.views(), view(a.dweight, "dweight"),
                                   view(dlogits, "dlogits"), scratch.buffer(), device.exec());
  return dlogits;
}

#define SONICMOE_CHOICE(ARGUMENT) ARGUMENT(Array, ids)
struct Choice {
  SONICMOE_ARGUMENTS(SONICMOE_CHOICE)
};
using LossesCall = Joined<Choice, RouteCall>;

inline std::tuple<Array, Array> router_losses(LossesCall& a) {
  const Array& logits = a.logits;
  const sonicmoe::RouteOptions options = options_of(a);
  Array values = empty(logits, {2}, score_dtype(logits));
  Array counts = empty(logits, {logits.size(1)}, ScalarType::Long);
  const DeviceScope device(logits);
  const Scratch scratch(
      logits, sonicmoe::router_losses_scratch_bytes(logits.size(0), logits.size(1), device.exec()));
  sonicmoe::router_losses(options, view(logits, "logits"), view(a.ids, "ids"),
                          {view(values, "values"), view(counts, "tokens_per_expert")},
                          scratch.buffer(), device.exec());
  return {values, counts};
}

#define SONICMOE_LOSS_GRADIENT(ARGUMENT) \
  ARGUMENT(Array, dvalues)               \
  ARGUMENT(Array, tokens_per_expert)
struct LossGradient {
  SONICMOE_ARGUMENTS(SONICMOE_LOSS_GRADIENT)
};
using LossesBackwardCall = Joined<LossGradient, RouteCall>;

inline Array router_losses_backward(LossesBackwardCall& a) {
  Array dlogits = like_logits(a.logits);
  sonicmoe::router_losses_backward(
      options_of(a), view(a.logits, "logits"), view(a.tokens_per_expert, "tokens_per_expert"),
      view(a.dvalues, "dvalues"), view(dlogits, "dlogits"), DeviceScope(a.logits).exec());
  return dlogits;
}

}  // namespace sonicmoe_torch
