// Every refusal of low-rank factors, word for word.
#include <limits>

#include "checks_fixture.h"

namespace sonicmoe::test {
namespace {

constexpr std::int64_t T = 4, d = 8, n = 6, E = 3, K = 2, r = 2;

Lora all_factors(Memory& m, DType t) {
  return {{m.tensor(t, {E, r, d}), m.tensor(t, {E, n, r}), m.tensor(t, {E, n, r}), 2.0},
          {m.tensor(t, {E, r, n}), m.tensor(t, {E, d, r}), {}, 0.5}};
}

struct Common {
  Memory memory;
  Problem problem{
      .tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K, .up_rank = r, .down_rank = r};
  Exec exec;

  template <class Args>
  void fill(Args& args) {
    args.x = memory.tensor(DType::kF32, {T, d});
    args.routing.ids = memory.tensor(DType::kI32, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights.gate = memory.tensor(DType::kF32, {E, n, d});
    args.weights.up = memory.tensor(DType::kF32, {E, n, d});
    args.weights.down = memory.tensor(DType::kF32, {E, d, n});
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.lora = all_factors(memory, DType::kF32);
  }
};

struct Forward : Common {
  ForwardArgs args;

  Forward() {
    fill(args);
    args.out = memory.tensor(DType::kF32, {T, d});
  }
  void run() { moe_forward(problem, args, exec); }
};

struct Backward : Common {
  BackwardArgs args;

  Backward() {
    fill(args);
    args.dout = memory.tensor(DType::kF32, {T, d});
    args.lora_grads = all_factors(memory, DType::kF32);
  }
  void run() { moe_backward(problem, args, exec); }
};

TEST(ChecksLowRank, ProblemRefusals) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.problem.up_rank = -1; }, "up_rank is -1, must be at least 0"},
      {[](Forward& f) { f.problem.down_rank = -1; }, "down_rank is -1, must be at least 0"},
      {[](Forward& f) { f.problem.up_rank = std::int64_t{1} << 31; },
       "up_rank is 2147483648, must be below 2^31", Status::kOutOfRange},
      {[](Forward& f) {
         f.problem.experts = 1 << 20;
         f.problem.up_rank = std::int64_t{1} << 30;
       },
       "lora.up.a is 8 * 1048576 * 1073741824 * 8, must be below 2^55", Status::kOutOfRange},
      {[](Forward& f) {
         f.problem.dtype = DType::kF64;
         f.problem.f32_factors = true;
       },
       "f32_factors is true, must be false: a layer in f64 has factors in f64"},
  });
}

TEST(ChecksLowRank, ForwardRefusals) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  expect_refusals<Forward>({
      {[](Forward& f) { f.problem.up_rank = 0; },
       "lora.up.a is given, must be empty: the problem has rank 0 for this projection"},
      {[](Forward& f) { f.problem.down_rank = 3; },
       "lora.down.a has shape (3, 2, 6), must be (E, r, n) = (3, 3, 6)"},
      {[](Forward& f) { f.args.lora.up.b = {}; }, "lora.up.b has rank 0, must be 3: (E, n, r)"},
      {[](Forward& f) { f.args.lora.down.b.data = nullptr; },
       "lora.down.b is null, must point to (E, d, r) = (3, 8, 2) elements"},
      {[](Forward& f) { f.args.lora.up.gate_b = {}; },
       "lora.up.gate_b has rank 0, must be 3: (E, n, r)"},
      {[](Forward& f) {
         f.problem.activation.kind = ActivationKind::kSiLU;
         f.args.weights.gate = {};
       },
       "lora.up.gate_b is given, must be empty: silu has no gate"},
      {[](Forward& f) { f.args.lora.down.gate_b = f.args.lora.up.gate_b; },
       "lora.down.gate_b is given, must be empty: only the up-projection has a gate"},
      {[](Forward& f) { f.args.lora.up.a.dtype = DType::kBF16; }, "lora.up.a is bf16, must be f32"},
      {[](Forward& f) { f.args.lora.up.scale = nan; }, "lora.up.scale is nan, must be finite"},
      {[](Forward& f) { f.args.lora.down.scale = 1e39; },
       "lora.down.scale is 1e+39, must be finite in f32"},
      {[](Forward& f) { f.args.out.data = f.args.lora.down.b.data; },
       "out overlaps lora.down.b, must be memory of its own"},
  });
}

TEST(ChecksLowRank, BackwardRefusals) {
  expect_refusals<Backward>({
      {[](Backward& b) {
         b.problem.down_rank = 0;
         b.args.lora.down = {};
       },
       "lora_grads.down.a is given, must be empty: lora.down.a is not given"},
      {[](Backward& b) { b.args.lora_grads.up.a.dtype = DType::kBF16; },
       "lora_grads.up.a is bf16, must be f32"},
      {[](Backward& b) { b.args.lora_grads.up.b.shape[2] = 1; },
       "lora_grads.up.b has shape (3, 6, 1), must be (E, n, r) = (3, 6, 2)"},
      {[](Backward& b) { b.args.lora_grads.down.b.stride[2] = 0; },
       "lora_grads.down.b has strides (16, 2, 0) for shape (3, 8, 2), must not overlap itself "
       "because it is written"},
      {[](Backward& b) { b.args.lora_grads.down.gate_b = b.args.lora_grads.up.gate_b; },
       "lora_grads.down.gate_b is given, must be empty: only the up-projection has a gate"},
      {[](Backward& b) { b.args.lora_grads.up.gate_b.data = b.args.lora_grads.up.b.data; },
       "lora_grads.up.b overlaps lora_grads.up.gate_b, must be memory of its own"},
  });
}

TEST(ChecksLowRank, ExpertsMayShareAFactor) {
  Forward f;
  f.args.lora.up.a.stride[0] = 0;
  backend_calls = 0;
  f.run();
  EXPECT_EQ(backend_calls, 1);
}

// The dtype of factors and that of their gradients are independent of each other.
TEST(ChecksLowRank, FactorsInFp32OnABf16Layer) {
  Backward b;
  b.problem.dtype = DType::kBF16;
  for (Tensor* t : {&b.args.x, &b.args.dout, &b.args.weights.gate, &b.args.weights.up,
                    &b.args.weights.down, &b.args.lora_grads.up.a}) {
    t->dtype = DType::kBF16;
  }
  EXPECT_THROW(b.run(), Error);
  b.problem.f32_factors = true;
  backend_calls = 0;
  b.run();
  EXPECT_EQ(backend_calls, 1);
}

}  // namespace
}  // namespace sonicmoe::test
