// The passes of the CUDA backend without a GPU. The lists of steps contain everything that an
// engine needs: an engine that reads only these lists passes the harness.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/engines.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/views.h"
#include "stand_in.h"
#include "verify/harness.h"

namespace sonicmoe {
namespace {

using cuda::GateLayout;
using testing::Overlap;
using testing::stand_in_engine;

Problem small_problem(ActivationKind kind) {
  Problem p;
  p.tokens = 37;
  p.hidden = 24;
  p.width = 40;
  p.experts = 5;
  p.top_k = 3;
  p.dtype = DType::kBF16;
  p.activation.kind = kind;
  return p;
}

void expect_passed(const verify::CaseResult& r) {
  EXPECT_TRUE(r.passed()) << r.name << ": " << verify::fault_name(r.fault) << ": " << r.message;
}

/// An order of backward's steps.
struct Schedule {
  const char* name;
  const cuda::Engine& (*engine)();
  Overlap overlap;
};

class Passes : public ::testing::TestWithParam<Schedule> {
 protected:
  verify::Implementation implementation() const {
    return testing::implementation_of(GetParam().engine(), GetParam().overlap);
  }
  void expect_passed_by(const char* filter, std::size_t least) {
    const auto results = verify::verify({verify::Extent::kQuick, filter}, implementation());
    EXPECT_GE(results.size(), least) << "too few cases of " << filter;
    for (const auto& r : results) expect_passed(r);
  }
};

TEST_P(Passes, GiveTheLayer) {
  expect_passed_by("layout/", 24);
  expect_passed_by("grads/", 34);
  expect_passed_by("lora/grads", 20);
  expect_passed_by("lora/frozen", 4);
  expect_passed_by("lora/only", 6);
  if (GetParam().overlap != Overlap::kNone) return;
  expect_passed_by("routing/", 80);
  expect_passed_by("bias/bf16/", 11);
  expect_passed_by("lora/routing", 40);
  expect_passed_by("lora/layout", 12);
}

/// Every gradient alone, and all but one. n = 64 makes dW_gate and dW_up one product.
TEST_P(Passes, GiveTheGradientsAskedFor) {
  const std::vector<std::string> all = {"dx",    "dweights", "dgate", "dup",
                                        "ddown", "db_gate",  "db_up", "db_down"};
  struct Form {
    const char* name;
    verify::Layout layout;
    std::int64_t width;
    ActivationKind activation = ActivationKind::kReGLU;
  };
  for (const Form& form : {Form{"concatenated", verify::Layout::kConcatenated, 40},
                           Form{"paired", verify::Layout::kPaired, 40},
                           Form{"separate", verify::Layout::kSeparate, 64},
                           Form{"plain", verify::Layout::kSeparate, 64, ActivationKind::kReLU}}) {
    for (const std::string& name : all) {
      verify::Case c;
      c.problem = small_problem(form.activation);
      c.problem.width = form.width;
      c.data = verify::Data::kIntegers;
      c.layout = form.layout;
      c.bias = true;
      c.wanted = {name};
      c.name = "only " + name + ", " + form.name;
      expect_passed(verify::run_case(c, implementation()));
      c.wanted = all;
      std::erase(c.wanted, name);
      c.name = "all but " + name + ", " + form.name;
      expect_passed(verify::run_case(c, implementation()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Schedules, Passes,
    ::testing::Values(
        Schedule{"AsListed", &stand_in_engine, Overlap::kNone},
        Schedule{"SwappedEven", &stand_in_engine, Overlap::kEven},
        Schedule{"SwappedOdd", &stand_in_engine, Overlap::kOdd},
        Schedule{"InputGradFirst", &testing::input_grad_first_engine, Overlap::kNone},
        Schedule{"InputGradFirstSwappedEven", &testing::input_grad_first_engine, Overlap::kEven},
        Schedule{"InputGradFirstSwappedOdd", &testing::input_grad_first_engine, Overlap::kOdd}),
    [](const ::testing::TestParamInfo<Schedule>& info) { return info.param.name; });

/// An array in scratch and the size that its comment in passes.h states.
struct Array {
  const char* name;
  const void* data;
  std::int64_t bytes;
};

void expect_apart(std::vector<Array> arrays, const std::byte* base, std::int64_t bytes) {
  std::sort(arrays.begin(), arrays.end(), [](auto& a, auto& b) { return a.data < b.data; });
  const std::byte* end = base;
  for (const Array& array : arrays) {
    const auto* begin = static_cast<const std::byte*>(array.data);
    EXPECT_GE(begin, end) << array.name << " begins inside the array before it";
    EXPECT_EQ((begin - base) % 256, 0) << array.name;
    end = begin + array.bytes;
  }
  EXPECT_LE(end, base + bytes) << arrays.back().name << " ends behind the scratch";
}

TEST(Scratch, ItsArraysHaveTheirSizesAndLieApart) {
  for (const ActivationKind kind : {ActivationKind::kSwiGLU, ActivationKind::kSiLU}) {
    Problem p = small_problem(kind);
    p.form = RoutingForm::kPairs;  // whose metadata need scratch
    p.capacity = p.tokens * p.top_k;
    p.top_k = 0;
    const std::int64_t rows = row_capacity(p);
    std::vector<std::byte> memory(1 << 20);
    const auto forward = cuda::forward_scratch(p, Pass::kInference, memory.data());
    expect_apart({{"a", forward.a.elements.data, rows * p.width * 2},
                  {"y", forward.y, rows * p.hidden * 2},
                  {"counters", forward.counters, cuda::kCounterBytes},
                  {"metadata", forward.metadata, cuda::metadata_scratch(p)},
                  {"saved", forward.saved, cuda::metadata_layout(p, nullptr).bytes}},
                 memory.data(), forward.bytes);
    const auto backward = cuda::backward_scratch(p, stand_in_engine(), memory.data());
    const std::int64_t parts = stand_in_engine().score_tiles(p);
    EXPECT_EQ(parts, 3);  // 40 columns, 16 of them a part
    expect_apart({{"dh", backward.dh, gate_factor(kind) * rows * p.width * 2},
                  {"a", backward.a, rows * p.width * 2},
                  {"dx", backward.dx, rows * p.hidden * 2},
                  {"row_weights", backward.row_weights, rows * 4},
                  {"score_parts", backward.score_parts, rows * parts * 4},
                  {"experts", backward.experts, p.experts * 16},
                  {"counters", backward.counters, cuda::kCounterBytes}},
                 memory.data(), backward.bytes);
  }
}

TEST(HRows, LieAsTheWeightsDo) {
  Problem p = small_problem(ActivationKind::kSwiGLU);
  std::vector<std::uint16_t> memory(static_cast<std::size_t>(p.experts * 2 * p.width * p.hidden));
  Weights w;
  w.gate = tensor3(memory.data(), p.dtype, p.experts, p.width, p.hidden);
  w.gate.stride[0] *= 2;
  w.up = w.gate;
  w.up.data = memory.data() + p.width * p.hidden;
  Tensor h = cuda::h_rows(p, w, nullptr);
  EXPECT_EQ(cuda::gate_layout(p, w), GateLayout::kConcatenated);
  EXPECT_EQ(h.rank, 3);
  EXPECT_EQ(h.shape[1], 2);
  EXPECT_EQ(h.stride[0], 2 * p.width);
  w.gate.stride[1] = 2;
  w.gate.stride[2] = 2 * p.width;
  w.up = w.gate;
  w.up.data = memory.data() + 1;
  h = cuda::h_rows(p, w, nullptr);
  EXPECT_EQ(cuda::gate_layout(p, w), GateLayout::kInterleaved);
  EXPECT_EQ(h.rank, 2);
  EXPECT_EQ(h.shape[1], 2 * p.width);
  p.activation.kind = ActivationKind::kSiLU;
  EXPECT_EQ(cuda::gate_layout(p, w), GateLayout::kNone);
  EXPECT_EQ(cuda::h_rows(p, w, nullptr).stride[0], p.width);
}

TEST(Engines, DeclareWhatTheyServe) {
  Problem p;
  p.hidden = 24;
  p.width = 20;
  p.experts = 2;
  p.dtype = DType::kF64;
  EXPECT_NE(cuda::refusal(p, stand_in_engine()).find("must be f32"), std::string::npos);
  p.dtype = DType::kBF16;
  EXPECT_EQ(cuda::refusal(p, stand_in_engine()), "");
  for (const cuda::Engine* engine : cuda::engines()) {
    p.width = 20;
    EXPECT_NE(cuda::refusal(p, *engine).find("multiples of 8"), std::string::npos) << engine->name;
    p.width = 16;
    EXPECT_EQ(cuda::refusal(p, *engine), "") << engine->name;
    p.tokens = (1LL << 30) - (1LL << 17);
    p.top_k = 2;
    EXPECT_EQ(cuda::refusal(p, *engine), "") << engine->name;
    p.tokens++;
    EXPECT_EQ(cuda::refusal(p, *engine),
              "row capacity C is 2147221506, must be at most 2147221504 on CUDA")
        << engine->name;
    p.tokens = 0;
  }
}

TEST(Engines, HopperNamesAnotherTileForScaledRows) {
  for (const cuda::Engine* engine : cuda::engines()) {
    if (engine->name != std::string("hopper")) continue;
    Problem p;
    p.tokens = 1024;
    p.top_k = 2;
    p.hidden = 1536;
    p.width = 256;
    p.experts = 2;
    const auto tile_of_y = [&] {
      for (const TileChoice& choice : engine->describe(p)) {
        if (choice.kernel == std::string("Y")) return choice.tile;
      }
      return std::string();
    };
    EXPECT_EQ(tile_of_y().find("128x192"), 0u) << tile_of_y();
    p.form = RoutingForm::kGrouped;
    p.top_k = 0;
    EXPECT_EQ(tile_of_y().find("128x256"), 0u) << tile_of_y();
  }
}

TEST(Driver, AMissingFunctionIsNamed) {
  try {
    cuda::driver_function("cuNoSuchFunction");
    FAIL() << "a function was found that does not exist";
  } catch (const Error& error) {
    const std::string sentence = error.what();
    EXPECT_TRUE(sentence.find("cuNoSuchFunction") != std::string::npos ||
                sentence.find("no CUDA driver was found") != std::string::npos)
        << sentence;
  }
}

}  // namespace
}  // namespace sonicmoe
