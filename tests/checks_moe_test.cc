// Every refusal of the layer, word for word.
#include <cmath>
#include <limits>

#include "checks_fixture.h"

namespace sonicmoe::test {
namespace {

constexpr std::int64_t T = 4, d = 8, n = 6, E = 3, K = 2;

Weights all_weights(Memory& m, DType t) {
  return {m.tensor(t, {E, n, d}), m.tensor(t, {E, n, d}), m.tensor(t, {E, d, n}),
          m.tensor(t, {E, n}),    m.tensor(t, {E, n}),    m.tensor(t, {E, d})};
}

struct Forward {
  Memory memory;
  Problem problem{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};
  ForwardArgs args;
  Exec exec;

  Forward() {
    args.x = memory.tensor(DType::kF32, {T, d});
    args.routing.ids = memory.tensor(DType::kI32, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights = all_weights(memory, DType::kF32);
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.out = memory.tensor(DType::kF32, {T, d});
  }
  void run() { moe_forward(problem, args, exec); }

  void become_silu() {
    problem.activation.kind = ActivationKind::kSiLU;
    args.weights.gate = {};
    args.weights.b_gate = {};
  }
  void become_pairs() {
    problem.form = RoutingForm::kPairs;
    problem.top_k = 0;
    problem.capacity = 5;
    args.routing = {};
    args.routing.token = memory.tensor(DType::kI32, {5});
    args.routing.expert = memory.tensor(DType::kI64, {5});
    args.routing.weights = memory.tensor(DType::kF32, {5});
  }
  void become_grouped() {
    problem.form = RoutingForm::kGrouped;
    problem.top_k = 0;
    args.routing = {};
    args.routing.row_begin = memory.tensor(DType::kI64, {E});
    args.routing.row_count = memory.tensor(DType::kI64, {E});
  }
};

TEST(ChecksMoe, ProblemRefusals) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refusals<Forward>({
      {[](Forward& f) { f.problem.form = static_cast<RoutingForm>(3); },
       "form is 3, must be in 0 to 2"},
      {[](Forward& f) { f.problem.dtype = static_cast<DType>(-1); },
       "dtype is -1, must be in 0 to 5"},
      {[](Forward& f) { f.problem.dtype = DType::kI32; },
       "dtype is i32, must be f32 or bf16 or f16 or f64"},
      {[](Forward& f) { f.problem.activation.kind = static_cast<ActivationKind>(13); },
       "activation is 13, must be in 0 to 12"},
      {[](Forward& f) { f.problem.activation.alpha = nan; },
       "activation alpha is nan, must be finite"},
      {[](Forward& f) { f.problem.activation.limit = HUGE_VAL; },
       "activation limit is inf, must be finite"},
      {[](Forward& f) { f.problem.activation.alpha = 1.702; },
       "activation alpha is 1.702 for swiglu, must be 0: only swiglu_oai or situ has it"},
      {[](Forward& f) { f.problem.activation.limit = 7; },
       "activation limit is 7 for swiglu, must be 0: only swiglu_oai or swiglu_clamped or situ or "
       "swiglu_step has it"},
      {[](Forward& f) { f.problem.activation.limit = 1e-9; },
       "activation limit is 1e-09 for swiglu, must be 0: only swiglu_oai or swiglu_clamped or situ "
       "or "
       "swiglu_step has it"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSwiGLUOai, 1.0, -7}; },
       "activation limit is -7, must be above 0, or 0 for the default"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSwiGLUClamped, 0.0, -10}; },
       "activation limit is -10, must be above 0, or 0 for the default"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSwiGLUClamped, 0.0, nan}; },
       "activation limit is nan, must be finite"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSwiGLUClamped, 1.702, 0.0}; },
       "activation alpha is 1.702 for swiglu_clamped, must be 0: only swiglu_oai or situ has it"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSiTU, -4.0, 0.0}; },
       "activation alpha is -4 for situ, must be 1e-9 to 1e9, or 0 for the default"},
      {[](Forward& f) { f.problem.activation = {ActivationKind::kSiTU, 0.0, 2e9}; },
       "activation limit is 2e+09 for situ, must be 1e-9 to 1e9, or 0 for the default"},
      {[](Forward& f) { f.problem.tokens = -1; }, "tokens is -1, must be at least 0"},
      {[](Forward& f) { f.problem.hidden = 0; }, "hidden is 0, must be at least 1"},
      {[](Forward& f) { f.problem.width = 0; }, "width is 0, must be at least 1"},
      {[](Forward& f) { f.problem.experts = 0; }, "experts is 0, must be at least 1"},
      {[](Forward& f) { f.problem.top_k = 0; }, "top_k is 0, must be at least 1"},
      {[](Forward& f) { f.problem.capacity = 8; },
       "capacity is 8, must be 0: only the pairs form has it"},
      {[](Forward& f) {
         f.become_grouped();
         f.problem.top_k = 1;
       },
       "top_k is 1, must be 0: only the ids form has it"},
      {[](Forward& f) {
         f.become_pairs();
         f.problem.capacity = -5;
       },
       "capacity is -5, must be at least 0"},
  });
}

