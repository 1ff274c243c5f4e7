// Every refusal of Precision::kFp8, word for word, and the rule of auto_precision().
#include <limits>

#include "checks_fixture.h"

namespace sonicmoe::test {
namespace {

constexpr std::int64_t T = 4, d = 128, n = 128, E = 1, K = 1;

Problem fp8_problem() {
  Problem p{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};
  p.dtype = DType::kBF16;
  p.precision = Precision::kFp8;
  return p;
}

Weights weights_in(Memory& m) {
  return {m.tensor(DType::kBF16, {E, n, d}),
          m.tensor(DType::kBF16, {E, n, d}),
          m.tensor(DType::kBF16, {E, d, n}),
          {},
          {},
          {}};
}

struct Forward {
  Memory memory;
  Problem problem = fp8_problem();
  ForwardArgs args;

  Forward() {
    args.x = memory.tensor(DType::kBF16, {T, d});
    args.routing.ids = memory.tensor(DType::kI32, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights = weights_in(memory);
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.out = memory.tensor(DType::kBF16, {T, d});
    args.fp8_weights = memory.buffer(fp8_weights_bytes(problem));
  }
  void run() { moe_forward(problem, args); }
};

TEST(ChecksFp8, ForwardRefusals) {
  expect_refusals<Forward>({
      {[](Forward& c) { c.problem.precision = static_cast<Precision>(2); },
       "precision is 2, must be in 0 to 1"},
      {[](Forward& c) { c.problem.kept_h = static_cast<KeptH>(-1); },
       "kept_h is -1, must be in 0 to 1"},
      {[](Forward& c) { c.problem.dtype = DType::kF16; }, "dtype is f16, must be bf16 for fp8",
       Status::kUnsupported},
      {[](Forward& c) { c.problem.hidden = 136; },
       "hidden is 136, must be a multiple of 64 for fp8", Status::kUnsupported},
      {[](Forward& c) { c.problem.width = 96; }, "width is 96, must be a multiple of 64 for fp8",
       Status::kUnsupported},
      {[](Forward& c) { c.args.fp8_weights = {}; },
       "fp8_weights is missing, must have at least 98816 bytes", Status::kWorkspaceTooSmall},
      {[](Forward& c) { c.args.fp8_weights.bytes -= 1; },
       "fp8_weights has 98815 bytes, must have at least 98816 bytes", Status::kWorkspaceTooSmall},
      {[](Forward& c) {
         c.args.fp8_weights = c.memory.buffer(98816 + 64);
         c.args.fp8_weights.data = static_cast<char*>(c.args.fp8_weights.data) + 4;
       },
       "fp8_weights begins 4 bytes past a multiple of 64, must be aligned to 64 bytes"},
      {[](Forward& c) { c.problem.precision = Precision::kTensors; },
       "fp8_weights is given, must be empty: precision is not fp8"},
      {[](Forward& c) { c.args.out.data = c.args.fp8_weights.data; },
       "out overlaps fp8_weights, must be memory of its own"},
      {[](Forward& c) { c.args.h.data = c.args.fp8_weights.data; },
       "h overlaps fp8_weights, must be memory of its own"},
  });
}

struct Backward {
  Memory memory;
  Problem problem = fp8_problem();
  BackwardArgs args;

  Backward() {
    args.x = memory.tensor(DType::kBF16, {T, d});
    args.routing.ids = memory.tensor(DType::kI32, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights = weights_in(memory);
    args.dout = memory.tensor(DType::kBF16, {T, d});
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.fp8_weights = memory.buffer(fp8_weights_bytes(problem));
    // All 22 other arguments of a call: the list that finds overlaps has room for them.
    args.dx = memory.tensor(DType::kBF16, {T, d});
    args.dweights = memory.tensor(DType::kF32, {T, K});
    args.weights.b_gate = memory.tensor(DType::kBF16, {E, n});
    args.weights.b_up = memory.tensor(DType::kBF16, {E, n});
    args.weights.b_down = memory.tensor(DType::kBF16, {E, d});
    args.grads = weights_in(memory);
    args.grads.b_gate = memory.tensor(DType::kBF16, {E, n});
    args.grads.b_up = memory.tensor(DType::kBF16, {E, n});
    args.grads.b_down = memory.tensor(DType::kBF16, {E, d});
  }
  void run() { moe_backward(problem, args); }
};

TEST(ChecksFp8, BackwardRefusals) {
  expect_refusals<Backward>({
      {[](Backward& c) { c.args.fp8_weights = {}; },
       "fp8_weights is missing, must have at least 98816 bytes", Status::kWorkspaceTooSmall},
      {[](Backward& c) { c.problem.precision = Precision::kTensors; },
       "fp8_weights is given, must be empty: precision is not fp8"},
      {[](Backward& c) { c.args.grads.down.data = c.args.fp8_weights.data; },
       "grads.down overlaps fp8_weights, must be memory of its own"},
      {[](Backward& c) { c.args.scratch.data = c.args.fp8_weights.data; },
       "scratch overlaps fp8_weights, must be memory of its own"},
  });
}

struct Quantise {
  Memory memory;
  Problem problem = fp8_problem();
  Weights weights = weights_in(memory);
  Buffer out = memory.buffer(fp8_weights_bytes(problem));

