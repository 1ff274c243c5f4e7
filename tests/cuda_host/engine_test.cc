// The seam between passes and engines, without a GPU: the lists of steps say all that an engine
// needs, so that one which knows nothing else gives the CPU's results.
#include <gtest/gtest.h>

#include <array>
#include <random>
#include <vector>

#include "cuda/device/device.h"
#include "cuda/layer/checks.h"
#include "stand_in.h"

namespace sonicmoe {
namespace {

using cuda::GateLayout;
using testing::run_on_host;
using testing::stand_in_engine;

constexpr std::int64_t kT = 24, kD = 20, kN = 36, kE = 5, kK = 2;

/// How gate and up lie in memory.
enum class Form { kSplit, kInterleaved, kNoGate };

/// Values of a layer and of every result, in memory of its own.
struct Values {
  explicit Values(float fill) {
    for (auto* v : {&x, &out, &dout, &dx}) v->assign(kT * kD, fill);
    for (auto* v : {&w_up, &dw_up}) v->assign(kE * 2 * kN * kD, fill);
    for (auto* v : {&w_down, &dw_down}) v->assign(kE * kD * kN, fill);
    for (auto* v : {&b_up, &db_up}) v->assign(2 * kE * kN, fill);
    for (auto* v : {&b_down, &db_down}) v->assign(kE * kD, fill);
    for (auto* v : {&scores, &dscores}) v->assign(kT * kK, fill);
    ids.assign(kT * kK, 0);
  }
  std::vector<float> x, out, dout, dx, w_up, dw_up, w_down, dw_down, b_up, db_up, b_down, db_down,
      scores, dscores;
  std::vector<std::int32_t> ids;

  std::array<const std::vector<float>*, 7> results() const {
    return {&out, &dx, &dw_up, &dw_down, &db_up, &db_down, &dscores};
  }
};

Weights views(Form form, float* up, float* down, float* b_up, float* b_down) {
  Weights w;
  w.up = tensor3(up, DType::kF32, kE, kN, kD);
  w.b_up = tensor2(b_up, DType::kF32, kE, kN);
  if (form == Form::kInterleaved) {  // (E, d, 2n), the gate in even columns
    w.gate = w.up;
    w.gate.stride[0] = 2 * kN * kD;
    w.gate.stride[1] = 2;
    w.gate.stride[2] = 2 * kN;
    w.up = w.gate;
    w.up.data = up + 1;
  } else if (form == Form::kSplit) {
    w.gate = w.up;
    w.gate.stride[0] = 2 * kN * kD;
    w.up = w.gate;
    w.up.data = up + kN * kD;
  }
  if (form != Form::kNoGate) w.b_gate = tensor2(b_up + kE * kN, DType::kF32, kE, kN);
  w.down = tensor3(down, DType::kF32, kE, kD, kN);
  w.b_down = tensor2(b_down, DType::kF32, kE, kD);
  return w;
}

struct Layer {
  explicit Layer(Form form) : values(-7.0f) {
    problem.tokens = kT;
    problem.hidden = kD;
    problem.width = kN;
    problem.experts = kE;
    problem.top_k = kK;
    problem.dtype = DType::kF32;
    problem.activation.kind =
        form == Form::kNoGate ? ActivationKind::kReLU : ActivationKind::kReGLU;
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (auto* v : {&values.x, &values.dout, &values.w_up, &values.w_down, &values.b_up,
                    &values.b_down, &values.scores}) {
      for (float& value : *v) value = normal(random);
    }
    for (std::int64_t t = 0; t < kT; ++t) {  // the last expert has no rows
      values.ids[t * kK] = static_cast<std::int32_t>(t % (kE - 1));
      values.ids[t * kK + 1] = static_cast<std::int32_t>((t / 4 + 1 + t) % (kE - 1));
      if (values.ids[t * kK] == values.ids[t * kK + 1]) {
        values.ids[t * kK + 1] = (values.ids[t * kK] + 1) % (kE - 1);
      }
    }
    Values& v = values;
    forward.x = tensor2(v.x.data(), DType::kF32, kT, kD);
    forward.routing.ids = tensor2(v.ids.data(), DType::kI32, kT, kK);
    forward.routing.weights = tensor2(v.scores.data(), DType::kF32, kT, kK);
    forward.weights = views(form, v.w_up.data(), v.w_down.data(), v.b_up.data(), v.b_down.data());
    forward.out = tensor2(v.out.data(), DType::kF32, kT, kD);
    backward.x = forward.x;
    backward.routing = forward.routing;
    backward.weights = forward.weights;
    backward.dout = tensor2(v.dout.data(), DType::kF32, kT, kD);
    backward.dx = tensor2(v.dx.data(), DType::kF32, kT, kD);
    backward.dweights = tensor2(v.dscores.data(), DType::kF32, kT, kK);
    backward.grads =
        views(form, v.dw_up.data(), v.dw_down.data(), v.db_up.data(), v.db_down.data());
  }

