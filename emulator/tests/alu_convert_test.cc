// cvt, against values worked out from the PTX ISA and against tables of all numbers of a format.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "alu_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint64_t kOtherNan = 0xffc0'1234;  // not the NaN that PTX makes
constexpr std::uint64_t kOnes32 = 0xffff'ffff;
constexpr std::uint64_t kOnes64 = 0xffff'ffff'ffff'ffff;
constexpr std::uint64_t kMin32 = 0x8000'0000;
constexpr std::uint64_t kMin64 = 0x8000'0000'0000'0000;

TEST(AluConvert, Integers) {
  expect_d("cvt.s64.s32 %d, %r0;", {{{kOnes32}, kOnes64}, {{5}, 5}});
  expect_d("cvt.u64.u32 %d, %r0;", {{{kOnes32}, kOnes32}});
  expect_d("cvt.s64.u32 %d, %r0;", {{{kOnes32}, kOnes32}});
  expect_r("cvt.u32.u64 %r, %d0;", {{{0x1'2345'6789}, 0x2345'6789}});
  expect_r("cvt.u32.u16 %r, %h0;", {{{0xffff}, 0xffff}});
  expect_r("cvt.s32.s16 %r, %h0;", {{{0xffff}, kOnes32}});
  expect_h("cvt.u16.u32 %h, %r0;", {{{0x12'3456}, 0x3456}});
  // Registers that are wider than the types.
  expect_h("cvt.u8.u32 %h, %r0;", {{{0x1ff}, 0xff}});
  expect_h("cvt.s8.s32 %h, %r0;", {{{0x1ff}, 0xffff}});
  expect_r("cvt.u8.u32 %r, %r0;", {{{0x1234'5681}, 0x81}});
  expect_r("cvt.s8.s32 %r, %r0;", {{{0x1234'5681}, 0xffff'ff81}});
  expect_r("cvt.u32.u8 %r, %h0;", {{{0x1ff}, 0xff}});
  expect_r("cvt.s32.s8 %r, %h0;", {{{0x180}, 0xffff'ff80}});
  expect_d("cvt.s64.s16 %d, %d0;", {{{0x1234'8000}, 0xffff'ffff'ffff'8000}});
  expect_d("cvt.u16.u64 %d, %d0;", {{{0x1234'8000}, 0x8000}});
  expect_h("cvt.sat.u8.s32 %h, %r0;", {{{300}, 255}, {{kOnes32}, 0}, {{77}, 77}});
  expect_h("cvt.sat.s16.s32 %h, %r0;", {{{40000}, 0x7fff}, {{kMin32}, 0x8000}});
  expect_r("cvt.sat.s32.u64 %r, %d0;", {{{kOnes64}, 0x7fff'ffff}});
  expect_d("cvt.sat.u64.s64 %d, %d0;", {{{kOnes64}, 0}, {{kMin64 - 1}, kMin64 - 1}});
}

TEST(AluConvert, IntegersToFloats) {
  expect_r("cvt.rn.f32.s32 %r, %r0;",
           {{{kOnes32}, f(-1)}, {{0x100'0001}, f(0x1p24f)}, {{0x100'0003}, f(0x1.000004p24f)}});
  expect_r("cvt.rn.f32.u32 %r, %r0;", {{{kOnes32}, f(0x1p32f)}});
  expect_r("cvt.rz.f32.u32 %r, %r0;", {{{kOnes32}, f(0x1.fffffep31f)}});
  expect_r("cvt.rp.f32.s32 %r, %r0;",
           {{{0x100'0001}, f(0x1.000002p24f)}, {{0xfeff'ffff}, f(-0x1p24f)}});
  expect_r("cvt.rm.f32.s32 %r, %r0;",
           {{{0x100'0001}, f(0x1p24f)}, {{0xfeff'ffff}, f(-0x1.000002p24f)}});
  expect_r("cvt.rn.f32.u64 %r, %d0;", {{{0x8000'0080'0000'0001}, f(0x1.000002p63f)},
                                       {{0x8000'0080'0000'0000}, f(0x1p63f)},
                                       {{kOnes64}, f(0x1p64f)}});
  expect_r("cvt.rn.f32.s64 %r, %d0;", {{{kMin64}, f(-0x1p63f)}});
  expect_d("cvt.rn.f64.s64 %d, %d0;", {{{kOnes64}, d(-1)}, {{0x20'0000'0000'0001}, d(0x1p53)}});
  expect_d("cvt.rz.f64.u64 %d, %d0;", {{{kOnes64}, d(0x1.fffffffffffffp63)}});
  expect_d("cvt.rn.f64.s32 %d, %r0;", {{{kMin32}, d(-0x1p31)}});
  expect_h("cvt.rn.f16.s32 %h, %r0;", {{{2049}, h(2048)}, {{2051}, h(2052)}, {{65520}, 0x7c00}});
  expect_h("cvt.rn.f16.u16 %h, %h0;", {{{65519}, h(65504)}});
  expect_h("cvt.rn.bf16.u32 %h, %r0;", {{{257}, b(256)}, {{0x101'0001}, b(0x1.02p24f)}});
  expect_h("cvt.rn.bf16.s8 %h, %h0;", {{{0x80}, b(-128)}});
}

TEST(AluConvert, FloatsToIntegers) {
  const auto expect = [](const std::string& mode, std::uint64_t a, std::uint64_t b,
                         std::uint64_t c) {
    expect_r("cvt." + mode + ".s32.f32 %r, %r0;",
             {{{f(2.5f)}, a}, {{f(-2.5f)}, b}, {{f(3.5f)}, c}});
  };
  expect("rni", 2, kOnes32 - 1, 4);
  expect("rzi", 2, kOnes32 - 1, 3);
  expect("rmi", 2, kOnes32 - 2, 3);
  expect("rpi", 3, kOnes32 - 1, 4);
  expect_r("cvt.rzi.s32.f32 %r, %r0;",
           {{{f(3e9f)}, 0x7fff'ffff}, {{f(-kInfinity)}, kMin32}, {{kOtherNan}, 0}});
  expect_r("cvt.rzi.u32.f32 %r, %r0;",
           {{{f(-1)}, 0}, {{f(kInfinity)}, kOnes32}, {{f(3e9f)}, 3000000000}, {{kOtherNan}, 0}});
  expect_d("cvt.rzi.u64.f32 %d, %r0;",
           {{{f(0x1p63f)}, kMin64}, {{f(0x1p70f)}, kOnes64}, {{f(-1)}, 0}, {{kOtherNan}, kMin64}});
  expect_d("cvt.rni.s64.f64 %d, %d0;",
           {{{d(0x1p62 + 1024)}, 0x4000'0000'0000'0400}, {{d(-0.5)}, 0}, {{d(NAN)}, kMin64}});
  expect_r("cvt.rzi.s32.f64 %r, %d0;", {{{d(-1.9)}, kOnes32}, {{d(NAN)}, kMin32}});
  expect_h("cvt.rzi.s16.f32 %h, %r0;", {{{f(1e6f)}, 0x7fff}, {{f(-1)}, 0xffff}});
  expect_h("cvt.rni.u8.f32 %h, %r0;", {{{f(255.4f)}, 255}, {{f(256)}, 255}});
  expect_r("cvt.rni.s8.f32 %r, %r0;", {{{f(-200)}, 0xffff'ff80}});
  expect_r("cvt.rzi.ftz.u32.f32 %r, %r0;", {{{f(7.9f)}, 7}});
  expect_r("cvt.rpi.ftz.s32.f32 %r, %r0;", {{{1}, 0}});
  expect_r("cvt.rpi.s32.f32 %r, %r0;", {{{1}, 1}});
  expect_r("cvt.rni.s32.f16 %r, %h0;", {{{h(2.5f)}, 2}, {{0x7c00}, 0x7fff'ffff}});
  expect_r("cvt.rzi.s32.bf16 %r, %h0;", {{{b(-2.5f)}, kOnes32 - 1}});
}

TEST(AluConvert, FloatsToFloats) {
  expect_d("cvt.f64.f32 %d, %r0;",
           {{{f(-1.5f)}, d(-1.5)}, {{1}, d(0x1p-149)}, {{f(kInfinity)}, d(HUGE_VAL)}});
  expect_d("cvt.ftz.f64.f32 %d, %r0;", {{{1}, 0}, {{kMin32 | 1}, kMin64}});
  expect_r("cvt.rn.f32.f64 %r, %d0;", {{{d(1 + 0x1p-24)}, f(1)},
                                       {{d(1 + 0x1.8p-23)}, f(0x1.000004p0f)},
                                       {{d(1e300)}, f(kInfinity)},
                                       {{d(0x1.8p-149)}, 2},
                                       {{d(NAN)}, 0x7fff'ffff}});
  expect_r("cvt.rz.f32.f64 %r, %d0;",
           {{{d(1e300)}, 0x7f7f'ffff}, {{d(-(1 + 0x1.8p-23))}, f(-0x1.000002p0f)}});
  expect_r("cvt.rp.f32.f64 %r, %d0;",
           {{{d(-1e300)}, 0xff7f'ffff}, {{d(1e300)}, f(kInfinity)}, {{d(1e-300)}, 1}});
  expect_r("cvt.rm.f32.f64 %r, %d0;", {{{d(-1e-300)}, kMin32 | 1}, {{d(1e300)}, 0x7f7f'ffff}});
  expect_r("cvt.rn.ftz.f32.f64 %r, %d0;", {{{d(-0x1p-130)}, kMin32}});
  expect_r("cvt.sat.f32.f32 %r, %r0;",
           {{{f(2)}, f(1)}, {{f(-2)}, 0}, {{kOtherNan}, 0}, {{f(0.3f)}, f(0.3f)}});
  expect_r("cvt.rni.f32.f32 %r, %r0;",
           {{{f(2.5f)}, f(2)}, {{f(-0.4f)}, kMin32}, {{f(3.5f)}, f(4)}});
  expect_r("cvt.rmi.f32.f32 %r, %r0;", {{{f(-0.4f)}, f(-1)}});
  expect_d("cvt.rpi.f64.f64 %d, %d0;", {{{d(2.1)}, d(3)}, {{d(-0.5)}, kMin64}});
  expect_h("cvt.rz.f16.f32 %h, %r0;",
           {{{f(65535)}, h(65504)}, {{f(0x1.fp-25f)}, 0}, {{f(1e9f)}, h(65504)}});
  expect_h("cvt.rz.bf16.f32 %h, %r0;", {{{f(0x1.ffp0f)}, b(0x1.fep0f)}});
  expect_h("cvt.rn.relu.bf16.f32 %h, %r0;", {{{f(-1)}, 0}, {{f(1)}, b(1)}, {{kOtherNan}, 0x7fff}});
  expect_h("cvt.rn.satfinite.f16.f32 %h, %r0;",
           {{{f(1e9f)}, h(65504)}, {{f(-kInfinity)}, h(-65504)}});
  expect_h("cvt.rn.f16.f64 %h, %d0;",
           {{{d(1 + 0x1p-11 + 0x1p-40)}, h(0x1.004p0f)}, {{d(1 + 0x1p-11)}, h(1)}});
  expect_r("cvt.f32.bf16 %r, %h0;", {{{b(-3)}, f(-3)}, {{1}, 0x1'0000}});
  expect_d("cvt.f64.f16 %d, %h0;", {{{1}, d(0x1p-24)}});
}

TEST(AluConvert, Pairs) {
  expect_r("cvt.rn.bf16x2.f32 %r, %r0, %r1;", {{{f(1), f(-2)}, pair(b(1), b(-2))},
                                               {{f(257), f(259)}, pair(b(256), b(260))},
                                               {{kOtherNan, f(kInfinity)}, pair(0x7fff, 0x7f80)},
                                               {{0x7f7f'ffff, 0x8000}, pair(0x7f80, 0)},
                                               {{0x1'8000, 0x8001}, pair(2, 1)}});
  expect_r("cvt.rn.f16x2.f32 %r, %r0, %r1;", {{{f(1), f(-2)}, pair(h(1), h(-2))},
                                              {{f(2049), f(2051)}, pair(h(2048), h(2052))},
                                              {{f(65519.99f), f(65520)}, pair(h(65504), 0x7c00)},
                                              {{kOtherNan, f(-kInfinity)}, pair(0x7fff, 0xfc00)},
                                              {{f(0x1p-25f), f(0x1.8p-24f)}, pair(0, 2)}});
  expect_r("cvt.rz.bf16x2.f32 %r, %r0, %r1;", {{{f(259), f(-259)}, pair(b(258), b(-258))}});
  expect_r("cvt.rn.relu.f16x2.f32 %r, %r0, %r1;", {{{f(-1), f(3)}, pair(0, h(3))}});
  // 448 and 57344 are the largest; 0x7f is NaN, 0x7e and 0x7b are the largest numbers.
  expect_h("cvt.rn.satfinite.e4m3x2.f32 %h, %r0, %r1;", {{{f(1), f(-2)}, 0x38c0},
                                                         {{f(448), f(-449)}, 0x7efe},
                                                         {{f(1e30f), f(-kInfinity)}, 0x7efe},
                                                         {{f(480), kOtherNan}, 0x7e7f},
                                                         {{f(17), f(19)}, 0x585a},
                                                         {{f(0x1p-10f), f(0x1.8p-10f)}, 0x0001},
                                                         {{f(0x1.8p-9f), f(-0x1p-20f)}, 0x0280},
                                                         {{f(0x1.fp-7f), f(0x1p-6f)}, 0x0808}});
  expect_h("cvt.rn.satfinite.e5m2x2.f32 %h, %r0, %r1;", {{{f(1), f(-2)}, 0x3cc0},
                                                         {{f(57344), f(61440)}, 0x7b7b},
                                                         {{f(-kInfinity), kOtherNan}, 0xfb7f},
                                                         {{f(9), f(11)}, 0x484a},
                                                         {{f(0x1p-17f), f(0x1.8p-17f)}, 0x0001}});
  expect_h("cvt.rn.satfinite.relu.e4m3x2.f32 %h, %r0, %r1;", {{{f(-1), f(500)}, 0x007e}});
  expect_h("cvt.rn.satfinite.e4m3x2.f16x2 %h, %r0;", {{{pair(h(1), 0xfc00)}, 0x38fe}});
  expect_r("cvt.rn.f16x2.e4m3x2 %r, %h0;",
           {{{0x7eb8}, pair(h(448), h(-1))}, {{0x017f}, pair(h(0x1p-9f), 0x7fff)}});
  expect_r("cvt.rn.f16x2.e5m2x2 %r, %h0;", {{{0x7bbc}, pair(h(57344), h(-1))},
                                            {{0xfc01}, pair(0xfc00, 0x0100)},
                                            {{0x7e80}, pair(0x7fff, 0x8000)}});
  expect_r("cvt.rn.relu.f16x2.e4m3x2 %r, %h0;", {{{0xb838}, pair(0, h(1))}});
}

/// The finite numbers of a format, by its definition, in the order of their bits.
std::vector<double> numbers_of(int fraction_bits, int bias, std::uint64_t largest) {
  std::vector<double> numbers;
  for (std::uint64_t bits = 0; bits <= largest; ++bits) {
    const auto exponent = static_cast<int>(bits >> fraction_bits);
    const auto fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
    const double significand = std::ldexp(fraction, -fraction_bits) + (exponent == 0 ? 0 : 1);
    numbers.push_back(std::ldexp(significand, std::max(exponent, 1) - bias));
  }
  return numbers;
}

/// The bits of the nearest number; of two, those that are even.
std::uint64_t nearest(const std::vector<double>& numbers, double x) {
  const double magnitude = std::fabs(x);
  const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude);
  if (above == numbers.end()) return numbers.size() - 1;
  auto place = static_cast<std::uint64_t>(above - numbers.begin());
  if (place != 0) {
    const double down = magnitude - numbers[place - 1];
    const double up = *above - magnitude;
    if (down < up || (down == up && place % 2 == 1)) --place;
  }
  return place;
}

/// Floats around the numbers of a format and halfway between them, and any others.
std::vector<float> floats_for(const std::vector<double>& numbers) {
  std::vector<float> floats;
  std::mt19937 random(1);
  for (int i = 0; i < 1024; ++i) {
    const std::size_t k = random() % (numbers.size() - 1);
    const auto low = static_cast<float>(numbers[k]);
    const auto middle = static_cast<float>((numbers[k] + numbers[k + 1]) / 2);
    for (const float x :
         {low, middle, std::nextafter(middle, 0.0f), -std::nextafter(middle, 1e9f)}) {
      floats.push_back(x);
    }
    const float any = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (std::fabs(any) <= numbers.back()) floats.push_back(any);
  }
  return floats;
}

TEST(AluConvert, RoundsToTheNearestHalf) {
  const std::vector<double> numbers = numbers_of(10, 15, 0x7bff);
  std::vector<Row> rows;
  for (const float x : floats_for(numbers)) {
    rows.push_back({{f(x)}, nearest(numbers, x) | (std::signbit(x) ? 0x8000 : 0)});
  }
  expect_h("cvt.rn.f16.f32 %h, %r0;", rows);
  expect_h("cvt.rn.satfinite.f16.f32 %h, %r0;", rows);
}

TEST(AluConvert, RoundsToTheNearestBrain) {
  const std::vector<double> numbers = numbers_of(7, 127, 0x7f7f);
  std::vector<Row> rows;
  for (const float x : floats_for(numbers)) {
    rows.push_back({{f(x)}, nearest(numbers, x) | (std::signbit(x) ? 0x8000 : 0)});
  }
  expect_h("cvt.rn.bf16.f32 %h, %r0;", rows);
  expect_h("cvt.rn.satfinite.bf16.f32 %h, %r0;", rows);
}

TEST(AluConvert, RoundsToTheNearestByte) {
  const auto expect = [](const std::string& type, const std::vector<double>& numbers) {
    std::vector<Row> rows;
    for (const float x : floats_for(numbers)) {
      const std::uint64_t byte = nearest(numbers, x) | (std::signbit(x) ? 0x80 : 0);
      rows.push_back({{f(x), f(-x)}, byte << 8 | (byte ^ 0x80)});
    }
    expect_h("cvt.rn.satfinite." + type + ".f32 %h, %r0, %r1;", rows);
  };
  expect("e4m3x2", numbers_of(3, 7, 0x7e));
  expect("e5m2x2", numbers_of(2, 15, 0x7b));
}

TEST(AluConvert, AllHalvesAndBytesWiden) {
  const std::vector<double> halves = numbers_of(10, 15, 0x7bff);
  std::vector<Row> rows;
  for (std::uint64_t bits = 0; bits < halves.size(); bits += 3) {
    rows.push_back({{bits}, f(static_cast<float>(halves[bits]))});
    rows.push_back({{bits | 0x8000}, f(-static_cast<float>(halves[bits]))});
  }
  rows.push_back({{0x7c00}, f(kInfinity)});
  rows.push_back({{0xfc00}, f(-kInfinity)});
  rows.push_back({{0xfe00}, 0x7fff'ffff});
  expect_r("cvt.f32.f16 %r, %h0;", rows);
  const auto expect = [&](const std::string& type, const std::vector<double>& numbers) {
    std::vector<Row> bytes;
    for (std::uint64_t bits = 0; bits < numbers.size(); ++bits) {
      const std::uint64_t half = nearest(halves, numbers[bits]);
      EXPECT_EQ(halves[half], numbers[bits]);
      bytes.push_back({{bits << 8 | bits | 0x80}, pair(half, half | 0x8000)});
    }
    expect_r("cvt.rn.f16x2." + type + " %r, %h0;", bytes);
  };
  expect("e4m3x2", numbers_of(3, 7, 0x7e));
  expect("e5m2x2", numbers_of(2, 15, 0x7b));
}

}  // namespace
}  // namespace sonicmoe::emulator