  void run() { quantize_weights(problem, weights, out); }
};

TEST(ChecksFp8, QuantizeWeightsRefusals) {
  expect_refusals<Quantise>({
      {[](Quantise& c) { c.problem.precision = Precision::kTensors; },
       "precision is tensors, must be fp8: only fp8 has quantised weights"},
      {[](Quantise& c) { c.problem.hidden = 32; }, "hidden is 32, must be a multiple of 64 for fp8",
       Status::kUnsupported},
      {[](Quantise& c) { c.weights.down = {}; }, "weights.down has rank 0, must be 3: (E, d, n)"},
      {[](Quantise& c) { c.weights.gate.dtype = DType::kF32; },
       "weights.gate is f32, must be bf16"},
      {[](Quantise& c) { c.out.bytes = 100; },
       "fp8_weights has 100 bytes, must have at least 98816 bytes", Status::kWorkspaceTooSmall},
      {[](Quantise& c) { c.out.data = c.weights.up.data; },
       "fp8_weights overlaps weights.up, must be memory of its own"},
  });
}

struct Views {
  Memory memory;
  Problem problem = fp8_problem();
  Weights weights = weights_in(memory);

  Views() { problem.kept_h = KeptH::kTensors; }
  void run() { h_views(problem, weights, {}); }
};

TEST(ChecksFp8, ViewsOfHRefusals) {
  expect_refusals<Views>({
      {[](Views& c) { c.problem.kept_h = KeptH::kPrecision; },
       "H is kept in fp8, must be kept in bf16 to have views", Status::kUnsupported},
  });
}

struct Exchanged {
  Memory memory;
  Problem problem{.tokens = T, .hidden = 8, .width = 8, .experts = 2, .top_k = 1};

  Exchanged() { problem.dtype = DType::kBF16; }
  void run() {
    // The fake exchange is known by its shape alone.
    auto& exchange = *static_cast<Exchange*>(memory.buffer(64).data);
    exchange_sizes(exchange, problem, 8, Pass::kForward, {});
    ++backend_calls;
  }
};

TEST(ChecksFp8, ExchangeRefusals) {
  expect_refusals<Exchanged>({
      {[](Exchanged& c) { c.problem.precision = Precision::kFp8; },
       "hidden is 8, must be a multiple of 64 for fp8", Status::kUnsupported},
  });
}

TEST(ChecksFp8, WeightsBytesAreThoseOfBothOrientations) {
  Problem p = fp8_problem();
  EXPECT_EQ(fp8_weights_bytes(p), 6 * n * d + 2 * 256);
  p.activation.kind = ActivationKind::kReLU2;
  p.experts = 5;
  EXPECT_EQ(fp8_weights_bytes(p), 4 * 5 * n * d + 2 * 256);
  // Codes have whole blocks.
  p.hidden = p.width = 64;
  EXPECT_EQ(fp8_weights_bytes(p), 4 * 5 * 128 * 128 + 2 * 256);
  p.precision = Precision::kTensors;
  EXPECT_EQ(fp8_weights_bytes(p), 0);
}

// The fake backend says that its fp8 is fast.
TEST(ChecksFp8, AutoTakesFp8FromANumberOfRowsOn) {
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  Problem p = fp8_problem();
  p.hidden = 4096;
  p.width = 1536;
  p.experts = 16;
  p.top_k = 4;
  const std::int64_t least = auto_fp8_rows(p);
  ASSERT_LT(least, kNever);
  ASSERT_EQ(least % (p.experts * p.top_k), 0);
  p.tokens = least / p.top_k;
  for (const Precision asked : {Precision::kTensors, Precision::kFp8}) {
    p.precision = asked;
    EXPECT_EQ(auto_precision(p), Precision::kFp8);
  }
  p.tokens -= 1;
  EXPECT_EQ(auto_precision(p), Precision::kTensors);
  p.tokens = least;
  for (const auto& spoil :
       {+[](Problem& q) { q.dtype = DType::kF16; }, +[](Problem& q) { q.hidden = 4096 + 64; },
        +[](Problem& q) { q.width = 128; }, +[](Problem& q) { q.hidden = 640; }}) {
    Problem q = p;
    spoil(q);
    q.precision = Precision::kTensors;
    EXPECT_EQ(auto_fp8_rows(q), kNever);
    EXPECT_EQ(auto_precision(q), Precision::kTensors);
  }
  for (const auto& [hidden, width] : {std::pair{2048, 512}, {4096, 256}}) {
    p.hidden = hidden;
    p.width = width;
    EXPECT_EQ(auto_fp8_rows(p), least) << hidden << " " << width;
  }
  for (const auto& [hidden, width] : {std::pair{2048, 384}, {768, 256}}) {
    p.hidden = hidden;
    p.width = width;
    EXPECT_EQ(auto_fp8_rows(p), least / 640 * 1280) << hidden << " " << width;
  }
}

}  // namespace
}  // namespace sonicmoe::test
