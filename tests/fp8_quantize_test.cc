// The quantiser against another formulation of it: e4m3 as a table of values that is searched, the
// scale by trying powers of two in fp64.
#include "core/fp8_quantize.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/fp8_layout.h"
#include "core/numeric.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t kBlock = fp8::kBlock;

// 1 sign bit, 4 exponent bits with bias 7, 3 mantissa bits; no infinities, 0x7f is NaN.
double value_by_definition(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  return code & 0x80 ? -magnitude : magnitude;
}

int nearest_code(double v) {
  int best = 0;
  for (int code = 0; code < 0x7f; ++code) {
    const double distance = std::fabs(std::fabs(v) - value_by_definition(code));
    const double least = std::fabs(std::fabs(v) - value_by_definition(best));
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(v) ? 0x80 : 0);
}

double scale_by_trial(const std::vector<double>& block) {
  double largest = 0.0;
  for (const double v : block) {
    if (std::isfinite(v)) largest = std::max(largest, std::fabs(v));
  }
  if (largest == 0.0) return 1.0;
  double scale = 0x1p-126;
  while (largest / scale > 448.0) scale *= 2.0;
  return scale;
}

double bf16_value(std::uint32_t bits) { return to_float(BF16{static_cast<std::uint16_t>(bits)}); }

TEST(Fp8Quantize, CodesHaveTheirValues) {
  for (int code = 0; code < 256; ++code) {
    const float value = fp8::value_of(static_cast<std::uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << code;
    } else {
      EXPECT_EQ(value, value_by_definition(code)) << code;
      EXPECT_EQ(std::signbit(value), code >= 128) << code;
    }
  }
}

TEST(Fp8Quantize, RoundsToTheNearestCode) {
  // Every code, the middle to its neighbour, and the values next to either.
  for (int code = 0; code < 0x7e; ++code) {
    const double value = value_by_definition(code);
    const double middle = (value + value_by_definition(code + 1)) / 2;
    for (const double v : {value, middle}) {
      const auto f = static_cast<float>(v);
      for (const float near : {std::nextafter(f, -1.0f), f, std::nextafter(f, 1000.0f)}) {
        for (const float x : {near, -near}) {
          EXPECT_EQ(fp8::e4m3_of(x), nearest_code(x)) << x;
        }
      }
    }
  }
  for (const float v : {448.0f, 449.0f, 464.0f, 1000.0f, 3e38f}) {
    EXPECT_EQ(fp8::e4m3_of(v), 0x7e) << v;
    EXPECT_EQ(fp8::e4m3_of(-v), 0xfe) << v;
  }
}

TEST(Fp8Quantize, EveryBf16ValueAloneInABlock) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double v = bf16_value(bits);
    const float scale = fp8::scale_of(fp8::magnitude_of(static_cast<float>(v)));
    ASSERT_EQ(scale, scale_by_trial({v})) << v;
    ASSERT_EQ(fp8::inverse_of(scale), 1.0 / scale) << v;
    const std::uint8_t code = fp8::code_of(static_cast<float>(v), fp8::inverse_of(scale));
    if (!std::isfinite(v)) {
      ASSERT_EQ(code, fp8::kNaNCode) << v;
      continue;
    }
    ASSERT_EQ(code, nearest_code(v / scale)) << v;
    // code * scale is exact in bf16, or infinite if it is 2^128.
    const double product = value_by_definition(code) * scale;
    const double held = to_float(to_bf16(fp8::value_of(code) * scale));
    ASSERT_EQ(held, std::fabs(product) < 0x1p128 ? product : std::copysign(HUGE_VAL, v)) << v;
  }
}

// Every bf16 value beside a larger one, for larger ones of every exponent: small values meet
// subnormal codes and subnormal bf16 numbers.
TEST(Fp8Quantize, EveryBf16ValueBesideALargerOne) {
  for (std::uint32_t top = 0x0001; top < 0x7f80; top += 0x2b) {
    const double larger = bf16_value(top);
    const float scale = fp8::scale_of(fp8::magnitude_of(static_cast<float>(larger)));
    ASSERT_EQ(scale, scale_by_trial({larger})) << larger;
    for (std::uint32_t bits = 0; bits <= top; bits += 0x11) {
      const double v = bf16_value(bits);
      const std::uint8_t code = fp8::code_of(static_cast<float>(v), fp8::inverse_of(scale));
      const double product = fp8::value_of(code) * static_cast<double>(scale);
      if (product < 0x1p128) {
        ASSERT_EQ(to_float(to_bf16(static_cast<float>(product))), product) << v << " of " << larger;
      }
      // The search is slow, so it is left out for codes far below the largest.
      if (bits + 0x900 >= top) {
        ASSERT_EQ(code, nearest_code(v / scale)) << v << " of " << larger;
      }
    }
  }
}

TEST(Fp8Quantize, NonFiniteValuesDoNotCountForTheScale) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float v : {nan, -nan, infinity, -infinity}) {
    EXPECT_EQ(fp8::magnitude_of(v), 0u);
    EXPECT_EQ(fp8::code_of(v, 1.0f), fp8::kNaNCode);
  }
  EXPECT_EQ(fp8::scale_of(0), 1.0f);
}