TEST(ChecksMoe, CountsThatOverflow) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.problem.tokens = 1LL << 31; }, "tokens is 2147483648, must be below 2^31",
       Status::kOutOfRange},
      {[](Forward& f) { f.problem.experts = 1LL << 31; },
       "experts is 2147483648, must be below 2^31", Status::kOutOfRange},
      {[](Forward& f) { f.problem.tokens = 1LL << 30; },
       "row capacity C is 2147483648, must be below 2^31", Status::kOutOfRange},
      {[](Forward& f) { f.problem.top_k = INT64_MAX; },
       "top_k is 9223372036854775807, must be below 2^31", Status::kOutOfRange},
      {[](Forward& f) { f.problem.hidden = 1LL << 60; },
       "tokens * hidden in bytes is 4 * 1152921504606846976 * 4, must be below 2^55",
       Status::kOutOfRange},
      {[](Forward& f) { f.problem.hidden = 1LL << 50; },
       "C * hidden in bytes is 8 * 1125899906842624 * 4, must be below 2^55", Status::kOutOfRange},
      {[](Forward& f) { f.problem.width = 1LL << 49; },
       "C * width in bytes is 8 * 8 * 562949953421312, must be below 2^55", Status::kOutOfRange},
      {[](Forward& f) { f.problem.width = 1LL << 48; },
       "experts * width * hidden in bytes is 8 * 3 * 281474976710656 * 8, must be below 2^55",
       Status::kOutOfRange},
      {[](Forward& f) { f.args.x.stride[0] = 1LL << 61; },
       "x has strides (2305843009213693952, 1), must span fewer than 2^55 bytes",
       Status::kOutOfRange},
  });
}

// A loop over a dimension of one element also adds its stride once, after the element. So the
// stride must not overflow.
TEST(ChecksMoe, StridesOfOneElementThatOverflow) {
  const auto one_expert = [](Forward& f) {
    f.problem.experts = 1;
    for (Tensor Weights::* w : {&Weights::gate, &Weights::up, &Weights::down, &Weights::b_gate,
                                &Weights::b_up, &Weights::b_down}) {
      (f.args.weights.*w).shape[0] = 1;
    }
  };
  expect_refusals<Forward>({
      {[&](Forward& f) {
         one_expert(f);
         f.args.weights.up.stride[0] = 1LL << 62;
       },
       "weights.up has strides (4611686018427387904, 8, 1), must span fewer than 2^55 bytes",
       Status::kOutOfRange},
      {[&](Forward& f) {
         one_expert(f);
         f.args.weights.b_down.stride[0] = INT64_MIN;
       },
       "weights.b_down has strides (-9223372036854775808, 1), must span fewer than 2^55 bytes",
       Status::kOutOfRange},
      {[](Forward& f) {
         f.problem.tokens = 0;
         f.args.x.shape[0] = 0;
         f.args.x.stride[0] = -(1LL << 62);
       },
       "x has strides (-4611686018427387904, 1), must span fewer than 2^55 bytes",
       Status::kOutOfRange},
  });
}

