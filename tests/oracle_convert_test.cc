// From strided descriptors to the oracle's dense layer.
#include <gtest/gtest.h>

#include "core/numeric.h"
#include "verify/convert.h"
#include "verify/oracle_fp8.h"

namespace sonicmoe::oracle {
namespace {

TEST(OracleConvert, ReadsAndWritesAnyStride) {
  float memory[24] = {};
  Tensor t = tensor2(memory, DType::kF32, 2, 3);
  t.stride[0] = 1;  // transposed, every other element
  t.stride[1] = 4;
  write(t, {1.0, 2.0, 3.0, 4.0, 5.0, 6.0});
  EXPECT_EQ(memory[0], 1.0f);
  EXPECT_EQ(memory[4], 2.0f);
  EXPECT_EQ(memory[1], 4.0f);
  EXPECT_EQ(memory[2], 0.0f);
  EXPECT_EQ(read(t), (std::vector<double>{1.0, 2.0, 3.0, 4.0, 5.0, 6.0}));
}

// Rounding twice, to fp32 and then to 16 bits, would miss these.
TEST(OracleConvert, RoundsOnceToSixteenBits) {
  EXPECT_EQ(round_to(DType::kBF16, 1.0 + 0x1p-8), 1.0);
  EXPECT_EQ(round_to(DType::kBF16, 1.0 + 0x1p-8 + 0x1p-40), 1.0 + 0x1p-7);
  EXPECT_EQ(round_to(DType::kF16, 1.0 + 0x1p-11 + 0x1p-40), 1.0 + 0x1p-10);
  EXPECT_EQ(round_to(DType::kF16, -1.0 - 0x1.8p-10 + 0x1p-40), -1.0 - 0x1p-10);
  EXPECT_EQ(round_to(DType::kF32, 1.0 + 0x1p-24), 1.0);
  EXPECT_EQ(round_to(DType::kF64, 0.1), 0.1);
}

// The multiple of the format's step at v that is nearest to v, by functions of the C library.
double on_a_step(double v, int mantissa_bits, int least_exponent) {
  if (v == 0.0 || !std::isfinite(v)) return v;
  const double step = std::ldexp(1.0, std::max(std::ilogb(v), least_exponent) - mantissa_bits);
  return std::nearbyint(v / step) * step;
}
double or_infinity(double v, double beyond) {
  return std::abs(v) >= beyond ? std::copysign(std::numeric_limits<double>::infinity(), v) : v;
}

void expect_nearest(double v) {
  const auto equal = [v](double got, double want) {
    const bool same =
        std::isnan(want) ? std::isnan(got) : got == want && std::signbit(got) == std::signbit(want);
    EXPECT_TRUE(same) << v << " is rounded to " << got << ", not to " << want;
  };
  const double bf16 = or_infinity(on_a_step(v, 7, -126), 0x1p128);
  equal(round_to(DType::kBF16, v), bf16);
  const double f16 = or_infinity(on_a_step(v, 10, -14), 0x1p16);
  equal(round_to(DType::kF16, v), f16);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double code = std::isfinite(v) ? std::clamp(on_a_step(v, 3, -6), -448.0, 448.0) : nan;
  equal(e4m3(v), code);
  equal(e4m3_value(e4m3_code(code)), code);

  std::vector<float> floats = {static_cast<float>(v)};
  std::vector<double> doubles = {v};
  round_all(DType::kBF16, floats);
  round_all(DType::kF16, doubles);
  equal(floats[0], round_to(DType::kBF16, static_cast<float>(v)));
  equal(doubles[0], f16);
}

TEST(OracleConvert, RoundsEveryUpperHalfToTheNearestValue) {
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0x0000, 0x0001, 0x0fff, 0x1000, 0x8000, 0xffff}) {
      const double v = std::bit_cast<float>(upper << 16 | lower);
      expect_nearest(v);
      if (v == 0.0 || !std::isfinite(v)) continue;
      expect_nearest(std::nextafter(v, 0.0));
      expect_nearest(std::nextafter(v, 2.0 * v));
    }
  }
}

Problem problem_of(RoutingForm form) {
  Problem p;
  p.tokens = 3;
  p.hidden = p.width = 1;
  p.experts = 2;
  p.form = form;
  p.activation.kind = ActivationKind::kReLU;
  return p;
}

struct Values {
  float x[3] = {1.0f, 2.0f, 3.0f};
  float up[2] = {1.0f, 10.0f};
  float down[2] = {1.0f, 1.0f};
  Weights weights() {
    Weights w;
    w.up = tensor3(up, DType::kF32, 2, 1, 1);
    w.down = tensor3(down, DType::kF32, 2, 1, 1);
    return w;
  }
};

std::vector<double> output_of(const Problem& p, const Routing& routing) {
  Values values;
  return forward(read_layer(p, tensor2(values.x, DType::kF32, 3, 1), routing, values.weights()),
                 Precision::kExact)
      .out.values;
}

TEST(OracleConvert, IdsOutOfRangeAreEmptySlots) {
  Problem p = problem_of(RoutingForm::kIds);
  p.top_k = 2;
  // 2^32 is 0 when narrowed to 32 bits: it must stay out of range.
  std::int64_t ids[] = {1, -1, std::int64_t{1} << 32, 2, 0, 0};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float w[] = {0.5f, nan, nan, nan, 1.0f, 2.0f};
  Routing r;
  r.ids = tensor2(ids, DType::kI64, 3, 2);
  r.weights = tensor2(w, DType::kF32, 3, 2);
  EXPECT_EQ(output_of(p, r), (std::vector<double>{5.0, 0.0, 9.0}));
}

TEST(OracleConvert, PairsInAnyOrder) {
  Problem p = problem_of(RoutingForm::kPairs);
  p.capacity = 5;
  std::int32_t token[] = {2, 0, -1, 2, 3};
  std::int32_t expert[] = {1, 0, 0, 0, 0};
  float w[] = {1.0f, 2.0f, 7.0f, 4.0f, 7.0f};
  Routing r;
  r.token = tensor1(token, DType::kI32, 5);
  r.expert = tensor1(expert, DType::kI32, 5);
  r.weights = tensor1(w, DType::kF32, 5);
  EXPECT_EQ(output_of(p, r), (std::vector<double>{2.0, 0.0, 42.0}));
}

TEST(OracleConvert, GroupsAreClampedToTheBuffer) {
  const Problem p = problem_of(RoutingForm::kGrouped);
  std::int64_t begin[] = {-5, 2};
  std::int64_t count[] = {6, std::numeric_limits<std::int64_t>::max()};
  Routing r;
  r.row_begin = tensor1(begin, DType::kI64, 2);
  r.row_count = tensor1(count, DType::kI64, 2);
  EXPECT_EQ(output_of(p, r), (std::vector<double>{1.0, 0.0, 30.0}));
}

}  // namespace
}  // namespace sonicmoe::oracle