  Buffer lend(std::int64_t bytes) {
    memory.emplace_back(static_cast<std::size_t>(bytes + 256));
    void* data = memory.back().data();
    std::size_t space = memory.back().size();
    std::align(256, static_cast<std::size_t>(bytes), data, space);
    return {data, bytes};
  }
  void lend(const Sizes& f, const Sizes& b) {
    forward.h = backward.h = lend(f.h_bytes);
    forward.saved = backward.saved = lend(f.saved_bytes);
    forward.scratch = lend(f.scratch_bytes);
    backward.scratch = lend(b.scratch_bytes);
  }

  Problem problem;
  Values values;
  ForwardArgs forward;
  BackwardArgs backward;
  std::vector<std::vector<std::byte>> memory;
};

void run_on_cpu(Layer& layer) {
  layer.lend(moe_sizes(layer.problem, Pass::kForward), moe_sizes(layer.problem, Pass::kBackward));
  moe_forward(layer.problem, layer.forward);
  moe_backward(layer.problem, layer.backward);
}

void run_on_stand_in(Layer& layer) {
  const cuda::Engine& engine = stand_in_engine();
  const Problem& p = layer.problem;
  Sizes f, b;
  f.h_bytes = gate_factor(p.activation.kind) * kT * kK * kN * 4;
  f.saved_bytes = cuda::metadata_layout(p, nullptr).bytes;
  f.scratch_bytes = cuda::forward_scratch(p, Pass::kForward, nullptr).bytes;
  b.scratch_bytes = cuda::backward_scratch(p, engine, nullptr).bytes;
  layer.lend(f, b);
  const cuda::PassContext pass{p, cuda::metadata_layout(p, layer.forward.saved.data)};
  const auto forward = cuda::forward_scratch(p, Pass::kForward, layer.forward.scratch.data);
  run_on_host(cuda::forward_steps(pass, layer.forward, forward), pass, engine);
  const auto backward = cuda::backward_scratch(p, engine, layer.backward.scratch.data);
  run_on_host(cuda::backward_steps(pass, layer.backward, backward, engine), pass, engine);
}

class Seam : public ::testing::TestWithParam<Form> {};

TEST_P(Seam, AStandInEngineGivesTheLayer) {
  Layer want(GetParam());
  Layer got(GetParam());
  run_on_cpu(want);
  run_on_stand_in(got);
  const auto expected = want.values.results();
  const auto actual = got.values.results();
  for (std::size_t i = 0; i < expected.size(); ++i) {
    for (std::size_t j = 0; j < expected[i]->size(); ++j) {
      const float value = (*expected[i])[j];
      ASSERT_NEAR((*actual[i])[j], value, 2e-4f * (1.0f + std::abs(value)))
          << "result " << i << ", element " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, Seam,
                         ::testing::Values(Form::kSplit, Form::kInterleaved, Form::kNoGate));

TEST(Engines, AreFoundByCapability) {
  const cuda::Engine* rows[] = {cuda::engines().front(), &stand_in_engine()};
  EXPECT_EQ(cuda::engine_for(7, rows), &stand_in_engine());
  EXPECT_STREQ(cuda::engine_for(90, rows)->name, "hopper");
  EXPECT_EQ(cuda::engine_for(75, rows), nullptr);
}

TEST(Engines, DeclareWhatTheyServe) {
  Problem p;
  p.hidden = 24;
  p.width = 20;
  p.experts = 2;
  p.dtype = DType::kF32;
  EXPECT_EQ(cuda::refusal(p, stand_in_engine()), "");
  p.dtype = DType::kBF16;
  EXPECT_NE(cuda::refusal(p, stand_in_engine()).find("takes f32"), std::string::npos);
  const cuda::Engine& hopper = *cuda::engine_for(90);
  EXPECT_NE(cuda::refusal(p, hopper).find("multiples of 8"), std::string::npos);
  p.width = 16;
  EXPECT_EQ(cuda::refusal(p, hopper), "");
}

TEST(Engines, HaveModelsOfTheirDevices) {
  ASSERT_NE(cuda::device_model(90), nullptr);
  EXPECT_EQ(cuda::device_model(90)->engine, cuda::engine_for(90));
  EXPECT_EQ(cuda::device_model(12), nullptr);
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