std::string sizes_refusal(const Problem& problem) {
  try {
    const Sizes s = moe_sizes(problem, Pass::kBackward);
    return std::to_string(s.scratch_bytes) + " bytes";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::kOutOfRange) << e.what();
    return e.what();
  }
}

TEST(ChecksMoe, SizesThatOverflow) {
  EXPECT_EQ(sizes_refusal({.tokens = 1,
                           .hidden = (1LL << 61) - 1,
                           .width = 1,
                           .experts = 1,
                           .top_k = 1,
                           .activation = {ActivationKind::kReLU}}),
            "tokens * hidden in bytes is 1 * 2305843009213693951 * 4, must be below 2^55");
  EXPECT_EQ(sizes_refusal({.tokens = 0,
                           .hidden = (1LL << 61) - 1,
                           .width = 1,
                           .experts = 1,
                           .top_k = 1,
                           .activation = {ActivationKind::kReLU}}),
            "tokens * hidden in bytes is 0 * 2305843009213693951 * 4, must be below 2^55");
  EXPECT_EQ(sizes_refusal({.tokens = 1,
                           .hidden = (1LL << 31) - 8,
                           .width = (1LL << 30) + 4,
                           .experts = 1,
                           .capacity = 1LL << 30,
                           .form = RoutingForm::kPairs,
                           .dtype = DType::kBF16,
                           .activation = {ActivationKind::kReLU}}),
            "C * hidden in bytes is 1073741824 * 2147483640 * 2, must be below 2^55");
  EXPECT_EQ(sizes_refusal({.tokens = 0, .hidden = 1, .width = 1, .experts = 1, .top_k = INT64_MAX}),
            "top_k is 9223372036854775807, must be below 2^31");
}

TEST(ChecksMoe, TensorRefusals) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.args.x.rank = 3; }, "x has rank 3, must be 2: (T, d)"},
      {[](Forward& f) { f.args.x.shape[1] = 7; }, "x has shape (4, 7), must be (T, d) = (4, 8)"},
      {[](Forward& f) { f.args.x.dtype = DType::kBF16; }, "x is bf16, must be f32"},
      {[](Forward& f) { f.args.x.dtype = static_cast<DType>(77); }, "x is unknown, must be f32"},
      {[](Forward& f) { f.args.x.data = nullptr; },
       "x is null, must point to (T, d) = (4, 8) elements"},
      {[](Forward& f) { f.args.out.data = nullptr; },
       "out is null, must point to (T, d) = (4, 8) elements"},
      {[](Forward& f) { f.args.out.dtype = DType::kF64; }, "out is f64, must be f32"},
      {[](Forward& f) { f.args.out.stride[0] = 0; },
       "out has strides (0, 1) for shape (4, 8), must not overlap itself because it is written"},
      {[](Forward& f) { f.args.out.stride[0] = -7; },
       "out has strides (-7, 1) for shape (4, 8), must not overlap itself because it is written"},
      {[](Forward& f) { f.args.weights.up.stride[0] = 0; },
       "weights.up has strides (0, 8, 1) for shape (3, 6, 8), must not overlap itself because its "
       "gradient has a value for every element"},
      {[](Forward& f) { f.args.weights.up = {}; }, "weights.up has rank 0, must be 3: (E, n, d)"},
      {[](Forward& f) { f.args.weights.up.data = nullptr; },
       "weights.up is null, must point to (E, n, d) = (3, 6, 8) elements"},
      {[](Forward& f) { f.args.weights.gate = {}; },
       "weights.gate has rank 0, must be 3: (E, n, d)"},
      {[](Forward& f) { std::swap(f.args.weights.down, f.args.weights.up); },
       "weights.up has shape (3, 8, 6), must be (E, n, d) = (3, 6, 8)"},
      {[](Forward& f) { f.args.weights.down.dtype = DType::kF16; },
       "weights.down is f16, must be f32"},
      {[](Forward& f) { f.args.weights.b_up = {}; },
       "weights.b_gate is given without weights.b_up, must be given together for swiglu"},
      {[](Forward& f) { f.args.weights.b_gate = {}; },
       "weights.b_up is given without weights.b_gate, must be given together for swiglu"},
      {[](Forward& f) { f.args.weights.b_down.shape[1] = n; },
       "weights.b_down has shape (3, 6), must be (E, d) = (3, 8)"},
      {[](Forward& f) { f.problem.activation.kind = ActivationKind::kReLU2; },
       "weights.gate is given, must be empty: relu2 has no gate"},
      {[](Forward& f) {
         f.problem.activation.kind = ActivationKind::kReLU2;
         f.args.weights.gate = {};
       },
       "weights.b_gate is given, must be empty: relu2 has no gate"},
  });
}

