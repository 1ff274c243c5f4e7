// Negative controls of the router.
#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

// f changes the options of every call of the router.
template <class F>
Break with_router_options(F f) {
  return [f](const Implementation& sound) {
    Implementation broken = sound;
    broken.route = [=](RouteOptions o, const Tensor& logits, const Tensor& ids, const Tensor& w) {
      f(o);
      sound.route(o, logits, ids, w);
    };
    broken.route_backward = [=](RouteOptions o, const Tensor& logits, const Tensor& ids,
                                const Tensor& dweights, const Tensor& dlogits) {
      f(o);
      sound.route_backward(o, logits, ids, dweights, dlogits);
    };
    return broken;
  };
}

template <class F>
Break after_route(F f) {
  return [f](const Implementation& sound) {
    Implementation broken = sound;
    broken.route = [=](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                       const Tensor& weights) {
      sound.route(o, logits, ids, weights);
      f(sound.memory, ids, weights);
    };
    return broken;
  };
}

template <class F>
Break after_token_round(F f) {
  return [f](const Implementation& sound) {
    Implementation broken = sound;
    broken.token_round = [=](const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                             Buffer scratch) {
      sound.token_round(o, logits, pairs, scratch);
      f(sound.memory, pairs);
    };
    return broken;
  };
}

void swap_first_two(const Tensor& t) {
  std::vector<double> values = oracle::read(t);
  std::swap(values[0], values[1]);
  oracle::write(t, values);
}

// Makes every call of token_round use another rule; both rules have the same capacity.
Break with_rounding(RoundingMode mode) {
  return [mode](const Implementation& sound) {
    Implementation broken = sound;
    broken.token_round = [=](RoundOptions o, const Tensor& logits, const Pairs& pairs,
                             Buffer scratch) {
      o.mode = mode;
      sound.token_round(o, logits, pairs, scratch);
    };
    return broken;
  };
}

}  // namespace

std::vector<Control> controls_of_the_router() {
  const auto at = [](const char* name, Fault fault) {
    return std::vector<Expectation>{{name, fault}};
  };
  constexpr const char* kRoute = "route/t929_e64_k8_options10_normal/f16";
  constexpr const char* kTies = "route/t929_e64_k8_options15_few_values/bf16";
  constexpr const char* kBiased = "route/t300_e256_k8_options20_normal/f32";
  constexpr const char* kUp = "round/up_tile1/t440_e384_k8_options5_one_hot/f16";
  constexpr const char* kNearest = "round/nearest_tile128/t300_e256_k8_options0_few_values/bf16";
  constexpr const char* kScore = "round/score_tile3/t929_e64_k8_options0_empty_rows/bf16";
  constexpr const char* kSqrtSoftplus = "route/t929_e64_k8_options30_one_hot/bf16";
  constexpr const char* kBalanced = "round/balanced_tile3/t929_e64_k8_options20_specials/f32";
  return {
      {"two chosen experts are in the wrong order", at(kTies, Fault::kUnequal),
       after_route([](const Memory& memory, const Tensor& ids, const Tensor&) {
         edit(memory, ids, swap_first_two);
       })},
      {"one token's weights are zero", at(kRoute, Fault::kInaccurate),
       after_route([](const Memory& memory, const Tensor&, const Tensor& weights) {
         edit(memory, weights, zero_middle_row);
       })},
      {"weights are not renormalised", at(kRoute, Fault::kInaccurate),
       with_router_options([](RouteOptions& o) { o.renormalize = 0; })},
      {"the scale of the weights is ignored", at(kRoute, Fault::kInaccurate),
       with_router_options([](RouteOptions& o) { o.scale = 1.0; })},
      {"the bias does not select", at(kBiased, Fault::kUnequal),
       with_router_options([](RouteOptions& o) { o.bias = {}; })},
      {"groups are ignored", at(kBiased, Fault::kUnequal),
       with_router_options([](RouteOptions& o) { o.n_group = o.topk_group = 0; })},
      {"a write past the end of the ids", at(kRoute, Fault::kOutside),
       after_route([](const Memory& memory, const Tensor& ids, const Tensor&) {
         scribble(memory, ids.data, extent(ids) * dtype_bytes(ids.dtype));
       })},
      {"two neighbouring rows of dlogits are swapped", at(kRoute, Fault::kInaccurate),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.route_backward = [sound](const RouteOptions& o, const Tensor& logits,
                                         const Tensor& ids, const Tensor& dweights,
                                         const Tensor& dlogits) {
           sound.route_backward(o, logits, ids, dweights, dlogits);
           edit(sound.memory, dlogits, swap_middle_rows);
         };
         return broken;
       }},
      {"sqrt_softplus scores have no square root", at(kSqrtSoftplus, Fault::kInaccurate),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.route = [sound](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                                const Tensor& weights) {
           sound.route(o, logits, ids, weights);
           edit(sound.memory, weights, [&](const Tensor& t) {
             std::vector<double> values = oracle::read(t);
             for (double& v : values) v *= v / o.scale;
             oracle::write(t, values);
           });
         };
         return broken;
       }},
      {"sqrt_softplus scores have the gradient of sigmoids", at(kSqrtSoftplus, Fault::kInaccurate),
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.route_backward = [sound](RouteOptions o, const Tensor& logits, const Tensor& ids,
                                         const Tensor& dweights, const Tensor& dlogits) {
           o.score = ScoreMode::kSigmoid;
           sound.route_backward(o, logits, ids, dweights, dlogits);
         };
         return broken;
       }},
      {"score rounds up", at(kScore, Fault::kUnequal), with_rounding(RoundingMode::kUp)},
      {"balanced rounds by score", at(kBalanced, Fault::kUnequal),
       with_rounding(RoundingMode::kScore)},
      {"the tail of the pairs is not marked", at(kUp, Fault::kUnequal),
       after_token_round([](const Memory& memory, const Pairs& pairs) {
         edit(memory, pairs.expert,
              [](const Tensor& t) { zero_rows(t, t.shape[0] - 1, t.shape[0]); });
       })},
      {"two tokens of an expert are exchanged", at(kNearest, Fault::kUnequal),
       after_token_round([](const Memory& memory, const Pairs& pairs) {
         edit(memory, pairs.token, swap_first_two);
       })},
  };
}

}  // namespace sonicmoe::verify
