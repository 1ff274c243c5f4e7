// Low-rank factors through the C interface: the bits of the C++ interface, structs of the version
// before them, and refusals.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "sonicmoe/c_api.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t T = 9, d = 6, n = 10, E = 3, K = 2, kUp = 2, kDown = 3;

/// Aligned memory of floats.
struct Memory {
  explicit Memory(std::int64_t size)
      : bytes(size), storage(static_cast<std::size_t>(size / 4) + 64, -7.0f) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    data = storage.data() + (256 - address % 256) % 256 / 4;
  }
  Buffer buffer() const { return {data, bytes}; }
  std::int64_t bytes;
  std::vector<float> storage;
  float* data;
};

/// A tensor (E, rows, cols) or (T, cols) of normal values.
struct Array {
  Array(std::vector<std::int64_t> sizes, std::uint32_t seed)
      : shape(std::move(sizes)), values(static_cast<std::size_t>(count())) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& v : values) v = normal(random);
    c = smoe_tensor{};
    c.size = sizeof c;
    c.data = values.data();
    c.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      c.shape[i] = shape[i];
      c.stride[i] = stride;
      stride *= shape[i];
    }
  }
  Array(const Array&) = delete;
  std::int64_t count() const {
    std::int64_t product = 1;
    for (const std::int64_t size : shape) product *= size;
    return product;
  }
  Tensor cpp() {
    Tensor t{values.data(), DType::kF32, c.rank, {}, {}};
    std::copy_n(c.shape, 3, t.shape);
    std::copy_n(c.stride, 3, t.stride);
    return t;
  }
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  smoe_tensor c;
};

struct Factors {
  explicit Factors(std::uint32_t seed)
      : up_a({E, kUp, d}, seed),
        up_b({E, n, kUp}, seed + 1),
        gate_b({E, n, kUp}, seed + 2),
        down_a({E, kDown, n}, seed + 3),
        down_b({E, d, kDown}, seed + 4) {
    up.size = sizeof up;
    up.a = &up_a.c;
    up.b = &up_b.c;
    up.gate_b = &gate_b.c;
    down.size = sizeof down;
    down.a = &down_a.c;
    down.b = &down_b.c;
    down.scale = 0.5;
    c.size = sizeof c;
    c.up = &up;
    c.down = &down;
  }
  Lora cpp() {
    return {{up_a.cpp(), up_b.cpp(), gate_b.cpp()}, {down_a.cpp(), down_b.cpp(), {}, 0.5}};
  }
  Array up_a, up_b, gate_b, down_a, down_b;
  smoe_low_rank up{}, down{};
  smoe_lora c{};
};

struct Layer {
  Layer() {
    std::mt19937 random(9);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % E);
    c_ids = x.c;
    c_ids.dtype = SMOE_I32;
    c_ids.data = ids;
    c_ids.shape[1] = c_ids.stride[0] = K;
    routing.size = sizeof routing;
    routing.ids = &c_ids;
    routing.weights = &scores.c;
    weights.size = sizeof weights;
    weights.gate = &gate.c;
    weights.up = &up.c;
    weights.down = &down.c;
    problem.size = sizeof problem;
    problem.tokens = T;
    problem.hidden = d;
    problem.width = n;
    problem.experts = E;
    problem.top_k = K;
    problem.up_rank = kUp;
    problem.down_rank = kDown;
    forward.size = sizeof forward;
    forward.x = &x.c;
    forward.routing = &routing;
    forward.weights = &weights;
    forward.lora = &factors.c;
  }
  Problem cpp_problem() const {
    Problem p{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};
    p.up_rank = kUp;
    p.down_rank = kDown;
    return p;
  }
  Array x{{T, d}, 1}, dout{{T, d}, 2}, scores{{T, K}, 3};
  Array gate{{E, n, d}, 4}, up{{E, n, d}, 5}, down{{E, d, n}, 6};
  Factors factors{20};
  std::int32_t ids[T * K];
  smoe_tensor c_ids;
  smoe_routing routing{};
  smoe_weights weights{};
  smoe_problem problem{};
  smoe_forward_args forward{};
};

struct Results {
  Array out{{T, d}, 7}, dx{{T, d}, 8};
  Factors grads{40};

  std::vector<std::vector<float>> all() const {
    return {out.values,          dx.values,           grads.up_a.values,  grads.up_b.values,
            grads.gate_b.values, grads.down_a.values, grads.down_b.values};
  }
};