TEST(ChecksMoe, RoutingRefusals) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.args.routing.ids.dtype = DType::kF32; },
       "routing.ids is f32, must be i32 or i64"},
      {[](Forward& f) { f.args.routing.ids.shape[1] = 3; },
       "routing.ids has shape (4, 3), must be (T, K) = (4, 2)"},
      {[](Forward& f) { f.args.routing.weights = {}; },
       "routing.weights has rank 0, must be 2: (T, K)"},
      {[](Forward& f) { f.args.routing.weights.dtype = DType::kF64; },
       "routing.weights is f64, must be f32"},
      {[](Forward& f) { f.args.routing.token = f.args.routing.ids; },
       "routing.token is given, must be empty: it belongs to the pairs form"},
      {[](Forward& f) { f.args.routing.row_count = f.args.routing.ids; },
       "routing.row_count is given, must be empty: it belongs to the grouped form"},
      {[](Forward& f) {
         f.become_pairs();
         f.args.routing.ids = f.memory.tensor(DType::kI32, {T, K});
       },
       "routing.ids is given, must be empty: it belongs to the ids form"},
      {[](Forward& f) {
         f.become_pairs();
         f.args.routing.expert.shape[0] = 6;
       },
       "routing.expert has shape (6), must be (C) = (5)"},
      {[](Forward& f) {
         f.become_pairs();
         f.args.routing.weights.shape[0] = 4;
       },
       "routing.weights has shape (4), must be (C) = (5)"},
      {[](Forward& f) {
         f.become_grouped();
         f.args.routing.row_begin.dtype = DType::kF64;
       },
       "routing.row_begin is f64, must be i32 or i64"},
      {[](Forward& f) {
         f.become_grouped();
         f.args.routing.row_count.shape[0] = E + 1;
       },
       "routing.row_count has shape (4), must be (E) = (3)"},
  });
}

TEST(ChecksMoe, ExecAndBufferRefusals) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.exec.backend = static_cast<Backend>(2); },
       "backend is 2, must be in 0 to 1"},
      {[](Forward& f) { f.exec.num_threads = -1; }, "num_threads is -1, must be at least 0"},
      {[](Forward& f) { f.args.scratch = {}; }, "scratch is missing, must have at least 768 bytes",
       Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.scratch.bytes = 767; },
       "scratch has 767 bytes, must have at least 768 bytes", Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.h.bytes = 0; }, "h has 0 bytes, must have at least 1024 bytes",
       Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.h = {}; }, "h is missing, must have at least 1024 bytes",
       Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.saved = {}; }, "saved is missing, must have at least 512 bytes",
       Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.saved.data = static_cast<std::byte*>(f.args.saved.data) + 32; },
       "saved begins 32 bytes past a multiple of 64, must be aligned to 64 bytes"},
  });
}

