// The selection keys of routing: accuracy, order, known results, and equal bits on every
// instruction set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/philox.h"
#include "core/score.h"
#include "cpu/route_simd.h"
#include "routing_reference.h"

namespace sonicmoe {
namespace {

double ulps(float got, double want) {
  const auto exponent = std::max(std::ilogb(want), -126) - 23;
  return std::abs(got - want) / std::ldexp(1.0, exponent);
}

TEST(SelectionKey, ExponentialIsWithinOneUlp) {
  for (std::uint32_t bits = std::bit_cast<std::uint32_t>(1e-12f);
       bits <= std::bit_cast<std::uint32_t>(80.0f); bits += 331) {
    const float x = -std::bit_cast<float>(bits);
    ASSERT_LE(ulps(key::exp32(x), std::exp(static_cast<double>(x))), 1.0) << x;
  }
  EXPECT_EQ(key::exp32(0.0f), 1.0f);
  EXPECT_EQ(key::exp32(-0.0f), 1.0f);
  EXPECT_GT(key::exp32(-80.0f), 1024 * std::numeric_limits<float>::min());
  EXPECT_EQ(key::exp32(std::nextafter(-80.0f, -100.0f)), 0.0f);
  EXPECT_EQ(key::exp32(-3e38f), 0.0f);
  EXPECT_EQ(key::exp32(key::minus_infinity()), 0.0f);
}

TEST(SelectionKey, SigmoidIsWithinTwoAndAHalfUlps) {
  for (float x = -79.0f; x < 79.0f; x += 0.00137f) {
    ASSERT_LE(ulps(key::sigmoid32(x), 1.0 / (1.0 + std::exp(-static_cast<double>(x)))), 2.5) << x;
  }
  EXPECT_EQ(key::sigmoid32(0.0f), 0.5f);
  EXPECT_EQ(key::sigmoid32(key::minus_infinity()), 0.0f);
  EXPECT_EQ(key::sigmoid32(key::kLargestF32), 1.0f);
}

double sqrt_softplus(double x) {
  return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
}

TEST(SelectionKey, SqrtSoftplusIsWithinTwoUlps) {
  for (float x = -79.9f; x < 90.0f; x += 0.00137f) {
    ASSERT_LE(ulps(key::sqrt_softplus32(x), sqrt_softplus(x)), 2.0) << x;
    const double slope = 1.0 / (2.0 * (1.0 + std::exp(-x)) * std::log1p(std::exp(x)));
    ASSERT_LE(ulps(key::sqrt_softplus_slope32(x), x < 50 ? slope : 0.5 / x), 4.5) << x;
  }
  EXPECT_EQ(key::sqrt_softplus32(key::minus_infinity()), 0.0f);
  EXPECT_EQ(key::sqrt_softplus32(-80.1f), 0.0f);
  EXPECT_EQ(key::sqrt_softplus32(81.0f), 9.0f);
  EXPECT_EQ(key::sqrt_softplus32(key::kLargestF32), std::sqrt(key::kLargestF32));
  for (const float x : {key::minus_infinity(), -1e4f, -80.1f}) {
    EXPECT_EQ(key::sqrt_softplus_slope32(x), 0.5f);
  }
}

// Parts have the ratios of scores, also where the scores are 0.
TEST(SelectionKey, SqrtSoftplusPartsDoNotUnderflow) {
  for (const float top : {-500.0f, -100.0f, -30.0f, -1.0f, 0.0f, 3.0f}) {
    for (float x = top; x > top - 60.0f; x -= 0.37f) {
      const double factor = top > 0.0f ? 1.0 : std::exp(-top / 2.0);
      const double score = (x < -40.0f ? std::exp(x / 2.0) : sqrt_softplus(x)) * factor;
      ASSERT_NEAR(key::sqrt_softplus_part32(x, top), score, 1e-6 * score) << x;
    }
    EXPECT_EQ(key::sqrt_softplus_part32(key::minus_infinity(), top), 0.0f);
  }
}

// Sums of 2^31 masses must fit 64 bits, and the ranks of token rounding 30 bits.
TEST(SelectionKey, LargeScoresHaveMassesAndRanks) {
  constexpr auto kScore = ScoreMode::kSqrtSoftplus;
  EXPECT_EQ(key::score_mass(kScore, 1.5f), std::uint64_t{3} << 23);
  EXPECT_EQ(key::score_mass(kScore, 600.0f), std::uint64_t{1} << 33);
  EXPECT_EQ(key::score_mass(kScore, 1e19f), std::uint64_t{1} << 33);
  EXPECT_EQ(key::score_mass(ScoreMode::kSigmoid, 0.75f), std::uint64_t{3} << 38);
  for (const float x : {-1e3f, -80.0f, -79.0f, -3.0f, 0.0f, 5.0f, 1e30f, key::kLargestF32}) {
    const float score = key::sqrt_softplus32(x);
    const float rank = key::rank_of(kScore, score);
    EXPECT_LE(rank, 1.0f);
    EXPECT_TRUE(rank == 0.0f || rank >= std::numeric_limits<float>::min());
    EXPECT_EQ(key::score_of_rank(kScore, rank), score);
  }
}

TEST(SelectionKey, OrderBitsKeepTheOrderAndReturn) {
  const std::vector<float> ascending = {
      key::minus_infinity(), -key::kLargestF32, -2.0f, -1e-40f, 0.0f, 1e-40f, 1.5f,
      key::kLargestF32};
  for (std::size_t i = 0; i < ascending.size(); ++i) {
    EXPECT_EQ(key::from_order_bits(key::order_bits(ascending[i])), ascending[i]);
  }
  for (std::size_t i = 1; i < ascending.size(); ++i) {
    EXPECT_LT(key::order_bits(ascending[i - 1]), key::order_bits(ascending[i]));
  }
  EXPECT_EQ(key::order_bits(-0.0f), key::order_bits(0.0f));
  EXPECT_EQ(key::order_bits(key::minus_infinity()), key::kUnavailable);
}

TEST(SelectionKey, CleanDefinesEveryValue) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(key::clean(inf, key::kLargestBF16), to_float(BF16{0x7f7f}));
  EXPECT_EQ(key::clean(inf, key::kLargestF16), to_float(F16{0x7bff}));
  EXPECT_EQ(key::clean(std::nanf(""), key::kLargestF32), -inf);
  EXPECT_EQ(key::clean(-inf, key::kLargestF32), -inf);
  EXPECT_EQ(key::biased(-inf, 0.0f, 5.0f), -inf);
  EXPECT_EQ(key::biased(1.0f, 0.5f, inf), key::kLargestF32);
  EXPECT_EQ(key::biased(1.0f, 0.5f, std::nanf("")), -inf);
}

// The published vectors of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
  struct Case {
    PhiloxWords counter;
    std::uint64_t seed;
    PhiloxWords want;
  };
  const Case cases[] = {
      {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       0xffffffffffffffffull,
       {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0x299f31d0a4093822ull,
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Case& c : cases) {
    const PhiloxWords got = philox4x32_10(c.counter, c.seed);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], c.want.word[i]);
  }
}

