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

INSTANTIATE_TEST_SUITE_P(EveryIsa, CpuActivation,
                         testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512,
                                         Isa::kAvx512Bf16),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace sonicmoe::cpu
