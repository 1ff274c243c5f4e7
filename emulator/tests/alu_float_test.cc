// Floating-point arithmetic, against values worked out from the PTX ISA.
#include <cmath>
#include <limits>

#include "alu_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint64_t kNan = 0x7fff'ffff;       // the NaN that PTX makes
constexpr std::uint64_t kOtherNan = 0xffc0'1234;  // a NaN that PTX does not make
constexpr std::uint64_t kNanHalf = 0x7fff;
constexpr std::uint64_t kLeast = 1;               // the least denormal number
constexpr std::uint64_t kDenormal = 0x007f'ffff;  // the largest one
constexpr std::uint64_t kMinusZero = 0x8000'0000;
constexpr std::uint64_t kLargest = 0x7f7f'ffff;

TEST(AluFloat, Sums) {
  expect_r("add.f32 %r, %r0, %r1;", {{{f(1), f(2)}, f(3)},
                                     {{f(1), f(0x1p-24f)}, f(1)},  // half: to even
                                     {{f(0x1.000002p0f), f(0x1p-24f)}, f(0x1.000004p0f)},
                                     {{f(0x1p24f), f(1)}, f(0x1p24f)},
                                     {{kLargest, kLargest}, f(kInfinity)},
                                     {{f(kInfinity), f(-kInfinity)}, kNan},
                                     {{kOtherNan, f(1)}, kNan},
                                     {{kMinusZero, kMinusZero}, kMinusZero},
                                     {{f(1), f(-1)}, 0},
                                     {{kLeast, kLeast}, 2}});
  expect_r("add.ftz.f32 %r, %r0, %r1;",
           {{{kLeast, 0}, 0}, {{kMinusZero | 1, kMinusZero}, kMinusZero}, {{f(1), f(2)}, f(3)}});
  expect_r(
      "add.sat.f32 %r, %r0, %r1;",
      {{{f(1), f(2)}, f(1)}, {{f(-3), f(2)}, 0}, {{kOtherNan, 0}, 0}, {{f(0.25f), 0}, f(0.25f)}});
  expect_r("sub.rn.f32 %r, %r0, %r1;",
           {{{f(1), f(2)}, f(-1)}, {{f(kInfinity), f(kInfinity)}, kNan}});
  expect_r("sub.ftz.sat.f32 %r, %r0, %r1;", {{{kDenormal, kMinusZero}, 0}, {{f(5), f(1)}, f(1)}});
  expect_d("add.f64 %d, %d0, %d1;",
           {{{d(1), d(0x1p-53)}, d(1)}, {{d(1), d(0x1p-52)}, d(1 + 0x1p-52)}});
  expect_d("sub.rn.f64 %d, %d0, %d1;", {{{d(1), d(3)}, d(-2)}});
}