std::vector<const cpu::RouteSimd*> tables() {
  std::vector<const cpu::RouteSimd*> result = {&cpu::kRouteSimdPortable};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    result.push_back(&cpu::kRouteSimdAvx2);
  }
  if (&cpu::route_simd() == &cpu::kRouteSimdAvx512) result.push_back(&cpu::kRouteSimdAvx512);
  return result;
}

TEST(RouteSimd, EveryTableGivesTheStatedBits) {
  std::mt19937_64 random(7);
  for (const std::int64_t n : {1, 2, 3, 5, 8, 31, 32, 33, 63, 64, 100, 128, 255, 256, 1000, 1024}) {
    for (const testing::Flavour flavour : testing::kFlavours) {
      testing::Guarded logits(DType::kF32, n);
      fill_logits(&logits, n, flavour, &random);
      const auto x = testing::read_logits<float>(&logits, DType::kF32, 1, n)[0];
      const auto want = testing::softmax(x);
      const auto want_sigmoid = testing::sigmoid(x);
      const auto want_sqrt_softplus = testing::sqrt_softplus(x);
      for (const cpu::RouteSimd* table : tables()) {
        std::vector<float> loaded(n), p(n), s(n), q(n), part(n), slope(n), tmp(2 * n);
        std::vector<std::uint32_t> keys(n);
        float top = 0.0f;
        table->load(logits.data(), DType::kF32, n, loaded.data());
        table->softmax(loaded.data(), n, p.data(), tmp.data(), &top);
        table->sigmoid(loaded.data(), n, s.data());
        table->sqrt_softplus(loaded.data(), n, q.data());
        table->sqrt_softplus_parts(loaded.data(), -1.0f, n, part.data(), slope.data());
        table->order(loaded.data(), n, keys.data());
        EXPECT_EQ(top, *std::max_element(x.begin(), x.end()));
        for (std::int64_t i = 0; i < n; ++i) {
          ASSERT_EQ(loaded[i], x[i]);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(p[i]), std::bit_cast<std::uint32_t>(want[i]));
          ASSERT_EQ(s[i], want_sigmoid[i]);
          ASSERT_EQ(q[i], want_sqrt_softplus[i]);
          ASSERT_EQ(std::bit_cast<std::uint32_t>(part[i]),
                    std::bit_cast<std::uint32_t>(key::sqrt_softplus_part32(x[i], -1.0f)));
          ASSERT_EQ(slope[i], key::sqrt_softplus_slope32(x[i]));
          ASSERT_EQ(keys[i], key::order_bits(x[i]));
        }
      }
    }
  }
}