TEST(ChecksMoe, MemoryLentTwiceIsRefused) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.args.out.data = f.args.x.data; },
       "out overlaps x, must be memory of its own"},
      {[](Forward& f) { f.args.saved.data = f.args.h.data; },
       "h overlaps saved, must be memory of its own"},
      {[](Forward& f) { f.args.scratch.data = static_cast<std::byte*>(f.args.h.data) + 256; },
       "h overlaps scratch, must be memory of its own"},
      {[](Forward& f) { f.args.scratch.data = f.args.out.data; },
       "scratch overlaps out, must be memory of its own"},
      {[](Forward& f) { f.args.saved.data = f.args.weights.down.data; },
       "saved overlaps weights.down, must be memory of its own"},
      {[](Forward& f) { f.args.out.data = static_cast<float*>(f.args.x.data) + d; },
       "out overlaps x, must be memory of its own"},
      {[](Forward& f) {  // reversed: the first element is the last in memory
         f.args.x.data = static_cast<float*>(f.args.x.data) + (T - 1) * d;
         f.args.x.stride[0] = -d;
         f.args.scratch.data = static_cast<float*>(f.args.x.data) - (T - 1) * d;
       },
       "scratch overlaps x, must be memory of its own"},
  });
}

// Columns of one matrix, and rows of one gradient that alternate.
TEST(ChecksMoe, TensorsMayInterleave) {
  Forward f;
  Tensor both = f.memory.tensor(DType::kF32, {T, 2 * d});
  both.shape[1] = d;
  f.args.x = f.args.out = both;
  f.args.out.data = static_cast<float*>(both.data) + d;
  backend_calls = 0;
  f.run();
  EXPECT_EQ(backend_calls, 1);
  f.args.out.data = static_cast<float*>(both.data) + d - 1;
  EXPECT_THROW(f.run(), Error);
}

TEST(ChecksMoe, ABuildWithoutCudaRefusesIt) {
  if (find_backend(Backend::kCuda) != nullptr) GTEST_SKIP() << "this build has CUDA";
  const std::string refusal =
      std::string("backend is cuda, must be cpu: this build has no cuda backend (") +
      cuda_absence() + ")";
  expect_refusals<Forward>({
      {[](Forward& f) { f.exec.backend = Backend::kCuda; }, refusal.c_str(), Status::kUnsupported},
  });
}

struct Backward {
  Memory memory;
  Problem problem{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};
  BackwardArgs args;
  Exec exec;