TEST(AluFloat, Products) {
  expect_r("mul.f32 %r, %r0, %r1;", {{{f(3), f(-4)}, f(-12)},
                                     {{f(0x1.000002p0f), f(0x1.000002p0f)}, f(0x1.000004p0f)},
                                     {{f(0x1p-126f), f(0.5f)}, 0x0040'0000},
                                     {{f(0x1p-149f), f(0.5f)}, 0},  // half: to even
                                     {{f(0x1p-149f), f(0x1.8p-1f)}, 1},
                                     {{0, f(kInfinity)}, kNan},
                                     {{f(0x1p127f), f(-2)}, f(-kInfinity)}});
  expect_r("mul.ftz.f32 %r, %r0, %r1;",
           {{{f(-0x1p-126f), f(0.5f)}, kMinusZero}, {{kDenormal, f(0x1p100f)}, 0}});
  expect_r("mul.rn.sat.f32 %r, %r0, %r1;", {{{f(3), f(4)}, f(1)}, {{f(3), f(-4)}, 0}});
  expect_d("mul.f64 %d, %d0, %d1;", {{{d(3), d(1.5)}, d(4.5)}});
}

TEST(AluFloat, FusedMultiplyAdd) {
  expect_r("fma.rn.f32 %r, %r0, %r1, %r2;",
           {{{f(0x1.000002p0f), f(0x1.fffffcp-1f), f(-1)}, f(-0x1p-46f)},  // two roundings: 0
            {{f(2), f(3), f(4)}, f(10)},
            {{kLargest, f(2), f(-kInfinity)}, f(-kInfinity)},
            {{kLargest, f(2), f(-std::numeric_limits<float>::max())}, kLargest},
            {{f(kInfinity), 0, f(1)}, kNan},
            {{f(0x1p-100f), f(0x1p-49f), 0}, 1},
            {{f(-1), 0, kMinusZero}, kMinusZero}});
  expect_r("fma.rn.ftz.f32 %r, %r0, %r1, %r2;", {{{f(0x1p-100f), f(0x1p-49f), 0}, 0}});
  expect_r("fma.rn.sat.f32 %r, %r0, %r1, %r2;", {{{f(2), f(3), f(4)}, f(1)}});
  expect_r("mad.rn.f32 %r, %r0, %r1, %r2;",
           {{{f(0x1.000002p0f), f(0x1.fffffcp-1f), f(-1)}, f(-0x1p-46f)}});
  expect_d("fma.rn.f64 %d, %d0, %d1, %d2;",
           {{{d(1 + 0x1p-52), d(1 - 0x1p-52), d(-1)}, d(-0x1p-104)}});
}

TEST(AluFloat, HalvesRoundOnce) {
  expect_h("add.f16 %h, %h0, %h1;", {{{h(1), h(2)}, h(3)},
                                     {{h(2048), h(1)}, h(2048)},  // half: to even
                                     {{h(2050), h(1)}, h(2052)},
                                     {{h(65504), h(16)}, 0x7c00},
                                     {{h(65504), h(15.9921875f)}, h(65504)},
                                     {{0x7e00, 0}, kNanHalf},
                                     {{1, 1}, 2}});
  expect_h("sub.ftz.f16 %h, %h0, %h1;", {{{0x0001, 0}, 0}, {{0x0400, 0x0001}, h(0x1p-14f)}});
  expect_h("mul.f16 %h, %h0, %h1;", {{{h(0x1p-14f), h(0x1p-11f)}, 0},  // half of the least number
                                     {{h(0x1.8p-14f), h(0x1p-11f)}, 1},
                                     {{h(-0x1p-14f), h(0x1p-12f)}, 0x8000}});
  expect_h("add.sat.f16 %h, %h0, %h1;", {{{h(1), h(2)}, h(1)}, {{0x7e00, 0}, 0}});
  // 2049 lies halfway between two numbers; the third operand determines the rounding.
  expect_h("fma.rn.f16 %h, %h0, %h1, %h2;", {{{h(3), h(683), 0}, h(2048)},
                                             {{h(3), h(683), 1}, h(2050)},
                                             {{h(3), h(683), 0x8001}, h(2048)},
                                             {{h(7), h(293), 0}, h(2052)},
                                             {{h(7), h(293), 0x8001}, h(2050)}});
  expect_h("fma.rn.relu.f16 %h, %h0, %h1, %h2;",
           {{{h(3), h(-1), 0}, 0}, {{h(3), h(2), h(1)}, h(7)}});
  expect_r("fma.rn.f16x2 %r, %r0, %r1, %r2;",
           {{{pair(h(7), h(3)), pair(h(293), h(683)), pair(0x8001, 1)}, pair(h(2050), h(2050))}});
  expect_r("add.f16x2 %r, %r0, %r1;", {{{pair(h(1), h(2)), pair(h(3), h(5))}, pair(h(4), h(7))}});
  expect_r("mul.ftz.f16x2 %r, %r0, %r1;", {{{pair(h(2), 1), pair(h(3), h(2))}, pair(h(6), 0)}});
}

TEST(AluFloat, BrainsRoundOnce) {
  expect_h("add.bf16 %h, %h0, %h1;", {{{b(1), b(2)}, b(3)},
                                      {{b(256), b(1)}, b(256)},  // half: to even
                                      {{b(258), b(1)}, b(260)},
                                      {{b(1), b(0x1p-100f)}, b(1)},
                                      {{0x7fc0, 0}, kNanHalf},
                                      {{1, 2}, 3}});
  // Half of the least number is 2^-134. The products are just below, just above and equal to it.
  expect_h("mul.bf16 %h, %h0, %h1;", {{{b(0x1.02p-67f), b(0x1.fcp-68f)}, 0},
                                      {{b(0x1.02p-67f), b(0x1.fep-68f)}, 1},
                                      {{b(0x1p-67f), b(0x1p-67f)}, 0},
                                      {{b(3), b(-5)}, b(-15)}});
  // 261 and 267 lie halfway between two numbers; the third operand determines the rounding, even if
  // it is very small.
  expect_h("fma.rn.bf16 %h, %h0, %h1, %h2;", {{{b(9), b(29), 0}, b(260)},
                                              {{b(9), b(29), b(0x1p-126f)}, b(262)},
                                              {{b(9), b(29), b(-0x1p-126f)}, b(260)},
                                              {{b(3), b(89), 0}, b(268)},
                                              {{b(3), b(89), b(-0x1p-126f)}, b(266)},
                                              {{b(-3), b(89), b(0x1p-126f)}, b(-266)},
                                              {{b(9), b(29), b(0x1p60f)}, b(0x1p60f)},
                                              {{b(0x1p127f), b(2), 0}, 0x7f80}});
  expect_r("fma.rn.bf16x2 %r, %r0, %r1, %r2;",
           {{{pair(b(3), b(9)), pair(b(89), b(29)), pair(b(-0x1p-90f), b(0x1p-90f))},
             pair(b(266), b(262))}});
  expect_r("fma.rn.relu.bf16x2 %r, %r0, %r1, %r2;",
           {{{pair(b(-3), b(9)), pair(b(89), b(29)), pair(0, 0)}, pair(0, b(260))}});
  expect_r("sub.bf16x2 %r, %r0, %r1;",
           {{{pair(b(1), b(2)), pair(b(3), b(5))}, pair(b(-2), b(-3))}});
  expect_r("mul.bf16x2 %r, %r0, %r1;", {{{pair(b(1), b(2)), pair(b(3), b(5))}, pair(b(3), b(10))}});
}

TEST(AluFloat, Extremes) {
  expect_r("min.f32 %r, %r0, %r1;", {{{f(1), f(2)}, f(1)},
                                     {{0, kMinusZero}, kMinusZero},
                                     {{kMinusZero, 0}, kMinusZero},
                                     {{kOtherNan, f(1)}, f(1)},
                                     {{f(1), kOtherNan}, f(1)},
                                     {{kOtherNan, kOtherNan}, kNan},
                                     {{f(-kInfinity), f(1)}, f(-kInfinity)},
                                     {{kLeast, 0}, 0}});
  expect_r("max.f32 %r, %r0, %r1;", {{{f(1), f(2)}, f(2)},
                                     {{0, kMinusZero}, 0},
                                     {{kMinusZero, 0}, 0},
                                     {{kMinusZero, kMinusZero}, kMinusZero},
                                     {{kOtherNan, f(1)}, f(1)},
                                     {{f(1), kOtherNan}, f(1)},
                                     {{kLeast, 0}, kLeast}});
  expect_r("max.NaN.f32 %r, %r0, %r1;",
           {{{kOtherNan, f(1)}, kNan}, {{f(1), kOtherNan}, kNan}, {{f(1), f(2)}, f(2)}});
  expect_r("min.NaN.f32 %r, %r0, %r1;", {{{kOtherNan, f(1)}, kNan}, {{0, kMinusZero}, kMinusZero}});
  expect_r("max.ftz.f32 %r, %r0, %r1;", {{{kLeast, 0}, 0}, {{kMinusZero | 1, f(-1)}, kMinusZero}});
  expect_r("min.xorsign.abs.f32 %r, %r0, %r1;",
           {{{f(-1), f(2)}, f(-1)}, {{f(-3), f(-2)}, f(2)}, {{f(3), f(2)}, f(2)}});
  expect_d("max.f64 %d, %d0, %d1;",
           {{{d(1), d(2)}, d(2)}, {{d(-0.0), d(0)}, d(0)}, {{d(NAN), d(2)}, d(2)}});
  expect_h("max.f16 %h, %h0, %h1;",
           {{{h(1), h(2)}, h(2)}, {{0x8000, 0}, 0}, {{0x7e00, h(1)}, h(1)}});
  expect_r("max.f16x2 %r, %r0, %r1;",
           {{{pair(h(1), 0xfe00), pair(h(-2), h(-3))}, pair(h(1), h(-3))}});
  expect_r("min.bf16x2 %r, %r0, %r1;",
           {{{pair(b(1), 0), pair(b(-2), 0x8000)}, pair(b(-2), 0x8000)}});
  expect_r("min.NaN.bf16x2 %r, %r0, %r1;",
           {{{pair(b(1), 0xffc0), pair(b(2), b(1))}, pair(b(1), kNanHalf)}});
}

TEST(AluFloat, Signs) {
  expect_r("abs.f32 %r, %r0;",
           {{{f(-1)}, f(1)}, {{kMinusZero}, 0}, {{f(-kInfinity)}, f(kInfinity)}});
  expect_r("abs.ftz.f32 %r, %r0;", {{{kMinusZero | 1}, 0}});
  expect_r("neg.f32 %r, %r0;", {{{f(-1)}, f(1)}, {{0}, kMinusZero}});
  expect_d("neg.f64 %d, %d0;", {{{d(2)}, d(-2)}});
  expect_d("abs.f64 %d, %d0;", {{{d(-2)}, d(2)}});
  expect_h("neg.bf16 %h, %h0;", {{{b(2)}, b(-2)}});
  expect_r("abs.bf16x2 %r, %r0;", {{{pair(b(-2), b(3))}, pair(b(2), b(3))}});
  expect_r("neg.f16x2 %r, %r0;", {{{pair(h(-2), h(3))}, pair(h(2), h(-3))}});
  expect_r("copysign.f32 %r, %r0, %r1;", {{{f(-1), f(2)}, f(-2)}, {{f(1), f(-2)}, f(2)}});
  expect_d("copysign.f64 %d, %d0, %d1;", {{{d(-1), d(2)}, d(-2)}});
}

TEST(AluFloat, Quotients) {
  expect_r("div.rn.f32 %r, %r0, %r1;", {{{f(1), f(3)}, 0x3eaa'aaab},
                                        {{f(1), 0}, f(kInfinity)},
                                        {{f(-1), 0}, f(-kInfinity)},
                                        {{0, 0}, kNan},
                                        {{f(0x1p-126f), f(2)}, 0x0040'0000}});
  expect_r("div.full.f32 %r, %r0, %r1;", {{{f(6), f(3)}, f(2)}});
  expect_r("div.approx.ftz.f32 %r, %r0, %r1;", {{{f(0x1p-126f), f(2)}, 0}, {{f(6), f(3)}, f(2)}});
  expect_d("div.rn.f64 %d, %d0, %d1;", {{{d(1), d(3)}, 0x3fd5'5555'5555'5555}});
  expect_r("rcp.rn.f32 %r, %r0;", {{{f(3)}, 0x3eaa'aaab}, {{f(-kInfinity)}, kMinusZero}});
  expect_r("rcp.approx.ftz.f32 %r, %r0;", {{{f(4)}, f(0.25f)},
                                           {{kDenormal}, f(kInfinity)},
                                           {{kMinusZero}, f(-kInfinity)},
                                           {{f(0x1p127f)}, 0},
                                           {{kOtherNan}, kNan}});
  expect_d("rcp.rn.f64 %d, %d0;", {{{d(3)}, 0x3fd5'5555'5555'5555}});
  expect_d("rcp.approx.ftz.f64 %d, %d0;",
           {{{d(4)}, d(0.25)}, {{d(3)}, 0x3fd5'5555'0000'0000}, {{1}, d(HUGE_VAL)}});
  expect_r("sqrt.rn.f32 %r, %r0;", {{{f(2)}, 0x3fb5'04f3},
                                    {{f(-1)}, kNan},
                                    {{kMinusZero}, kMinusZero},
                                    {{kLeast}, f(0x1.6a09e6p-75f)}});
  expect_r("sqrt.approx.ftz.f32 %r, %r0;", {{{f(9)}, f(3)}, {{kDenormal}, 0}});
  expect_d("sqrt.rn.f64 %d, %d0;", {{{d(2)}, 0x3ff6'a09e'667f'3bcd}});
  expect_r(
      "rsqrt.approx.f32 %r, %r0;",
      {{{f(4)}, f(0.5f)}, {{0}, f(kInfinity)}, {{kMinusZero}, f(-kInfinity)}, {{f(-1)}, kNan}});
  expect_d("rsqrt.approx.f64 %d, %d0;", {{{d(16)}, d(0.25)}});
}

TEST(AluFloat, Functions) {
  expect_r("ex2.approx.ftz.f32 %r, %r0;", {{{f(3)}, f(8)},
                                           {{f(-1)}, f(0.5f)},
                                           {{0}, f(1)},
                                           {{kDenormal}, f(1)},
                                           {{f(-kInfinity)}, 0},
                                           {{f(128)}, f(kInfinity)},
                                           {{f(-127)}, 0},
                                           {{kOtherNan}, kNan}});
  expect_r("ex2.approx.f32 %r, %r0;", {{{f(-127)}, 0x0040'0000}});
  expect_h("ex2.approx.f16 %h, %h0;", {{{h(3)}, h(8)}, {{h(-15)}, 0x0200}});
  expect_r("ex2.approx.ftz.bf16x2 %r, %r0;", {{{pair(b(3), b(-1))}, pair(b(8), b(0.5f))}});
  expect_r("lg2.approx.f32 %r, %r0;",
           {{{f(8)}, f(3)}, {{0}, f(-kInfinity)}, {{f(-1)}, kNan}, {{0x0040'0000}, f(-127)}});
  expect_r("lg2.approx.ftz.f32 %r, %r0;", {{{0x0040'0000}, f(-kInfinity)}});
  expect_r("sin.approx.f32 %r, %r0;",
           {{{0}, 0}, {{f(1)}, f(std::sin(1.0f))}, {{f(kInfinity)}, kNan}});
  expect_r("cos.approx.ftz.f32 %r, %r0;", {{{0}, f(1)}, {{f(1)}, f(std::cos(1.0f))}});
  expect_r("tanh.approx.f32 %r, %r0;",
           {{{f(100)}, f(1)}, {{f(-100)}, f(-1)}, {{kMinusZero}, kMinusZero}});
  expect_r("tanh.approx.bf16x2 %r, %r0;", {{{pair(b(100), 0)}, pair(b(1), 0)}});
}

}  // namespace
}  // namespace sonicmoe::emulator