void fill(std::vector<BF16>& values, std::mt19937& engine) {
  std::normal_distribution<float> normal;
  for (BF16& v : values) {
    // Magnitudes differ by block, so that a wrong scale cannot be right by chance.
    v = to_bf16(normal(engine) * std::ldexp(1.0f, static_cast<int>(engine() % 24) - 12));
  }
}

double element(const Tensor& t, std::int64_t e, std::int64_t r, std::int64_t c) {
  return to_float(
      static_cast<const BF16*>(t.data)[e * t.stride[0] + r * t.stride[1] + c * t.stride[2]]);
}

// Where the codes and scales of one (E, rows, cols) tensor are expected.
struct Place {
  std::int64_t codes, row, col, expert, scales, scales_expert;
};

void expect_quantised(const std::uint8_t* base, const Tensor& w, const Place& at) {
  const auto* scales = reinterpret_cast<const float*>(base + at.scales);
  for (std::int64_t e = 0; e < w.shape[0]; ++e) {
    for (std::int64_t br = 0; br < fp8::blocks_of(w.shape[1]); ++br) {
      for (std::int64_t bc = 0; bc < fp8::blocks_of(w.shape[2]); ++bc) {
        std::vector<double> block;
        for (std::int64_t i = 0; i < kBlock * kBlock; ++i) {
          const std::int64_t r = br * kBlock + i / kBlock, c = bc * kBlock + i % kBlock;
          const bool exists = r < w.shape[1] && c < w.shape[2];
          block.push_back(exists ? element(w, e, r, c) : 0.0);
        }
        const double scale = scale_by_trial(block);
        ASSERT_EQ(scales[e * at.scales_expert + br * fp8::blocks_of(w.shape[2]) + bc], scale);
        for (std::int64_t i = 0; i < kBlock * kBlock; i += 7) {
          const std::int64_t r = br * kBlock + i / kBlock, c = bc * kBlock + i % kBlock;
          ASSERT_EQ(base[at.codes + e * at.expert + r * at.row + c * at.col],
                    nearest_code(block[static_cast<std::size_t>(i)] / scale))
              << e << " " << r << " " << c;
        }
      }
    }
  }
}

void expect_layout(std::int64_t n, std::int64_t d) {
  constexpr std::int64_t e = 3;
  const std::int64_t size = n * d;
  const std::int64_t codes_n = fp8::whole_blocks(n), codes_d = fp8::whole_blocks(d);
  const std::int64_t codes = codes_n * codes_d;
  for (const ActivationKind kind : {ActivationKind::kSwiGLU, ActivationKind::kReLU2}) {
    Problem p;
    p.form = RoutingForm::kGrouped;
    p.hidden = d;
    p.width = n;
    p.experts = e;
    p.dtype = DType::kBF16;
    p.activation.kind = kind;
    p.precision = Precision::kFp8;
    const std::int64_t g = gate_factor(kind);
    std::mt19937 engine(7);
    std::vector<BF16> up(static_cast<std::size_t>(e * g * size)), down(e * size);
    fill(up, engine);
    fill(down, engine);
    Weights w;
    // Gate and up alternate along n, and the last dimension of either is not contiguous.
    w.up = {up.data() + (g - 1), DType::kBF16, 3, {e, n, d}, {g * size, g, g * n}};
    if (g == 2) w.gate = {up.data(), DType::kBF16, 3, {e, n, d}, {g * size, g, g * n}};
    w.down = {down.data(), DType::kBF16, 3, {e, d, n}, {size, 1, d}};
    const std::int64_t bytes = fp8_weights_bytes(p);
    EXPECT_EQ(bytes, 2 * (g + 1) * e * codes + 2 * 256);
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(bytes + 256));
    auto* base = memory.data() + (256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256);
    std::vector<std::uint8_t> first;
    for (const std::int32_t threads : {1, 3}) {
      std::fill_n(base, bytes, std::uint8_t{0xa5});
      quantize_weights(p, w, {base, bytes}, {.num_threads = threads});
      if (threads == 1) first.assign(base, base + bytes);
    }
    EXPECT_TRUE(std::equal(first.begin(), first.end(), base)) << "bits depend on threads";
    const fp8::WeightsLayout at = fp8::weights_layout(p);
    EXPECT_EQ(at.bytes, bytes);
    const std::int64_t tiles = codes / (kBlock * kBlock);
    for (std::int64_t half = 0; half < g; ++half) {
      const Tensor& t = half + 1 == g ? w.up : w.gate;
      const std::int64_t scales = at.up_s + half * tiles * 4;
      expect_quantised(base, t, {at.up + half * codes, codes_d, 1, g * codes, scales, g * tiles});
      expect_quantised(base, t,
                       {at.up_t + half * codes_n, 1, g * codes_n, g * codes, scales, g * tiles});
    }
    expect_quantised(base, w.down, {at.down, codes_n, 1, codes, at.down_s, tiles});
    expect_quantised(base, w.down, {at.down_t, 1, codes_d, codes, at.down_s, tiles});
  }
}

TEST(Fp8Quantize, WeightsLieAsTheLayoutSays) { expect_layout(128, 256); }

// Codes past n and d are 0, in blocks of 64 rows or columns too.
TEST(Fp8Quantize, BlocksOfWeightsAreWhole) {
  expect_layout(192, 256);
  expect_layout(128, 320);
  expect_layout(64, 192);
}

}  // namespace
}  // namespace sonicmoe