  Backward() {
    args.x = memory.tensor(DType::kF32, {T, d});
    args.routing.ids = memory.tensor(DType::kI64, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights = all_weights(memory, DType::kF32);
    args.dout = memory.tensor(DType::kF32, {T, d});
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.dx = memory.tensor(DType::kF32, {T, d});
    args.dweights = memory.tensor(DType::kF32, {T, K});
    args.grads = all_weights(memory, DType::kF32);
  }
  void run() { moe_backward(problem, args, exec); }
};

TEST(ChecksMoe, BackwardRefusals) {
  expect_refusals<Backward>({
      {[](Backward& b) { b.problem.experts = 0; }, "experts is 0, must be at least 1"},
      {[](Backward& b) { b.exec.num_threads = -2; }, "num_threads is -2, must be at least 0"},
      {[](Backward& b) { b.args.x.shape[0] = 5; }, "x has shape (5, 8), must be (T, d) = (4, 8)"},
      {[](Backward& b) { b.args.dout = {}; }, "dout has rank 0, must be 2: (T, d)"},
      {[](Backward& b) { b.args.routing.ids.data = nullptr; },
       "routing.ids is null, must point to (T, K) = (4, 2) elements"},
      {[](Backward& b) { b.args.grad_mode = static_cast<GradMode>(2); },
       "grad_mode is 2, must be in 0 to 1"},
      {[](Backward& b) { b.args.weights.b_down = {}; },
       "grads.b_down is given, must be empty: weights.b_down is not given"},
      {[](Backward& b) { b.args.grads.up.dtype = DType::kBF16; }, "grads.up is bf16, must be f32"},
      {[](Backward& b) { b.args.grads.down.dtype = DType::kF64; },
       "grads.down is f64, must be f32"},
      {[](Backward& b) { b.args.grads.gate.stride[0] = 0; },
       "grads.gate has strides (0, 8, 1) for shape (3, 6, 8), must not overlap itself because it "
       "is written"},
      {[](Backward& b) { b.args.grads.b_up.shape[0] = 2; },
       "grads.b_up has shape (2, 6), must be (E, n) = (3, 6)"},
      {[](Backward& b) { b.args.dx.shape[1] = 9; }, "dx has shape (4, 9), must be (T, d) = (4, 8)"},
      {[](Backward& b) { b.args.dweights.dtype = DType::kBF16; }, "dweights is bf16, must be f32"},
      {[](Backward& b) { b.args.dweights.stride[1] = 0; },
       "dweights has strides (2, 0) for shape (4, 2), must not overlap itself because it is "
       "written"},
      {[](Backward& b) { b.args.saved.bytes = 1; },
       "saved has 1 bytes, must have at least 512 bytes", Status::kWorkspaceTooSmall},
      {[](Backward& b) { b.args.h = {}; }, "h is missing, must have at least 1024 bytes",
       Status::kWorkspaceTooSmall},
  });
}

TEST(ChecksMoe, GradientsLentTwiceAreRefused) {
  expect_refusals<Backward>({
      {[](Backward& b) { b.args.dx.data = b.args.dout.data; },
       "dx overlaps dout, must be memory of its own"},
      {[](Backward& b) { b.args.grads.up.data = b.args.grads.gate.data; },
       "grads.gate overlaps grads.up, must be memory of its own"},
      {[](Backward& b) { b.args.dweights.data = b.args.routing.weights.data; },
       "dweights overlaps routing.weights, must be memory of its own"},
      {[](Backward& b) { b.args.scratch.data = b.args.h.data; },
       "h overlaps scratch, must be memory of its own"},
      {[](Backward& b) { b.args.scratch.data = b.args.grads.down.data; },
       "scratch overlaps grads.down, must be memory of its own"},
  });
}

TEST(ChecksMoe, GateAndUpOfOneGradientMayAlternate) {
  Backward b;
  Tensor both = b.memory.tensor(DType::kF32, {E, 2 * n, d});
  both.shape[1] = n;
  both.stride[1] = 2 * d;
  b.args.grads.gate = b.args.grads.up = both;
  b.args.grads.up.data = static_cast<float*>(both.data) + d;
  backend_calls = 0;
  b.run();
  EXPECT_EQ(backend_calls, 1);
  b.args.grads.up.data = static_cast<float*>(both.data) + d - 1;
  EXPECT_THROW(b.run(), Error);
}

TEST(ChecksMoe, WithoutTokensRoutingWeightsNeedNoMemory) {
  Backward b;
  b.problem.tokens = 0;
  for (Tensor* t : {&b.args.x, &b.args.dout, &b.args.dx, &b.args.dweights, &b.args.routing.ids,
                    &b.args.routing.weights}) {
    t->shape[0] = 0;
  }
  b.args.routing.weights.data = nullptr;
  backend_calls = 0;
  b.run();
  EXPECT_EQ(backend_calls, 1);
}

TEST(ChecksMoe, RowWeightGradientsNeedRowWeights) {
  Backward b;
  b.problem.form = RoutingForm::kGrouped;
  b.problem.top_k = 0;
  b.args.routing = {};
  b.args.routing.row_begin = b.memory.tensor(DType::kI32, {E});
  b.args.routing.row_count = b.memory.tensor(DType::kI32, {E});
  b.args.dweights = b.memory.tensor(DType::kF32, {T});
  try {
    b.run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "dweights is given, must be empty: routing.weights is not given");
  }
}

TEST(ChecksMoe, WeightGradientsMayBeF32BesideBF16) {
  Backward b;
  b.problem.dtype = DType::kBF16;
  for (Tensor* t : {&b.args.x, &b.args.dout, &b.args.dx, &b.args.weights.gate, &b.args.weights.up,
                    &b.args.weights.down, &b.args.weights.b_gate, &b.args.weights.b_up,
                    &b.args.weights.b_down}) {
    t->dtype = DType::kBF16;
  }
  EXPECT_NO_THROW(b.run());
  b.args.grads.up.dtype = DType::kBF16;
  EXPECT_NO_THROW(b.run());
  b.args.grad_mode = GradMode::kAccumulate;
  try {
    b.run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "grads.up is bf16, must be f32");
  }
}

