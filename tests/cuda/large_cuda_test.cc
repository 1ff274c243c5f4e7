// Tensors of more than 2^31 elements: x, out, dx, H, the weights and their gradients. All data are
// -1, 0 and 1, so that every sum is exact and results must be equal.
//
// Needs 85 GB of device memory, so it runs only if SONICMOE_LARGE is set.
#include <cstdlib>

#include "device_layer.h"
#include "each_engine.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::DeviceLayer;
using testing::expert_of;
using testing::LayerShape;
using testing::LayerWeights;
using testing::must;
using testing::Periodic;
using testing::score_of;

constexpr LayerShape kShape{600000, 4096, 2048, 300, 1};
constexpr std::int64_t kD = kShape.hidden, kN = kShape.width;
constexpr std::int64_t kLimit = std::int64_t{1} << 31;
static_assert(kShape.tokens * kD > kLimit && kShape.tokens * 2 * kN > kLimit);
static_assert(kShape.experts * kN * kD > kLimit);

float rounded(double v) { return to_float(to_bf16(static_cast<float>(v))); }

/// The non-zero elements of a matrix row.
struct Sparse {
  std::vector<std::pair<std::int64_t, int>> items;
  Sparse(const Periodic& matrix, std::int64_t row) {
    for (std::int64_t j = 0; j < kD; ++j) {
      if (const int v = matrix.value(row * kD + j); v != 0) items.emplace_back(j, v);
    }
  }
};

/// The formulas for one row, from the inputs.
struct RowOracle {
  const LayerWeights& w;
  const Periodic& x;
  const Periodic& dout;

  std::int64_t up_at(std::int64_t e, int part, std::int64_t i) const {
    return ((e * 2 + part) * kN + i) * kD;
  }
  float hidden(const Sparse& row, std::int64_t e, int part, std::int64_t i) const {
    int sum = 0;
    for (const auto& [j, v] : row.items) sum += v * w.up.value(up_at(e, part, i) + j);
    return rounded(sum);
  }
  double dact(const Sparse& row, std::int64_t e, std::int64_t i) const {
    int sum = 0;
    for (const auto& [j, v] : row.items) sum += v * w.down.value((e * kD + j) * kN + i);
    return sum;
  }

  struct Unit {  // values of column i
    float gate, up, dgate, dup, a, a_grad;
    double dact;
  };
  Unit unit(const Sparse& xs, const Sparse& ds, std::int64_t e, float s, std::int64_t i) const {
    Unit u{};
    u.gate = hidden(xs, e, 0, i);
    u.up = hidden(xs, e, 1, i);
    const double relu = std::max(u.gate, 0.0f);
    u.a = rounded(relu * u.up);
    u.a_grad = rounded(s * relu * u.up);
    u.dact = dact(ds, e, i);
    u.dgate = rounded(u.gate > 0.0f ? u.up * s * u.dact : 0.0);
    u.dup = rounded(relu * s * u.dact);
    return u;
  }
};

std::vector<float> rows(const DeviceArray& a, std::int64_t first, std::int64_t count) {
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(count));
  must(cudaMemcpy(bits.data(), static_cast<const std::uint16_t*>(a.data()) + first, bits.size() * 2,
                  cudaMemcpyDeviceToHost));
  std::vector<float> out;
  for (const std::uint16_t b : bits) out.push_back(to_float(BF16{b}));
  return out;
}

void check_token(const RowOracle& o, const DeviceLayer& layer, std::int64_t t) {
  SCOPED_TRACE(::testing::Message() << "token " << t);
  const std::int64_t e = expert_of(kShape, t, 0);
  const float s = score_of(t, 0);
  const Sparse xs(o.x, t), ds(o.dout, t);
  std::vector<RowOracle::Unit> units;
  double dscore = 0.0;
  for (std::int64_t i = 0; i < kN; ++i) {
    units.push_back(o.unit(xs, ds, e, s, i));
    dscore += units.back().dact * units.back().a;
  }
  const auto out = rows(layer.out(), t * kD, kD);
  const auto dx = rows(layer.dx(), t * kD, kD);
  for (std::int64_t j = 0; j < kD; j += 31) {
    double y = 0.0, grad = 0.0;
    for (std::int64_t i = 0; i < kN; ++i) {
      y += static_cast<double>(units[i].a) * o.w.down.value((e * kD + j) * kN + i);
      grad += static_cast<double>(units[i].dgate) * o.w.up.value(o.up_at(e, 0, i) + j) +
              static_cast<double>(units[i].dup) * o.w.up.value(o.up_at(e, 1, i) + j);
    }
    ASSERT_EQ(out[j], rounded(s * rounded(y))) << "out, column " << j;
    ASSERT_EQ(dx[j], rounded(rounded(grad))) << "dx, column " << j;
  }
  float found = 0.0f;
  must(cudaMemcpy(&found, static_cast<const float*>(layer.dweights().data()) + t, 4,
                  cudaMemcpyDeviceToHost));
  ASSERT_EQ(found, static_cast<float>(dscore)) << "dweights";
}