void by_cpp(Layer& l, Results& r) {
  const Problem p = l.cpp_problem();
  const Sizes f = moe_sizes(p, Pass::kForward), b = moe_sizes(p, Pass::kBackward);
  const Memory h(f.h_bytes), saved(f.saved_bytes);
  const Memory scratch(std::max(f.scratch_bytes, b.scratch_bytes));
  Routing routing;
  routing.ids = tensor2(l.ids, DType::kI32, T, K);
  routing.weights = l.scores.cpp();
  Weights weights;
  weights.gate = l.gate.cpp();
  weights.up = l.up.cpp();
  weights.down = l.down.cpp();
  ForwardArgs forward{l.x.cpp(),  routing,        weights,         r.out.cpp(),
                      h.buffer(), saved.buffer(), scratch.buffer()};
  forward.lora = l.factors.cpp();
  moe_forward(p, forward);
  BackwardArgs backward{l.x.cpp(),  routing,        weights,         l.dout.cpp(),
                        h.buffer(), saved.buffer(), scratch.buffer()};
  backward.dx = r.dx.cpp();
  backward.lora = forward.lora;
  backward.lora_grads = r.grads.cpp();
  moe_backward(p, backward);
}

void by_c(Layer& l, Results& r) {
  smoe_sizes f{}, b{};
  f.size = b.size = sizeof f;
  ASSERT_EQ(smoe_moe_sizes(&l.problem, SMOE_FORWARD, nullptr, &f), SMOE_OK);
  ASSERT_EQ(smoe_moe_sizes(&l.problem, SMOE_BACKWARD, nullptr, &b), SMOE_OK);
  const Memory h(f.h_bytes), saved(f.saved_bytes);
  const Memory scratch(std::max(f.scratch_bytes, b.scratch_bytes));
  l.forward.out = &r.out.c;
  l.forward.h = h.data;
  l.forward.h_bytes = h.bytes;
  l.forward.saved = saved.data;
  l.forward.saved_bytes = saved.bytes;
  l.forward.scratch = scratch.data;
  l.forward.scratch_bytes = scratch.bytes;
  ASSERT_EQ(smoe_moe_forward(&l.problem, &l.forward, nullptr), SMOE_OK) << smoe_last_error();
  smoe_backward_args backward{};
  backward.size = sizeof backward;
  backward.x = &l.x.c;
  backward.routing = &l.routing;
  backward.weights = &l.weights;
  backward.dout = &l.dout.c;
  backward.h = h.data;
  backward.h_bytes = h.bytes;
  backward.saved = saved.data;
  backward.saved_bytes = saved.bytes;
  backward.scratch = scratch.data;
  backward.scratch_bytes = scratch.bytes;
  backward.dx = &r.dx.c;
  backward.lora = &l.factors.c;
  backward.lora_grads = &r.grads.c;
  ASSERT_EQ(smoe_moe_backward(&l.problem, &backward, nullptr), SMOE_OK) << smoe_last_error();
}

TEST(CApiLora, GivesTheBitsOfCpp) {
  Layer l;
  Results cpp, c;
  by_cpp(l, cpp);
  by_c(l, c);
  EXPECT_EQ(cpp.all(), c.all());
  EXPECT_NE(c.grads.gate_b.values, Results().grads.gate_b.values) << "not written";
}

TEST(CApiLora, StructsOfTheVersionBeforeHaveNoFactors) {
  Layer l;
  l.problem.size = offsetof(smoe_problem, up_rank);
  l.forward.size = offsetof(smoe_forward_args, lora);
  smoe_sizes f{};
  f.size = sizeof f;
  ASSERT_EQ(smoe_moe_sizes(&l.problem, SMOE_INFERENCE, nullptr, &f), SMOE_OK);
  const Memory scratch(f.scratch_bytes);
  Array plain{{T, d}, 7};
  l.forward.out = &plain.c;
  l.forward.scratch = scratch.data;
  l.forward.scratch_bytes = scratch.bytes;
  EXPECT_EQ(smoe_moe_forward(&l.problem, &l.forward, nullptr), SMOE_OK) << smoe_last_error();
}

TEST(CApiLora, Refusals) {
  const auto expect = [](void (*spoil)(Layer&), const char* sentence) {
    Layer l;
    Array out{{T, d}, 7};
    l.forward.out = &out.c;
    spoil(l);
    EXPECT_EQ(smoe_moe_forward(&l.problem, &l.forward, nullptr), SMOE_INVALID_ARGUMENT);
    EXPECT_STREQ(smoe_last_error(), sentence);
  };
  expect([](Layer& l) { l.problem.f32_factors = 2; }, "problem.f32_factors is 2, must be 0 or 1");
  expect([](Layer& l) { l.problem.reserved = 1; }, "problem.reserved is 1, must be 0");
  expect([](Layer& l) { l.factors.up.reserved = 1; }, "lora.up.reserved is 1, must be 0");
  expect([](Layer& l) { l.factors.c.down = nullptr; },
         "lora.down.a has rank 0, must be 3: (E, r, n)");
  expect([](Layer& l) { l.factors.down.scale = NAN; }, "lora.down.scale is nan, must be finite");
}

}  // namespace
}  // namespace sonicmoe
