// The oracle's backward against central finite differences of its forward, through the whole layer.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "verify/oracle.h"
#include "verify/oracle_activation.h"
#include "verify/oracle_formulas.h"

namespace sonicmoe::oracle {
namespace {

constexpr double kStep = 1e-5;
constexpr double kAwayFromKinks = 1e-3;

struct Variant {
  ActivationKind kind;
  bool bias;
  bool factors;
};

void fill(std::mt19937_64& engine, std::vector<double>& values) {
  std::normal_distribution<double> normal;
  for (double& v : values) v = normal(engine);
}

void fill(std::mt19937_64& engine, std::vector<Matrix<double>>& experts, std::int64_t rows,
          std::int64_t cols) {
  for (Matrix<double>& m : experts) {
    m = Matrix<double>(rows, cols);
    fill(engine, m.values);
  }
}

void add_factors(std::mt19937_64& engine, Layer& layer) {
  const Problem& p = layer.problem;
  constexpr std::int64_t kUpRank = 2, kDownRank = 3;
  for (Factors* f : {&layer.lora_up, &layer.lora_down}) {
    f->a.resize(p.experts);
    f->b.resize(p.experts);
  }
  layer.lora_up.scale = 0.7;
  layer.lora_down.scale = -1.3;
  fill(engine, layer.lora_up.a, kUpRank, p.hidden);
  fill(engine, layer.lora_up.b, p.width, kUpRank);
  fill(engine, layer.lora_down.a, kDownRank, p.width);
  fill(engine, layer.lora_down.b, p.hidden, kDownRank);
  if (layer.gate.empty()) return;
  layer.lora_up.gate_b.resize(p.experts);
  fill(engine, layer.lora_up.gate_b, p.width, kUpRank);
}

// Tokens of 0, 1 and 3 rows, one of them twice at the same expert; expert 2 has no rows.
Layer random_layer(Variant variant, std::uint64_t seed) {
  constexpr std::int64_t kTokens = 5, kHidden = 3, kWidth = 4, kExperts = 4;
  std::mt19937_64 engine(seed);
  Layer layer;
  Problem& p = layer.problem;
  p.tokens = kTokens;
  p.hidden = kHidden;
  p.width = kWidth;
  p.experts = kExperts;
  p.form = RoutingForm::kPairs;
  p.capacity = layer.slots = 9;
  p.dtype = DType::kF64;
  p.activation.kind = variant.kind;
  const ActivationTraits traits = activation_traits(variant.kind);
  if (traits.alpha != 0.0) p.activation.alpha = 1.3;
  if (traits.limit != 0.0) p.activation.limit = 1.1;  // small enough for both clamps to act
  layer.rows = {{0, 0, 3}, {1, 0, 0}, {3, 0, 8}, {3, 0, 1},
                {0, 1, 2}, {4, 1, 6}, {0, 3, 7}, {3, 3, 5}};
  std::uniform_real_distribution<double> uniform(0.1, 1.0);
  for (Row& row : layer.rows) row.weight = uniform(engine);
  layer.x = Matrix<double>(kTokens, kHidden);
  fill(engine, layer.x.values);
  layer.up.resize(kExperts);
  layer.down.resize(kExperts);
  if (is_gated(variant.kind)) {
    layer.gate.resize(kExperts);
    fill(engine, layer.gate, kWidth, kHidden);
  }
  fill(engine, layer.up, kWidth, kHidden);
  fill(engine, layer.down, kHidden, kWidth);
  if (variant.bias) {
    layer.b_up = Matrix<double>(kExperts, kWidth);
    layer.b_down = Matrix<double>(kExperts, kHidden);
    fill(engine, layer.b_up.values);
    fill(engine, layer.b_down.values);
    if (is_gated(variant.kind)) {
      layer.b_gate = Matrix<double>(kExperts, kWidth);
      fill(engine, layer.b_gate.values);
    }
  }
  if (variant.factors) add_factors(engine, layer);
  return layer;
}

bool near_kink(const Layer& layer) {
  const HiddenRows h = forward(layer, Precision::kExact).h;
  const double limit = layer.problem.activation.limit;
  const auto near = [&](double v) {
    return std::abs(v) < kAwayFromKinks || std::abs(std::abs(v) - limit) < kAwayFromKinks;
  };
  return std::any_of(h.gate.values.begin(), h.gate.values.end(), near) ||
         std::any_of(h.up.values.begin(), h.up.values.end(), near);
}

double loss(const Layer& layer, const Matrix<double>& dout) {
  const Matrix<double> out = forward(layer, Precision::kExact).out;
  double sum = 0.0;
  for (std::size_t i = 0; i < out.values.size(); ++i) sum += out.values[i] * dout.values[i];
  return sum;
}

// Moves one input both ways and compares the slope of the loss with the gradient claimed.
void expect_slope(const Layer& layer, const Matrix<double>& dout, double& input, double gradient,
                  const char* what) {
  const double before = input;
  input = before + kStep;
  const double above = loss(layer, dout);
  input = before - kStep;
  const double below = loss(layer, dout);
  input = before;
  EXPECT_NEAR((above - below) / (2.0 * kStep), gradient, 2e-8 * (1.0 + std::abs(gradient))) << what;
}

void expect_slopes(const Layer& layer, const Matrix<double>& dout, std::vector<double>& inputs,
                   const std::vector<double>& gradients, const char* what) {
  ASSERT_LE(inputs.size(), gradients.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    expect_slope(layer, dout, inputs[i], gradients[i], what);
  }
}

void expect_factor_slopes(Layer& layer, const Matrix<double>& dout, Factors& factors,
                          const Factors& gradients) {
  const auto expect = [&](std::vector<Matrix<double>>& inputs,
                          const std::vector<Matrix<double>>& slopes, const char* what) {
    ASSERT_EQ(inputs.size(), slopes.size()) << what;
    for (std::size_t e = 0; e < inputs.size(); ++e) {
      expect_slopes(layer, dout, inputs[e].values, slopes[e].values, what);
    }
  };
  expect(factors.a, gradients.a, "a");
  expect(factors.b, gradients.b, "b");
  expect(factors.gate_b, gradients.gate_b, "gate_b");
}

class OracleLayer : public ::testing::TestWithParam<Variant> {};

TEST_P(OracleLayer, BackwardIsTheSlopeOfForward) {
  std::uint64_t seed = 1;
  Layer layer = random_layer(GetParam(), seed);
  while (near_kink(layer)) layer = random_layer(GetParam(), ++seed);
  std::mt19937_64 engine(99);
  Matrix<double> dout(layer.problem.tokens, layer.problem.hidden);
  fill(engine, dout.values);
  const HiddenRows h = forward(layer, Precision::kExact).h;
  const Backward grad = backward(layer, h, dout, Precision::kExact);

  expect_slopes(layer, dout, layer.x.values, grad.dx.values, "x");
  for (Row& row : layer.rows) {
    expect_slope(layer, dout, row.weight, grad.dweights[row.slot], "routing weight");
  }
  EXPECT_EQ(grad.dweights[4], 0.0) << "an empty slot";
  ASSERT_EQ(grad.dgate.size(), layer.gate.size());
  for (std::size_t e = 0; e < layer.up.size(); ++e) {
    if (!layer.gate.empty()) {
      expect_slopes(layer, dout, layer.gate[e].values, grad.dgate[e].values, "gate");
    }
    expect_slopes(layer, dout, layer.up[e].values, grad.dup[e].values, "up");
    expect_slopes(layer, dout, layer.down[e].values, grad.ddown[e].values, "down");
  }
  expect_factor_slopes(layer, dout, layer.lora_up, grad.dlora_up);
  expect_factor_slopes(layer, dout, layer.lora_down, grad.dlora_down);
  expect_slopes(layer, dout, layer.b_gate.values, grad.db_gate.values, "b_gate");
  expect_slopes(layer, dout, layer.b_up.values, grad.db_up.values, "b_up");
  expect_slopes(layer, dout, layer.b_down.values, grad.db_down.values, "b_down");
}

std::vector<Variant> all_variants() {
  std::vector<Variant> variants;
  for (std::int32_t kind = 0; kind < kActivationCount; ++kind) {
    for (const bool factors : {false, true}) {
      variants.push_back({static_cast<ActivationKind>(kind), false, factors});
      variants.push_back({static_cast<ActivationKind>(kind), true, factors});
    }
  }
  return variants;
}

INSTANTIATE_TEST_SUITE_P(EveryActivation, OracleLayer, ::testing::ValuesIn(all_variants()),
                         [](const auto& info) {
                           return std::string(activation_name(info.param.kind)) +
                                  (info.param.bias ? "_bias" : "") +
                                  (info.param.factors ? "_factors" : "");
                         });

// A layer small enough to work out by hand: one expert, d = n = 1, relu2, two tokens.
TEST(OracleLayer, MatchesAComputationByHand) {
  Layer layer;
  Problem& p = layer.problem;
  p.tokens = 2;
  p.hidden = p.width = p.experts = p.top_k = 1;
  p.activation.kind = ActivationKind::kReLU2;
  layer.slots = 2;
  layer.rows = {{0, 0, 0, 0.5}, {1, 0, 1, 2.0}};
  layer.x = Matrix<double>(2, 1);
  layer.x.values = {3.0, -1.0};
  layer.up = layer.down = {Matrix<double>(1, 1)};
  layer.up[0].values = {2.0};
  layer.down[0].values = {5.0};
  layer.b_up = layer.b_down = Matrix<double>(1, 1);
  layer.b_up.values[0] = 1.0;
  layer.b_down.values[0] = -4.0;
  const Forward f = forward(layer, Precision::kExact);
  EXPECT_EQ(f.h.up.values, (std::vector<double>{7.0, -1.0}));
  EXPECT_EQ(f.out.values, (std::vector<double>{0.5 * (5.0 * 49.0 - 4.0), 2.0 * -4.0}));

  Matrix<double> dout(2, 1);
  dout.values = {1.0, 3.0};
  const Backward b = backward(layer, f.h, dout, Precision::kExact);
  EXPECT_EQ(b.dweights, (std::vector<double>{241.0, -12.0}));
  const double dh = 2.0 * 7.0 * 0.5 * 5.0;
  EXPECT_EQ(b.dx.values, (std::vector<double>{2.0 * dh, 0.0}));
  EXPECT_EQ(b.dup[0].values, (std::vector<double>{3.0 * dh}));
  EXPECT_EQ(b.ddown[0].values, (std::vector<double>{0.5 * 49.0}));
  EXPECT_EQ(b.db_up.values, (std::vector<double>{dh}));
  EXPECT_EQ(b.db_down.values, (std::vector<double>{0.5 * 1.0 + 2.0 * 3.0}));
}

// The rounding points of the contract, each with a number that bf16 (8 bits) cannot hold.
TEST(OracleLayer, RoundsWhereTheContractSays) {
  Layer layer;
  Problem& p = layer.problem;
  p.tokens = p.hidden = p.width = p.experts = p.top_k = 1;
  p.activation.kind = ActivationKind::kReLU2;
  p.dtype = DType::kBF16;
  layer.slots = 1;
  layer.rows = {{0, 0, 0, 9.0}};
  layer.x = Matrix<double>(1, 1);
  layer.x.values = {1.0};
  layer.up = layer.down = {Matrix<double>(1, 1)};
  layer.up[0].values = {23.0};
  layer.down[0].values = {1.0};
  const Forward f = forward(layer, Precision::kSame);
  EXPECT_EQ(f.h.up.values[0], 23.0);
  EXPECT_EQ(f.out.values[0], 4736.0) << "A = r(529) = 528, O = r(9 * 528 = 4752)";
  Matrix<double> dout(1, 1);
  dout.values = {1.0};
  const Backward b = backward(layer, f.h, dout, Precision::kSame);
  EXPECT_EQ(b.dweights[0], 528.0) << "dS takes r(act(H))";
  EXPECT_EQ(b.ddown[0].values[0], 4768.0) << "A' = r(9 * 529 = 4761), from the unrounded act(H)";
  EXPECT_EQ(b.dup[0].values[0], 2.0 * 23.0 * 9.0);
}

// With one expert, d = n = 1 and relu: every inner row is rounded, H and Y once.
TEST(OracleLayer, RoundsInnerRowsAndTheirSumsOnce) {
  Layer layer;
  Problem& p = layer.problem;
  p.tokens = p.hidden = p.width = p.experts = p.top_k = p.up_rank = p.down_rank = 1;
  p.activation.kind = ActivationKind::kReLU;
  p.dtype = DType::kBF16;
  layer.slots = 1;
  layer.rows = {{0, 0, 0, 1.0}};
  layer.x = Matrix<double>(1, 1);
  layer.x.values = {1.0};
  const auto one = [](double value) {
    Matrix<double> m(1, 1);
    m.values = {value};
    return std::vector<Matrix<double>>{m};
  };
  layer.up = one(0.5);
  layer.down = one(1.0);
  layer.lora_up = {one(129.0), one(1.0), {}, 3.0};
  layer.lora_down = {one(1.0), one(3.0), {}, 1.0};
  const Forward f = forward(layer, Precision::kSame);
  EXPECT_EQ(f.h.up.values[0], 388.0) << "P = r(387) = 388, H = r(0.5 + 388)";
  EXPECT_EQ(f.out.values[0], 1552.0) << "U = 388, Y = r(388 + 3 * 388 = 1552)";
  Matrix<double> dout(1, 1);
  dout.values = {1.0};
  const Backward b = backward(layer, f.h, dout, Precision::kSame);
  EXPECT_EQ(b.dweights[0], 4.0 * 388.0) << "dA' = 1 + Q, Q = 3";
  EXPECT_EQ(b.dlora_up.b[0].values[0], 4.0 * 388.0) << "dH P";
  EXPECT_EQ(b.dlora_up.a[0].values[0], 12.0) << "V = r(3 * 4)";
  EXPECT_EQ(b.dlora_down.a[0].values[0], 3.0 * 388.0) << "Q A'";
  EXPECT_EQ(b.dlora_down.b[0].values[0], 388.0) << "dO U'";
  EXPECT_EQ(b.dx.values[0], 1552.0) << "r(4 * 0.5 + 12 * 129 = 1550)";
}

// Every column has the sum that a plain loop gives, with any number of columns: of whole vectors,
// of narrower ones and beside them.
template <class Real>
void expect_ascending_sums(Accumulator accumulator) {
  std::mt19937_64 engine(7);
  std::normal_distribution<double> normal;
  for (const std::int64_t cols : {1, 7, 8, 31, 64, 109, 250}) {
    Matrix<Real> a(3, 83), b(83, cols), sum(3, cols);
    for (Matrix<Real>* m : {&a, &b, &sum}) {
      for (Real& v : m->values) v = static_cast<Real>(normal(engine));
    }
    Matrix<Real> plain = sum;
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        for (std::int64_t k = 0; k < 83; ++k) {
          plain(i, j) += a(i, k) * b(k, j);
          const bool last = (k + 1) % accumulator.step == 0;
          if (accumulator.bits != 0 && last) plain(i, j) = cut(plain(i, j), accumulator.bits);
        }
      }
    }
    add_product(sum, a, b, accumulator);
    EXPECT_EQ(sum.values, plain.values) << cols << " columns";
  }
}

TEST(OracleLayer, ProductsAddInAscendingOrder) {
  for (const Accumulator accumulator : {Accumulator{}, Accumulator{13, 16}}) {
    expect_ascending_sums<float>(accumulator);
    expect_ascending_sums<double>(accumulator);
    expect_ascending_sums<long double>(accumulator);
  }
}

TEST(OracleLayer, ProductsRefuseMatricesOfOtherShapes) {
  const Matrix<double> a(2, 3), b(3, 4);
  Matrix<double> sum(2, 4), narrow(2, 3), cut(2, 4);
  cut.values.pop_back();
  EXPECT_NO_THROW(add_product(sum, a, b));
  EXPECT_THROW(add_product(narrow, a, b), Error);
  EXPECT_THROW(add_product(cut, a, b), Error);
  EXPECT_THROW(add_product(sum, b, b), Error);
}

}  // namespace
}  // namespace sonicmoe::oracle