TEST(ChecksMoe, FormsAndOptionalArgumentsAreAccepted) {
  const std::vector<std::function<void(Forward&)>> variants = {
      [](Forward& f) { f.become_silu(); },
      [](Forward& f) { f.become_pairs(); },
      [](Forward& f) { f.become_grouped(); },
      [](Forward& f) { f.args.weights.b_gate = f.args.weights.b_up = f.args.weights.b_down = {}; },
      [](Forward& f) { f.args.h = f.args.saved = {}; },                        // inference
      [](Forward& f) { f.args.x.stride[0] = 0; },                              // expanded input
      [](Forward& f) { f.args.out.stride[0] = 1, f.args.out.stride[1] = T; },  // transposed
      [](Forward& f) {
        f.problem.top_k = 5;
        f.args.routing.ids = f.memory.tensor(DType::kI32, {T, 5});
        f.args.routing.weights = f.memory.tensor(DType::kF32, {T, 5});
      },  // repeats
      [](Forward& f) {
        f.problem.tokens = 0;
        f.args.x = f.args.out = tensor2(nullptr, DType::kF32, 0, d);
        f.args.routing.ids = tensor2(nullptr, DType::kI32, 0, K);
        f.args.routing.weights = tensor2(nullptr, DType::kF32, 0, K);
      },
  };
  for (std::size_t i = 0; i < variants.size(); ++i) {
    SCOPED_TRACE(i);
    Forward f;
    variants[i](f);
    backend_calls = 0;
    EXPECT_NO_THROW(f.run());
    EXPECT_EQ(backend_calls, 1);
  }
}

TEST(ChecksMoe, CapacityFollowsTheForm) {
  Forward ids, pairs, grouped;
  pairs.become_pairs();
  grouped.become_grouped();
  EXPECT_EQ(row_capacity(ids.problem), T * K);
  EXPECT_EQ(row_capacity(pairs.problem), 5);
  EXPECT_EQ(row_capacity(grouped.problem), T);
  EXPECT_THROW(moe_sizes(ids.problem, static_cast<Pass>(3)), Error);
}

struct Query : Forward {
  HViews run() { return h_views(problem, args.weights, args.h, exec); }
};

TEST(ChecksMoe, ViewsOfH) {
  Query q;
  q.args.weights.down = q.args.weights.b_up = {};  // not looked at
  const HViews views = q.run();
  for (const Tensor& t : {views.gate, views.up}) {
    EXPECT_EQ(t.rank, 2);
    EXPECT_EQ(t.dtype, DType::kF32);
    EXPECT_EQ(std::vector(t.shape, t.shape + 2), (std::vector<std::int64_t>{T * K, n}));
    EXPECT_EQ(std::vector(t.stride, t.stride + 2), (std::vector<std::int64_t>{2 * n, 2}));
  }
  EXPECT_EQ(views.gate.data, q.args.h.data);
  EXPECT_EQ(views.up.data, static_cast<float*>(q.args.h.data) + 1);
  q.args.h = {};
  EXPECT_EQ(q.run().up.data, nullptr);
  EXPECT_EQ(q.run().up.stride[0], 2 * n);
}

TEST(ChecksMoe, ViewsOfHRefusals) {
  expect_refusals<Query>({
      {[](Query& q) { q.problem.tokens = -1; }, "tokens is -1, must be at least 0"},
      {[](Query& q) { q.exec.num_threads = -2; }, "num_threads is -2, must be at least 0"},
      {[](Query& q) { q.args.weights.gate.data = nullptr; },
       "weights.gate is null, must point to (E, n, d) = (3, 6, 8) elements"},
      {[](Query& q) { q.args.weights.up.dtype = DType::kBF16; }, "weights.up is bf16, must be f32"},
      {[](Query& q) { q.args.h.bytes = 7; }, "h has 7 bytes, must have at least 1024 bytes",
       Status::kWorkspaceTooSmall},
  });
}

}  // namespace
}  // namespace sonicmoe::test
