// Low-rank factors through the C interface: the bits of the C++ interface, structs of the version
// before them, and refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>

#include "capi_layer.h"

namespace sonicmoe {
namespace {

using testing::Array;
using testing::CapiLayer;

constexpr std::int64_t d = 6, n = 10, E = 3, kUp = 2, kDown = 3;

Problem small_problem() {
  Problem p{.tokens = 9, .hidden = d, .width = n, .experts = E, .top_k = 2};
  p.up_rank = kUp;
  p.down_rank = kDown;
  return p;
}

struct Factors {
  explicit Factors(std::uint32_t seed)
      : up_a(DType::kF32, {E, kUp, d}, seed),
        up_b(DType::kF32, {E, n, kUp}, seed + 1),
        gate_b(DType::kF32, {E, n, kUp}, seed + 2),
        down_a(DType::kF32, {E, kDown, n}, seed + 3),
        down_b(DType::kF32, {E, d, kDown}, seed + 4) {
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
  Lora cpp() const { return {{up_a.cpp, up_b.cpp, gate_b.cpp}, {down_a.cpp, down_b.cpp, {}, 0.5}}; }
  bool operator==(const Factors& other) const {
    return up_a == other.up_a && up_b == other.up_b && gate_b == other.gate_b &&
           down_a == other.down_a && down_b == other.down_b;
  }
  Array up_a, up_b, gate_b, down_a, down_b;
  smoe_low_rank up{}, down{};
  smoe_lora c{};
};

struct Layer : CapiLayer {
  Layer() : CapiLayer(small_problem()) {
    forward.lora = backward.lora = factors.cpp();
    backward.lora_grads = grads.cpp();
    c_forward.lora = c_backward.lora = &factors.c;
    c_backward.lora_grads = &grads.c;
  }
  Factors factors{20}, grads{40};
};

TEST(CApiLora, GivesTheBitsOfCpp) {
  Layer cpp, c;
  moe_forward(cpp.problem, cpp.forward);
  moe_backward(cpp.problem, cpp.backward);
  ASSERT_EQ(smoe_moe_forward(&c.c_problem, &c.c_forward, nullptr), SMOE_OK) << smoe_last_error();
  ASSERT_EQ(smoe_moe_backward(&c.c_problem, &c.c_backward, nullptr), SMOE_OK) << smoe_last_error();
  EXPECT_TRUE(cpp.out == c.out);
  EXPECT_TRUE(cpp.dx == c.dx);
  EXPECT_TRUE(cpp.grads == c.grads);
  EXPECT_FALSE(c.grads.gate_b == Factors(40).gate_b) << "not written";
}

TEST(CApiLora, SizesAreThoseOfCpp) {
  Layer l;
  for (const auto& [pass, expected] :
       {std::pair{SMOE_FORWARD, l.of_forward}, std::pair{SMOE_BACKWARD, l.of_backward}}) {
    smoe_sizes sizes{};
    sizes.size = sizeof sizes;
    ASSERT_EQ(smoe_moe_sizes(&l.c_problem, pass, nullptr, &sizes), SMOE_OK);
    EXPECT_EQ(sizes.h_bytes, expected.h_bytes);
    EXPECT_EQ(sizes.saved_bytes, expected.saved_bytes);
    EXPECT_EQ(sizes.scratch_bytes, expected.scratch_bytes);
  }
}

TEST(CApiLora, StructsOfTheVersionBeforeHaveNoFactors) {
  Layer l;
  l.c_problem.size = offsetof(smoe_problem, up_rank);
  l.c_forward.size = offsetof(smoe_forward_args, lora);
  EXPECT_EQ(smoe_moe_forward(&l.c_problem, &l.c_forward, nullptr), SMOE_OK) << smoe_last_error();
  EXPECT_FALSE(l.out == Layer().out) << "not written";
}

TEST(CApiLora, Refusals) {
  const auto expect = [](void (*spoil)(Layer&), const char* sentence) {
    Layer l;
    spoil(l);
    EXPECT_EQ(smoe_moe_forward(&l.c_problem, &l.c_forward, nullptr), SMOE_INVALID_ARGUMENT);
    EXPECT_STREQ(smoe_last_error(), sentence);
  };
  expect([](Layer& l) { l.c_problem.f32_factors = 2; }, "problem.f32_factors is 2, must be 0 or 1");
  expect([](Layer& l) { l.c_problem.reserved = 1; }, "problem.reserved is 1, must be 0");
  expect([](Layer& l) { l.factors.up.reserved = 1; }, "lora.up.reserved is 1, must be 0");
  expect([](Layer& l) { l.factors.c.down = nullptr; },
         "lora.down.a has rank 0, must be 3: (E, r, n)");
  expect([](Layer& l) { l.factors.down.scale = NAN; }, "lora.down.scale is nan, must be finite");
}

}  // namespace
}  // namespace sonicmoe