void check_expert(const RowOracle& o, const DeviceLayer& layer, std::int64_t e) {
  SCOPED_TRACE(::testing::Message() << "expert " << e);
  const std::int64_t columns[] = {0, 1, 63, 64, 2047, kD - 1};
  for (const std::int64_t i : {std::int64_t{0}, kN - 1}) {
    double gate[6] = {}, up[6] = {}, down[6] = {};
    for (std::int64_t t = 0; t < kShape.tokens; ++t) {
      if (expert_of(kShape, t, 0) != e) continue;
      const auto u = o.unit(Sparse(o.x, t), Sparse(o.dout, t), e, score_of(t, 0), i);
      for (int c = 0; c < 6; ++c) {
        gate[c] += static_cast<double>(u.dgate) * o.x.value(t * kD + columns[c]);
        up[c] += static_cast<double>(u.dup) * o.x.value(t * kD + columns[c]);
        down[c] += static_cast<double>(u.a_grad) * o.dout.value(t * kD + columns[c]);
      }
    }
    for (int c = 0; c < 6; ++c) {
      ASSERT_EQ(rows(layer.dup(), o.up_at(e, 0, i) + columns[c], 1)[0], rounded(gate[c]));
      ASSERT_EQ(rows(layer.dup(), o.up_at(e, 1, i) + columns[c], 1)[0], rounded(up[c]));
      ASSERT_EQ(rows(layer.ddown(), (e * kD + columns[c]) * kN + i, 1)[0], rounded(down[c]));
    }
  }
}

class CudaLarge : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaLarge);

TEST_P(CudaLarge, OffsetsPastTwoToThe31) {
  if (std::getenv("SONICMOE_LARGE") == nullptr) GTEST_SKIP() << "SONICMOE_LARGE is not set";
  const Exec exec = this->exec();
  const LayerWeights weights(kShape);
  const Periodic x(kShape.tokens * kD, 1), dout(kShape.tokens * kD, 2);
  std::vector<std::int32_t> ids;
  std::vector<float> scores;
  for (std::int64_t t = 0; t < kShape.tokens; ++t) {
    ids.push_back(expert_of(kShape, t, 0));
    scores.push_back(score_of(t, 0));
  }
  DeviceArray d_ids(kShape.tokens * 4), d_scores(kShape.tokens * 4);
  d_ids.set(ids);
  d_scores.set(scores);
  const auto from = [&](std::int64_t token) -> DeviceLayer::Inputs {
    return {static_cast<std::uint16_t*>(x.data()) + token * kD,
            static_cast<std::uint16_t*>(dout.data()) + token * kD,
            static_cast<std::int32_t*>(d_ids.data()) + token,
            static_cast<float*>(d_scores.data()) + token};
  };
  DeviceLayer layer(kShape, weights, from(0), exec);
  layer.step();
  must(cudaDeviceSynchronize());
  const RowOracle oracle{weights, x, dout};
  const std::int64_t edge = kLimit / kD;  // the token at which x passes 2^31 elements
  for (const std::int64_t t : {std::int64_t{0}, edge - 1, edge, kShape.tokens - 1}) {
    check_token(oracle, layer, t);
    if (HasFatalFailure()) return;
  }
  // Offsets pass 2^31 at expert 128 in up, at 256 in down, at 262 in the grouped rows.
  for (const std::int64_t e : {0, 127, 128, 256, 262, 299}) {
    check_expert(oracle, layer, e);
    if (HasFatalFailure()) return;
  }
  // Every element of some ranges of tokens, compared with a layer that has only these.
  for (const std::int64_t first : {std::int64_t{0}, edge - 1000, kShape.tokens - 3000}) {
    LayerShape few = kShape;
    few.tokens = 3000;
    DeviceLayer alone(few, weights, from(first), exec);
    alone.step();
    ASSERT_EQ(rows(alone.out(), 0, 3000 * kD), rows(layer.out(), first * kD, 3000 * kD));
    ASSERT_EQ(rows(alone.dx(), 0, 3000 * kD), rows(layer.dx(), first * kD, 3000 * kD));
  }
}

}  // namespace
}  // namespace sonicmoe
