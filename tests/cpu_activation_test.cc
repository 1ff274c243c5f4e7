// The polynomial activations against the oracle's in fp64, through the table of every instruction
// set.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/gemm_kernels.h"
#include "verify/oracle_activation.h"

namespace sonicmoe::cpu {
namespace {

constexpr std::int64_t kCols = 32;

/// act(x) of an activation without a gate, in fp32.
std::vector<float> activate(const Kernels& k, ActivationKind kind, const std::vector<float>& x) {
  std::vector<float> out(x.size());
  for (std::size_t i = 0; i < x.size(); i += kCols) {
    ForwardTile t{};
    t.activation.kind = kind;
    t.gate = t.up = {x.data() + i, kCols, 1,
                     std::min<std::int64_t>(kCols, static_cast<std::int64_t>(x.size() - i))};
    t.a = out.data() + i;
    t.a_stride = kCols;
    k.forward_tile(t);
  }
  return out;
}

/// act(gate, up) and its partial derivatives, one gate with at most kCols ups.
struct Gated {
  std::vector<float> value, by_gate, by_up;
};

Gated gated(const Kernels& k, const Activation& act, float gate, const std::vector<float>& ups) {
  const auto count = static_cast<std::int64_t>(ups.size());
  const std::vector<float> gates(ups.size(), gate), ones(ups.size(), 1.0f);
  Gated out{ones, ones, ones};
  ForwardTile f{};
  f.activation = act;
  f.gate = {gates.data(), kCols, 1, count};
  f.up = {ups.data(), kCols, 1, count};
  f.a = out.value.data();
  f.a_stride = kCols;
  k.forward_tile(f);
  const double score = 1.0;
  BackwardTile b{};
  b.activation = act;
  b.da = {ones.data(), kCols, 1, count};
  b.h_gate = gates.data();
  b.h_up = ups.data();
  b.h_stride = b.dh_stride = kCols;
  b.scores = &score;
  b.dh_gate = out.by_gate.data();
  b.dh_up = out.by_up.data();
  k.backward_tile(b);
  return out;
}

std::vector<float> dense(float low, float high, std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) {
    x[i] = low + (high - low) * static_cast<float>(i) / static_cast<float>(count);
  }
  return x;
}

class CpuActivation : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    if (!isa_available(GetParam())) GTEST_SKIP() << isa_name(GetParam());
  }
};

