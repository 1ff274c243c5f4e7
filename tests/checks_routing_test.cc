// Every refusal of routing, rounding, expert choice and the losses, word for word.
#include <cmath>

#include "checks_fixture.h"

namespace sonicmoe::test {
namespace {

constexpr std::int64_t T = 6, E = 4, K = 2;

struct Route {
  Memory memory;
  RouteOptions options{.top_k = K};
  Tensor logits = memory.tensor(DType::kBF16, {T, E});
  Tensor ids = memory.tensor(DType::kI64, {T, K});
  Tensor weights = memory.tensor(DType::kF32, {T, K});
  Exec exec;
  void run() { route(options, logits, ids, weights, exec); }
};

TEST(ChecksRouting, OptionRefusals) {
  expect_refusals<Route>({
      {[](Route& r) { r.options.score = static_cast<ScoreMode>(4); },
       "score is 4, must be in 0 to 3"},
      {[](Route& r) { r.options.renormalize = 2; }, "renormalize is 2, must be in 0 to 1"},
      {[](Route& r) { r.options.scale = HUGE_VAL; }, "scale is inf, must be finite"},
      {[](Route& r) { r.options.scale = -0x1p128; },
       "scale is -3.40282367e+38, must be finite in f32"},
      {[](Route& r) { r.options.top_k = 0; }, "top_k is 0, must be at least 1"},
      {[](Route& r) { r.options.top_k = 5; }, "top_k is 5, must be at most E = 4"},
      {[](Route& r) { r.options.n_group = -1; }, "n_group is -1, must be at least 0"},
      {[](Route& r) { r.options.topk_group = 1; }, "topk_group is 1, must be 0 without n_group"},
      {[](Route& r) { r.options.n_group = 3; }, "n_group is 3, must divide E = 4"},
      {[](Route& r) { r.options.n_group = 2; }, "topk_group is 0, must be at least 1"},
      {[](Route& r) { r.options.n_group = 2, r.options.topk_group = 3; },
       "topk_group is 3, must be at most n_group = 2"},
      {[](Route& r) { r.options.n_group = 4, r.options.topk_group = 1; },
       "top_k is 2, must be at most topk_group * E / n_group = 1"},
      {[](Route& r) { r.options.bias = r.memory.tensor(DType::kF32, {E}); },
       "bias is given, must be empty: softmax_after_topk has no selection bias"},
      {[](Route& r) {
         r.options.score = ScoreMode::kSigmoid;
         r.options.bias = r.memory.tensor(DType::kF32, {E + 1});
       },
       "bias has shape (5), must be (E) = (4)"},
      {[](Route& r) {
         r.options.score = ScoreMode::kSigmoid;
         r.options.bias = r.memory.tensor(DType::kBF16, {E});
       },
       "bias is bf16, must be f32"},
  });
}

TEST(ChecksRouting, RouteTensorRefusals) {
  expect_refusals<Route>({
      {[](Route& r) { r.exec.num_threads = -1; }, "num_threads is -1, must be at least 0"},
      {[](Route& r) { r.logits.rank = 1; }, "logits has rank 1, must be 2: (T, E)"},
      {[](Route& r) { r.logits.shape[0] = -1; }, "T of logits is -1, must be at least 0"},
      {[](Route& r) { r.logits.shape[1] = 0; }, "E of logits is 0, must be at least 1"},
      {[](Route& r) { r.logits.dtype = DType::kI64; },
       "logits is i64, must be f32 or bf16 or f16 or f64"},
      {[](Route& r) { r.logits.data = nullptr; },
       "logits is null, must point to (T, E) = (6, 4) elements"},
      {[](Route& r) { r.logits.shape[0] = 1LL << 31; }, "T is 2147483648, must be below 2^31",
       Status::kOutOfRange},
      {[](Route& r) { r.logits.shape[0] = 1LL << 30; },
       "tokens * top_k is 2147483648, must be below 2^31", Status::kOutOfRange},
      {[](Route& r) { r.ids.shape[1] = 1; }, "ids has shape (6, 1), must be (T, K) = (6, 2)"},
      {[](Route& r) { r.ids.dtype = DType::kF32; }, "ids is f32, must be i32 or i64"},
      {[](Route& r) { r.ids.stride[0] = 1; },
       "ids has strides (1, 1) for shape (6, 2), must not overlap itself because it is written"},
      {[](Route& r) { r.weights.dtype = DType::kBF16; }, "weights is bf16, must be f32"},
      {[](Route& r) { r.logits.dtype = DType::kF64; }, "weights is f32, must be f64"},
  });
}

struct RouteBackward {
  Memory memory;
  RouteOptions options{.top_k = K};
  Tensor logits = memory.tensor(DType::kF32, {T, E});
  Tensor ids = memory.tensor(DType::kI32, {T, K});
  Tensor dweights = memory.tensor(DType::kF32, {T, K});
  Tensor dlogits = memory.tensor(DType::kF32, {T, E});
  void run() { route_backward(options, logits, ids, dweights, dlogits); }
};

TEST(ChecksRouting, RouteBackwardRefusals) {
  expect_refusals<RouteBackward>({
      {[](RouteBackward& r) { r.options.scale = NAN; }, "scale is nan, must be finite"},
      {[](RouteBackward& r) { r.ids.shape[0] = 5; },
       "ids has shape (5, 2), must be (T, K) = (6, 2)"},
      {[](RouteBackward& r) { r.dweights.dtype = DType::kF64; }, "dweights is f64, must be f32"},
      {[](RouteBackward& r) { r.dlogits.dtype = DType::kBF16; }, "dlogits is bf16, must be f32"},
      {[](RouteBackward& r) { r.dlogits.stride[1] = 0; },
       "dlogits has strides (4, 0) for shape (6, 4), must not overlap itself because it is "
       "written"},
  });
}

struct Rounding {
  Memory memory;
  RoundOptions options{.route = {.top_k = K}, .tile = 4};
  Tensor logits = memory.tensor(DType::kF32, {T, E});
  std::int64_t C = T * K + E * 4 / 2;
  Pairs pairs{memory.tensor(DType::kI32, {C}), memory.tensor(DType::kI32, {C}),
              memory.tensor(DType::kF32, {C}), memory.tensor(DType::kI64, {E + 1})};
  Buffer scratch = memory.buffer(kFakeRoundScratch);
  void run() { token_round(options, logits, pairs, scratch); }
};

TEST(ChecksRouting, TokenRoundRefusals) {
  expect_refusals<Rounding>({
      {[](Rounding& r) { r.options.tile = 0; }, "tile is 0, must be at least 1"},
      {[](Rounding& r) { r.options.tile = 1LL << 61; },
       "experts * tile is 4 * 2305843009213693952, must be below 2^63", Status::kOutOfRange},
      {[](Rounding& r) { r.options.mode = static_cast<RoundingMode>(6); },
       "mode is 6, must be in 0 to 5"},
      {[](Rounding& r) { r.options.route.top_k = 9; }, "top_k is 9, must be at most E = 4"},
      {[](Rounding& r) { r.options.tile = 1 << 30; },
       "row capacity C is 2147483660, must be below 2^31", Status::kOutOfRange},
      {[](Rounding& r) { r.options.mode = RoundingMode::kDown; },
       "pairs.token has shape (20), must be (C) = (12)"},
      {[](Rounding& r) { r.pairs.expert.dtype = DType::kI64; }, "pairs.expert is i64, must be i32"},
      {[](Rounding& r) { r.pairs.weight = {}; }, "pairs.weight has rank 0, must be 1: (C)"},
      {[](Rounding& r) { r.pairs.offsets.shape[0] = 4; },
       "pairs.offsets has shape (4), must be (E+1) = (5)"},
      {[](Rounding& r) { r.pairs.token.stride[0] = 0; },
       "pairs.token has strides (0) for shape (20), must not overlap itself because it is "
       "written"},
      {[](Rounding& r) { r.scratch = {}; }, "scratch is missing, must have at least 640 bytes",
       Status::kWorkspaceTooSmall},
      {[](Rounding& r) { r.scratch.bytes = 639; },
       "scratch has 639 bytes, must have at least 640 bytes", Status::kWorkspaceTooSmall},
  });
}

struct RoundingBackward : Rounding {
  Tensor dweight = memory.tensor(DType::kF32, {C});
  Tensor dlogits = memory.tensor(DType::kF32, {T, E});
  void run() { token_round_backward(options, logits, pairs, dweight, dlogits, scratch); }
};

TEST(ChecksRouting, TokenRoundBackwardRefusals) {
  expect_refusals<RoundingBackward>({
      {[](RoundingBackward& r) { r.options.tile = -4; }, "tile is -4, must be at least 1"},
      {[](RoundingBackward& r) { r.pairs.token.data = nullptr; },
       "pairs.token is null, must point to (C) = (20) elements"},
      {[](RoundingBackward& r) { r.dweight.shape[0] = 19; },
       "dweight has shape (19), must be (C) = (20)"},
      {[](RoundingBackward& r) { r.dlogits.shape[1] = 3; },
       "dlogits has shape (6, 3), must be (T, E) = (6, 4)"},
      {[](RoundingBackward& r) { r.scratch.data = static_cast<std::byte*>(r.scratch.data) + 8; },
       "scratch begins 8 bytes past a multiple of 64, must be aligned to 64 bytes"},
  });
}

TEST(ChecksRouting, RoundCapacityByMode) {
  RoundOptions o{.route = {.top_k = 2}, .tile = 4};
  const auto capacity = [&](RoundingMode mode, std::int64_t tokens) {
    o.mode = mode;
    return round_capacity(o, tokens, 4);
  };
  EXPECT_EQ(capacity(RoundingMode::kNearest, 100), 208);
  EXPECT_EQ(capacity(RoundingMode::kDown, 100), 200);
  EXPECT_EQ(capacity(RoundingMode::kUp, 100), 216);
  EXPECT_EQ(capacity(RoundingMode::kUp, 6), 24);  // every token at every expert
  EXPECT_EQ(capacity(RoundingMode::kScore, 100), 216);
  EXPECT_EQ(capacity(RoundingMode::kStochastic, 100), 216);
  EXPECT_EQ(capacity(RoundingMode::kBalanced, 100), 216);
  EXPECT_EQ(capacity(RoundingMode::kBalanced, 0), 0);
  EXPECT_THROW(capacity(RoundingMode::kUp, -1), Error);
  EXPECT_THROW(round_scratch_bytes(o, 1LL << 31, 4), Error);
}

struct Choice {
  Memory memory;
  Tensor logits = memory.tensor(DType::kF64, {T, E});
  std::int64_t capacity = 3;
  Pairs pairs{memory.tensor(DType::kI32, {E * 3}), memory.tensor(DType::kI32, {E * 3}),
              memory.tensor(DType::kF64, {E * 3}), memory.tensor(DType::kI64, {E + 1})};
  void run() { expert_choice(logits, capacity, pairs); }
};

TEST(ChecksRouting, ExpertChoiceRefusals) {
  expect_refusals<Choice>({
      {[](Choice& c) { c.capacity = 0; }, "capacity is 0, must be at least 1"},
      {[](Choice& c) { c.capacity = 99; }, "pairs.token has shape (12), must be (C) = (24)"},
      {[](Choice& c) { c.pairs.weight.dtype = DType::kF32; }, "pairs.weight is f32, must be f64"},
      {[](Choice& c) { c.pairs.offsets.dtype = DType::kI32; }, "pairs.offsets is i32, must be i64"},
  });
}

struct ChoiceBackward : Choice {
  Tensor dweight = memory.tensor(DType::kF64, {E * 3});
  Tensor dlogits = memory.tensor(DType::kF64, {T, E});
  void run() { expert_choice_backward(logits, pairs, dweight, dlogits); }
};

TEST(ChecksRouting, ExpertChoiceBackwardRefusals) {
  expect_refusals<ChoiceBackward>({
      {[](ChoiceBackward& c) { c.pairs.token.shape[0] = 13; },
       "pairs.token has 13 entries, must have E * min(capacity, T), a multiple of E = 4"},
      {[](ChoiceBackward& c) { c.pairs.expert.shape[0] = 8; },
       "pairs.expert has shape (8), must be (C) = (12)"},
      {[](ChoiceBackward& c) { c.dweight.dtype = DType::kF32; }, "dweight is f32, must be f64"},
      {[](ChoiceBackward& c) { c.dlogits.data = nullptr; },
       "dlogits is null, must point to (T, E) = (6, 4) elements"},
  });
}

struct Losses {
  Memory memory;
  RouteOptions options{.top_k = K};
  Tensor logits = memory.tensor(DType::kF32, {T, E});
  Tensor ids = memory.tensor(DType::kI64, {T, K});
  RouterLosses out{memory.tensor(DType::kF32, {2}), memory.tensor(DType::kI64, {E})};
  void run() { router_losses(options, logits, ids, out); }
};

TEST(ChecksRouting, LossesRefusals) {
  expect_refusals<Losses>({
      {[](Losses& l) { l.ids.dtype = DType::kF16; }, "ids is f16, must be i32 or i64"},
      {[](Losses& l) { l.out.values.shape[0] = 3; }, "values has shape (3), must be (2) = (2)"},
      {[](Losses& l) { l.out.values.dtype = DType::kF64; }, "values is f64, must be f32"},
      {[](Losses& l) { l.out.tokens_per_expert.dtype = DType::kI32; },
       "tokens_per_expert is i32, must be i64"},
      {[](Losses& l) { l.out.values = l.memory.tensor(DType::kF32, {4, 2}); },
       "S of values is 4, must divide T = 6"},
      {[](Losses& l) { l.out.values = l.memory.tensor(DType::kF32, {3, 2}); },
       "tokens_per_expert has rank 1, must be 2: (S, E)"},
  });
}

// Each output in turn overlaps another argument of the call.
TEST(ChecksRouting, MemoryLentTwiceIsRefused) {
  expect_refusals<Route>({
      {[](Route& r) { r.weights.data = r.ids.data; },
       "ids overlaps weights, must be memory of its own"},
      {[](Route& r) { r.ids.data = static_cast<std::byte*>(r.logits.data) + 8; },
       "ids overlaps logits, must be memory of its own"},
  });
  expect_refusals<RouteBackward>({
      {[](RouteBackward& r) { r.dlogits.data = r.logits.data; },
       "dlogits overlaps logits, must be memory of its own"},
  });
  expect_refusals<Rounding>({
      {[](Rounding& r) {
         r.pairs.expert.data = static_cast<std::int32_t*>(r.pairs.token.data) + 1;
       },
       "pairs.token overlaps pairs.expert, must be memory of its own"},
      {[](Rounding& r) { r.scratch.data = r.pairs.offsets.data; },
       "scratch overlaps pairs.offsets, must be memory of its own"},
  });
  expect_refusals<Losses>({
      {[](Losses& l) { l.out.values.data = l.logits.data; },
       "values overlaps logits, must be memory of its own"},
  });
}

struct LossesBackward : Losses {
  Tensor dvalues = memory.tensor(DType::kF32, {2});
  Tensor dlogits = memory.tensor(DType::kF32, {T, E});
  void run() { router_losses_backward(options, logits, out.tokens_per_expert, dvalues, dlogits); }
};

TEST(ChecksRouting, LossesBackwardRefusals) {
  expect_refusals<LossesBackward>({
      {[](LossesBackward& l) { l.options.top_k = 7; }, "top_k is 7, must be at most E = 4"},
      {[](LossesBackward& l) { l.out.tokens_per_expert.shape[0] = 5; },
       "tokens_per_expert has shape (5), must be (E) = (4)"},
      {[](LossesBackward& l) { l.dvalues.data = nullptr; },
       "dvalues is null, must point to (2) = (2) elements"},
      {[](LossesBackward& l) { l.dlogits.dtype = DType::kF16; }, "dlogits is f16, must be f32"},
  });
}

TEST(ChecksRouting, RoundScratchThatOverflows) {
  const RoundOptions options{.route = {.top_k = 1}, .tile = 1, .mode = RoundingMode::kDown};
  try {
    FAIL() << round_scratch_bytes(options, INT32_MAX, INT32_MAX) << " bytes";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::kOutOfRange);
    EXPECT_STREQ(e.what(),
                 "tokens * experts in bytes is 2147483647 * 2147483647 * 8, must be below 2^55");
  }
}

// The CPU needs no scratch. All backends refuse the same queries.
TEST(ChecksRouting, ScratchQueries) {
  using Query = std::int64_t (*)(std::int64_t, std::int64_t, const Exec&);
  const auto sentence = [](Query query, std::int64_t rows, std::int64_t experts) -> std::string {
    try {
      return std::to_string(query(rows, experts, {})) + " bytes";
    } catch (const Error& e) {
      return e.what();
    }
  };
  for (const Query query : {&expert_choice_scratch_bytes, &router_losses_scratch_bytes}) {
    EXPECT_EQ(sentence(query, 6, 4), "0 bytes");
    EXPECT_EQ(sentence(query, -1, 4), "tokens is -1, must be at least 0");
    EXPECT_EQ(sentence(query, 6, 0), "experts is 0, must be at least 1");
    EXPECT_EQ(sentence(query, 1LL << 31, 4), "tokens is 2147483648, must be below 2^31");
    EXPECT_EQ(sentence(query, INT32_MAX, INT32_MAX),
              "tokens * experts in bytes is 2147483647 * 2147483647 * 8, must be below 2^55");
  }
  EXPECT_EQ(sentence(&grouped_gemm_scratch_bytes, 6, 4), "0 bytes");
  EXPECT_EQ(sentence(&grouped_gemm_scratch_bytes, -3, 4), "rows is -3, must be at least 0");
}

}  // namespace
}  // namespace sonicmoe::test