TEST(RouteSimd, TopTakesTheLargestAndTheLowerIndex) {
  std::mt19937_64 random(13);
  for (const std::int64_t n : {1, 2, 15, 16, 17, 64, 100, 256}) {
    for (const std::uint32_t values : {2u, 5u, 1000000u}) {
      std::vector<std::uint32_t> keys(n);
      for (auto& k : keys) k = static_cast<std::uint32_t>(random() % values);
      std::vector<std::int32_t> want(n);
      std::iota(want.begin(), want.end(), 0);
      std::stable_sort(want.begin(), want.end(), [&](int a, int b) { return keys[a] > keys[b]; });
      for (auto& i : want) i = keys[i] > 1 ? i : -1;
      for (const cpu::RouteSimd* table : tables()) {
        for (const std::int64_t k : {std::int64_t{1}, (n + 1) / 2, n}) {
          std::vector<std::uint32_t> keys32(n + cpu::kTopBlock, 0xffffffffu);
          std::vector<std::uint64_t> keys64(n + cpu::kTopBlock, ~0ull);
          std::copy(keys.begin(), keys.end(), keys32.begin());
          std::copy(keys.begin(), keys.end(), keys64.begin());
          std::vector<std::uint32_t> max32(n / cpu::kTopBlock + 1);
          std::vector<std::uint64_t> max64(n / cpu::kTopBlock + 1);
          std::vector<std::int32_t> ids32(k, -7), ids64(k, -7);
          table->top32(keys32.data(), n, k, 1, max32.data(), ids32.data());
          table->top64(keys64.data(), n, k, 1, max64.data(), ids64.data());
          const std::vector<std::int32_t> head(want.begin(), want.begin() + k);
          ASSERT_EQ(ids32, head);
          ASSERT_EQ(ids64, head);
        }
      }
    }
  }
}

TEST(RouteSimd, LoadsEverySixteenBitPattern) {
  std::vector<std::uint16_t> every(65536);
  for (std::size_t i = 0; i < every.size(); ++i) every[i] = static_cast<std::uint16_t>(i);
  std::vector<float> got(every.size());
  for (const cpu::RouteSimd* table : tables()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      table->load(every.data(), dtype, 65536, got.data());
      const float largest = dtype == DType::kBF16 ? key::kLargestBF16 : key::kLargestF16;
      for (std::size_t i = 0; i < every.size(); ++i) {
        const float v = dtype == DType::kBF16 ? to_float(BF16{every[i]}) : to_float(F16{every[i]});
        ASSERT_EQ(got[i], key::clean(v, largest)) << i;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