TEST_P(CpuActivation, SiluKeepsItsRelativeAccuracy) {
  const Kernels& k = kernels(DType::kF32, GetParam());
  const std::vector<float> x = dense(-80.0f, 80.0f, 400'001);
  const std::vector<float> y = activate(k, ActivationKind::kSiLU, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = oracle::silu(static_cast<double>(x[i])).value;
    ASSERT_NEAR(y[i], exact, 4 * 0x1p-23 * std::abs(exact)) << "at " << x[i];
  }
}

TEST_P(CpuActivation, GelusStayWithinTwoUlpOfTheirArgument) {
  const Kernels& k = kernels(DType::kF32, GetParam());
  const std::vector<float> x = dense(-9.0f, 9.0f, 400'001);
  const std::vector<float> erf_form = activate(k, ActivationKind::kGELU, x);
  const std::vector<float> tanh_form = activate(k, ActivationKind::kGELUTanh, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    const double allowed = 2 * 0x1p-23 * std::abs(at);
    ASSERT_NEAR(erf_form[i], oracle::gelu(at).value, allowed) << "at " << at;
    ASSERT_NEAR(tanh_form[i], oracle::gelu_tanh(at).value, allowed) << "at " << at;
  }
}

TEST_P(CpuActivation, ExtremesAndNanBehave) {
  const Kernels& k = kernels(DType::kF32, GetParam());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {nan, 1e30f, -1e30f, 0.0f, 200.0f, -200.0f};
  for (const ActivationKind kind : {ActivationKind::kSiLU, ActivationKind::kGELU,
                                    ActivationKind::kGELUTanh, ActivationKind::kReLU}) {
    const std::vector<float> y = activate(k, kind, x);
    EXPECT_TRUE(std::isnan(y[0])) << activation_name(kind);
    EXPECT_EQ(y[1], 1e30f) << activation_name(kind);
    EXPECT_EQ(y[3], 0.0f) << activation_name(kind);
    EXPECT_EQ(y[4], 200.0f) << activation_name(kind);
    EXPECT_EQ(y[2], 0.0f) << activation_name(kind);
    EXPECT_EQ(y[5], 0.0f) << activation_name(kind);
  }
}

// Gates and ups below, at and beyond every clamp, where a value that is off by one ulp shows.
TEST_P(CpuActivation, ClampsPassTheirGradientAtEqualityAndNanIsKept) {
  const Kernels& k = kernels(DType::kF32, GetParam());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation act : {Activation{ActivationKind::kSwiGLUOai, 0.0, 2.0},
                               Activation{ActivationKind::kSwiGLUClamped, 0.0, 2.0},
                               Activation{ActivationKind::kSwiGLUStep, 0.0, 2.0},
                               Activation{ActivationKind::kSwiGLUClamped, 0.0, 0.0}}) {
    const auto limit = static_cast<float>(with_defaults(act).limit);
    const float beyond = std::nextafter(limit, 2 * limit);
    for (const float gate : {-1e30f, -beyond, -limit, 0.5f, limit, beyond, 3.0f, 1e30f, nan}) {
      const std::vector<float> ups = {-1e30f, -beyond, -limit, 0.5f, limit, beyond, 1e30f, nan};
      const Gated got = gated(k, act, gate, ups);
      for (std::size_t i = 0; i < ups.size(); ++i) {
        const std::string at = std::string(activation_name(act.kind)) + " at " +
                               std::to_string(gate) + ", " + std::to_string(ups[i]);
        if (std::isnan(gate) || std::isnan(ups[i])) {
          EXPECT_TRUE(std::isnan(got.value[i])) << at;
          continue;
        }
        const auto exact = oracle::activate<double>(act, gate, ups[i]);
        EXPECT_NEAR(got.value[i], exact.value, 1e-6 * std::abs(exact.value)) << at;
        EXPECT_NEAR(got.by_gate[i], exact.by_gate, 2e-6 * std::abs(exact.by_gate)) << at;
        EXPECT_NEAR(got.by_up[i], exact.by_up, 1e-6 * std::abs(exact.by_up)) << at;
      }
    }
  }
}

TEST_P(CpuActivation, SituKeepsItsRelativeAccuracyForEveryCap) {
  const Kernels& k = kernels(DType::kF32, GetParam());
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& [alpha, limit] : {std::pair{4.0, 25.0}, {0.02, 0.01}, {1e9, 1e9}}) {
    const Activation act{ActivationKind::kSiTU, alpha, limit};
    for (const float gate : dense(-30.0f, 30.0f, 241)) {
      for (const float height : {1e-4f, 0.3f, 10.0f, 1e4f}) {
        const std::vector<float> ups = dense(-height, height, kCols);
        const Gated got = gated(k, act, gate, ups);
        for (std::size_t i = 0; i < ups.size(); ++i) {
          const auto exact = oracle::activate<double>(act, gate, ups[i]);
          const std::string at = std::to_string(gate) + ", " + std::to_string(ups[i]) + " caps " +
                                 std::to_string(alpha) + ", " + std::to_string(limit);
          const double of_up = std::abs(oracle::capped<double>(ups[i], limit).value);
          const double smallest = std::numeric_limits<float>::min();
          ASSERT_NEAR(got.value[i], exact.value, 1e-6 * std::abs(exact.value) + smallest) << at;
          ASSERT_NEAR(got.by_gate[i], exact.by_gate, 2e-6 * of_up + smallest) << at;
          // The exponential of a large number has the number's error as its relative error.
          const double stretched = 1e-6 * (1.0 + std::abs(ups[i] / limit));
          ASSERT_NEAR(got.by_up[i], exact.by_up, stretched * std::abs(exact.by_up) + smallest)
              << at;
        }
      }
    }
    EXPECT_EQ(gated(k, act, inf, {inf}).value[0], static_cast<float>(alpha * limit));
    EXPECT_EQ(gated(k, act, -inf, {inf}).value[0], 0.0f);
    EXPECT_TRUE(std::isnan(gated(k, act, NAN, {1.0f}).value[0]));
    EXPECT_TRUE(std::isnan(gated(k, act, 1.0f, {NAN}).value[0]));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, CpuActivation,
                         testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512,
                                         Isa::kAvx512Bf16),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace sonicmoe::cpu
