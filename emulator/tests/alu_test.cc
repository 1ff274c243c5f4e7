// Integer arithmetic, comparisons and moves, against values worked out from the PTX ISA.
#include "alu_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::uint64_t kMin32 = 0x8000'0000;
constexpr std::uint64_t kMax32 = 0x7fff'ffff;
constexpr std::uint64_t kOnes32 = 0xffff'ffff;
constexpr std::uint64_t kMin64 = 0x8000'0000'0000'0000;
constexpr std::uint64_t kMax64 = 0x7fff'ffff'ffff'ffff;
constexpr std::uint64_t kOnes64 = 0xffff'ffff'ffff'ffff;

TEST(Alu, Sums) {
  expect_r("add.s32 %r, %r0, %r1;",
           {{{1, 2}, 3}, {{kMax32, 1}, kMin32}, {{kOnes32, 1}, 0}, {{kMin32, kMin32}, 0}});
  expect_r("add.s32 %r, %r0, -5;", {{{3}, kOnes32 - 1}, {{5}, 0}});
  expect_r("add.sat.s32 %r, %r0, %r1;",
           {{{kMax32, 1}, kMax32}, {{kMin32, kOnes32}, kMin32}, {{2, 3}, 5}});
  expect_r("sub.sat.s32 %r, %r0, %r1;", {{{kMin32, 1}, kMin32}, {{kMax32, kOnes32}, kMax32}});
  expect_h("add.s16 %h, %h0, %h1;", {{{0x7fff, 1}, 0x8000}, {{0xffff, 2}, 1}});
  expect_h("sub.u16 %h, %h0, %h1;", {{{0, 1}, 0xffff}});
  expect_d("add.u64 %d, %d0, %d1;", {{{kOnes64, 1}, 0}, {{0xffff'ffff, 1}, 0x1'0000'0000}});
  expect_d("sub.s64 %d, %d0, %d1;", {{{0, 1}, kOnes64}, {{kMin64, 1}, kMax64}});
  expect_r("add.u16x2 %r, %r0, %r1;", {{{0xffff'ffff, 0x0001'0002}, 0x0000'0001}});
}

TEST(Alu, Products) {
  expect_r("mul.lo.s32 %r, %r0, %r1;",
           {{{0x10000, 0x10000}, 0}, {{kOnes32, 7}, 0xffff'fff9}, {{46341, 46341}, 0x8000'1219}});
  expect_r("mul.hi.u32 %r, %r0, %r1;",
           {{{kOnes32, kOnes32}, 0xffff'fffe}, {{0x8000'0000, 2}, 1}, {{3, 5}, 0}});
  expect_r("mul.hi.s32 %r, %r0, %r1;",
           {{{kOnes32, kOnes32}, 0}, {{kMin32, kMin32}, 0x4000'0000}, {{kOnes32, 1}, kOnes32}});
  expect_d("mul.hi.u64 %d, %d0, %d1;", {{{kOnes64, kOnes64}, kOnes64 - 1}, {{kMin64, 4}, 2}});
  expect_d(
      "mul.hi.s64 %d, %d0, %d1;",
      {{{kOnes64, kOnes64}, 0}, {{kMin64, kMin64}, 0x4000'0000'0000'0000}, {{kMin64, 2}, kOnes64}});
  expect_d("mul.lo.s64 %d, %d0, %d1;",
           {{{0x1'0000'0001, 0x1'0000'0001}, 0x2'0000'0001}, {{kOnes64, 3}, kOnes64 - 2}});
  expect_d("mul.wide.s32 %d, %r0, %r1;",
           {{{kOnes32, 2}, kOnes64 - 1}, {{kMin32, kMin32}, 0x4000'0000'0000'0000}});
  expect_d("mul.wide.u32 %d, %r0, %r1;", {{{kOnes32, kOnes32}, 0xffff'fffe'0000'0001}});
  expect_r("mul.wide.u16 %r, %h0, %h1;", {{{0xffff, 0xffff}, 0xfffe'0001}});
  expect_r("mul.wide.s16 %r, %h0, %h1;",
           {{{0xffff, 3}, 0xffff'fffd}, {{0x8000, 0x8000}, 0x4000'0000}});
  expect_h("mul.lo.u16 %h, %h0, %h1;", {{{0xffff, 0xffff}, 1}});
  expect_h("mul.hi.u16 %h, %h0, %h1;", {{{0xffff, 0xffff}, 0xfffe}});
  expect_h("mul.hi.s16 %h, %h0, %h1;", {{{0xffff, 1}, 0xffff}});
  expect_r("mul24.lo.u32 %r, %r0, %r1;", {{{0xff00'0003, 0x0100'0005}, 15}});
  expect_r("mul24.hi.u32 %r, %r0, %r1;", {{{0xff'ffff, 0xff'ffff}, 0xffff'fe00}});
  expect_r("mul24.lo.s32 %r, %r0, %r1;", {{{0x00ff'ffff, 5}, 0xffff'fffb}});
}

TEST(Alu, ProductsWithSums) {
  expect_r("mad.lo.s32 %r, %r0, %r1, %r2;", {{{3, 4, 5}, 17}, {{kOnes32, 4, 1}, 0xffff'fffd}});
  expect_r("mad.hi.u32 %r, %r0, %r1, %r2;", {{{kOnes32, kOnes32, 3}, 1}});
  expect_r("mad.hi.s32 %r, %r0, %r1, %r2;", {{{kOnes32, 1, 1}, 0}});
  expect_d("mad.wide.s32 %d, %r0, %r1, %d2;", {{{kOnes32, 8, 100}, 92}});
  expect_d("mad.wide.u32 %d, %r0, %r1, %d2;", {{{kOnes32, 2, 2}, 0x2'0000'0000}});
  expect_d("mad.lo.s64 %d, %d0, %d1, %d2;", {{{kOnes64, 5, 6}, 1}});
  expect_h("mad.lo.u16 %h, %h0, %h1, %h2;", {{{0xffff, 0xffff, 0xffff}, 0}});
  expect_r("mad24.lo.s32 %r, %r0, %r1, %r2;", {{{0x00ff'ffff, 5, 7}, 2}});
}

TEST(Alu, Quotients) {
  expect_r("div.s32 %r, %r0, %r1;", {{{7, kOnes32 - 1}, 0xffff'fffd},
                                     {{kOnes32 - 6, 2}, 0xffff'fffd},
                                     {{kMin32, kOnes32}, kMin32}});
  expect_r("div.u32 %r, %r0, %r1;", {{{kOnes32, 2}, kMax32}, {{1, kOnes32}, 0}});
  expect_r("rem.s32 %r, %r0, %r1;",
           {{{7, kOnes32 - 1}, 1}, {{kOnes32 - 6, 2}, kOnes32}, {{kMin32, kOnes32}, 0}});
  expect_r("rem.u32 %r, %r0, %r1;", {{{kOnes32, 10}, 5}});
  expect_d("div.s64 %d, %d0, %d1;",
           {{{kMin64, kOnes64}, kMin64}, {{kOnes64 - 99, 7}, kOnes64 - 13}});
  expect_d("div.u64 %d, %d0, %d1;", {{{kOnes64, 3}, 0x5555'5555'5555'5555}});
  expect_d("rem.s64 %d, %d0, %d1;", {{{kOnes64 - 99, 7}, kOnes64 - 1}, {{kMin64, kOnes64}, 0}});
  expect_h("div.s16 %h, %h0, %h1;", {{{0x8000, 0xffff}, 0x8000}, {{0xfff9, 2}, 0xfffd}});
  EXPECT_THROW(run_alu("div.u32 %r, %r0, %r1;", Result::kR, {{{1, 0}, 0}}), Fault);
}

TEST(Alu, SignsAndExtremes) {
  expect_r("abs.s32 %r, %r0;", {{{kOnes32}, 1}, {{kMin32}, kMin32}, {{5}, 5}});
  expect_r("neg.s32 %r, %r0;", {{{1}, kOnes32}, {{kMin32}, kMin32}});
  expect_d("neg.s64 %d, %d0;", {{{1}, kOnes64}});
  expect_h("abs.s16 %h, %h0;", {{{0x8000}, 0x8000}, {{0xfffe}, 2}});
  expect_r("min.s32 %r, %r0, %r1;", {{{kMin32, 1}, kMin32}, {{1, kOnes32}, kOnes32}});
  expect_r("min.u32 %r, %r0, %r1;", {{{kMin32, 1}, 1}});
  expect_r("max.s32 %r, %r0, %r1;", {{{kMin32, 1}, 1}});
  expect_r("max.u32 %r, %r0, %r1;", {{{kMin32, 1}, kMin32}});
  expect_d("max.u64 %d, %d0, %d1;", {{{kMin64, 1}, kMin64}});
  expect_d("min.s64 %d, %d0, %d1;", {{{kMin64, 1}, kMin64}});
  expect_r("max.u16x2 %r, %r0, %r1;", {{{0x8000'0001, 0x7fff'0002}, 0x8000'0002}});
  expect_r("max.s16x2 %r, %r0, %r1;", {{{0x8000'0001, 0x7fff'0002}, 0x7fff'0002}});
  expect_r("min.s16x2 %r, %r0, %r1;", {{{0x8000'0001, 0x7fff'ffff}, 0x8000'ffff}});
  expect_r("max.relu.s32 %r, %r0, %r1;", {{{kOnes32, kMin32}, 0}, {{kOnes32, 3}, 3}});
  expect_r("sad.u32 %r, %r0, %r1, %r2;", {{{3, 10, 100}, 107}, {{10, 3, 100}, 107}});
}

TEST(Alu, Logic) {
  expect_r("and.b32 %r, %r0, %r1;", {{{0xff00'ff00, 0x0ff0'0ff0}, 0x0f00'0f00}});
  expect_r("or.b32 %r, %r0, %r1;", {{{0xff00'ff00, 0x0ff0'0ff0}, 0xfff0'fff0}});
  expect_d("xor.b64 %d, %d0, %d1;", {{{kOnes64, 0xff}, kOnes64 - 0xff}});
  expect_h("not.b16 %h, %h0;", {{{0x1234}, 0xedcb}});
  expect_r("cnot.b32 %r, %r0;", {{{0}, 1}, {{2}, 0}});
  expect_p("and.pred %p, %p0, %p1;", {{{0, 0}, 0}, {{0, 1}, 0}, {{1, 0}, 0}, {{1, 1}, 1}});
  expect_p("or.pred %p, %p0, %p1;", {{{0, 0}, 0}, {{0, 1}, 1}, {{1, 0}, 1}, {{1, 1}, 1}});
  expect_p("xor.pred %p, %p0, %p1;", {{{0, 0}, 0}, {{0, 1}, 1}, {{1, 0}, 1}, {{1, 1}, 0}});
  expect_p("not.pred %p, %p0;", {{{0}, 1}, {{1}, 0}});
  const Row all_rows{{0xf0f0'f0f0, 0xcccc'cccc, 0xaaaa'aaaa}, 0};
  for (const std::uint64_t table : {0x00u, 0x80u, 0xfeu, 0x96u, 0xeau, 0x1bu, 0xffu}) {
    expect_r("lop3.b32 %r, %r0, %r1, %r2, " + std::to_string(table) + ";",
             {{all_rows.in, table * 0x0101'0101}});
  }
}

TEST(Alu, Shifts) {
  expect_r("shl.b32 %r, %r0, %r1;",
           {{{1, 31}, kMin32}, {{kOnes32, 32}, 0}, {{kOnes32, 0x1'0000'0000 - 1}, 0}, {{3, 0}, 3}});
  expect_r("shr.u32 %r, %r0, %r1;", {{{kMin32, 31}, 1}, {{kOnes32, 32}, 0}, {{kOnes32, 33}, 0}});
  expect_r("shr.s32 %r, %r0, %r1;", {{{kMin32, 31}, kOnes32},
                                     {{kMin32, 40}, kOnes32},
                                     {{kMax32, 99}, 0},
                                     {{kMin32, 1}, 0xc000'0000}});
  expect_d("shl.b64 %d, %d0, %r1;", {{{1, 63}, kMin64}, {{1, 64}, 0}, {{1, 33}, 0x2'0000'0000}});
  expect_d("shr.s64 %d, %d0, %r1;", {{{kMin64, 63}, kOnes64}, {{kMin64, 200}, kOnes64}});
  expect_d("shr.u64 %d, %d0, %r1;", {{{kMin64, 63}, 1}, {{kMin64, 64}, 0}});
  expect_h("shl.b16 %h, %h0, %r1;", {{{0xffff, 15}, 0x8000}, {{0xffff, 16}, 0}});
  expect_h("shr.s16 %h, %h0, %r1;", {{{0x8000, 3}, 0xf000}, {{0x8000, 16}, 0xffff}});
  expect_h("shr.u16 %h, %h0, %r1;", {{{0x8000, 15}, 1}, {{0x8000, 16}, 0}});
  expect_r("shf.l.wrap.b32 %r, %r0, %r1, %r2;",
           {{{0x89ab'cdef, 0x0123'4567, 8}, 0x2345'6789}, {{1, 2, 32}, 2}, {{1, 2, 0}, 2}});
  expect_r("shf.l.clamp.b32 %r, %r0, %r1, %r2;", {{{1, 2, 32}, 1}, {{1, 2, 99}, 1}});
  expect_r("shf.r.wrap.b32 %r, %r0, %r1, %r2;",
           {{{0x89ab'cdef, 0x0123'4567, 8}, 0x6789'abcd}, {{1, 2, 32}, 1}});
  expect_r("shf.r.clamp.b32 %r, %r0, %r1, %r2;", {{{1, 2, 40}, 2}});
}

TEST(Alu, BitFields) {
  expect_r("bfe.u32 %r, %r0, %r1, %r2;", {{{0x1234'5678, 8, 8}, 0x56},
                                          {{0x1234'5678, 0, 0}, 0},
                                          {{0x1234'5678, 24, 99}, 0x12},
                                          {{kOnes32, 32, 4}, 0},
                                          {{0x1234'5678, 0x108, 0x104}, 6}});
  expect_r("bfe.s32 %r, %r0, %r1, %r2;", {{{0x0000'0080, 4, 4}, 0xffff'fff8},
                                          {{0x0000'0080, 4, 5}, 8},
                                          {{kMin32, 40, 4}, kOnes32},
                                          {{kMin32, 28, 8}, 0xffff'fff8},
                                          {{kMin32, 3, 0}, 0}});
  expect_d("bfe.u64 %d, %d0, %r1, %r2;", {{{kOnes64, 60, 64}, 15}, {{kOnes64, 0, 64}, kOnes64}});
  expect_d("bfe.s64 %d, %d0, %r1, %r2;", {{{kMin64, 62, 2}, kOnes64 - 1}});
  expect_r("bfi.b32 %r, %r0, %r1, %r2, %r3;", {{{0xff, 0, 8, 4}, 0xf00},
                                               {{0, kOnes32, 8, 4}, 0xffff'f0ff},
                                               {{0x12, 0xabcd, 0, 0}, 0xabcd},
                                               {{kOnes32, 0, 28, 8}, 0xf000'0000},
                                               {{0x1234, 0xabcd, 0, 32}, 0x1234},
                                               {{0x1234, 0xabcd, 32, 4}, 0xabcd}});
  expect_d("bfi.b64 %d, %d0, %d1, %r2, %r3;",
           {{{0x1, kOnes64, 32, 32}, 0x1'ffff'ffff}, {{5, 7, 0, 64}, 5}});
  expect_r("bfind.u32 %r, %r0;", {{{0}, kOnes32}, {{1}, 0}, {{kOnes32}, 31}});
  expect_r("bfind.s32 %r, %r0;", {{{kOnes32}, kOnes32}, {{kMin32}, 30}, {{4}, 2}});
  expect_r("bfind.shiftamt.u32 %r, %r0;", {{{0}, kOnes32}, {{1}, 31}, {{kOnes32}, 0}});
  expect_r("bfind.u64 %r, %d0;", {{{kMin64}, 63}, {{0}, kOnes32}});
  expect_r("bfind.shiftamt.s64 %r, %d0;", {{{kMin64}, 1}});
  expect_r("popc.b32 %r, %r0;", {{{kOnes32}, 32}, {{0}, 0}, {{0x1010}, 2}});
  expect_r("popc.b64 %r, %d0;", {{{kOnes64}, 64}});
  expect_r("clz.b32 %r, %r0;", {{{0}, 32}, {{1}, 31}, {{kOnes32}, 0}});
  expect_r("clz.b64 %r, %d0;", {{{0}, 64}, {{1}, 63}});
  expect_r("brev.b32 %r, %r0;", {{{1}, kMin32}, {{0x1234'5678}, 0x1e6a'2c48}});
  expect_d("brev.b64 %d, %d0;", {{{1}, kMin64}, {{0x1234'5678}, 0x1e6a'2c48'0000'0000}});
}

TEST(Alu, Permutations) {
  constexpr std::uint64_t kA = 0x8322'1100;  // bytes 0 to 3; byte 3 is negative
  constexpr std::uint64_t kB = 0x7766'5544;
  expect_r("prmt.b32 %r, %r0, %r1, %r2;", {{{kA, kB, 0x3210}, kA},
                                           {{kA, kB, 0x7654}, kB},
                                           {{kA, kB, 0x0527}, 0x0055'2277},
                                           {{kA, kB, 0xb0f3}, 0xff00'0083},
                                           {{kA, kB, 0xffff'3210}, kA}});
  constexpr std::uint64_t kC = 0x3322'1100;
  expect_r("prmt.b32.f4e %r, %r0, %r1, %r2;",
           {{{kC, kB, 0}, kC}, {{kC, kB, 1}, 0x4433'2211}, {{kC, kB, 7}, 0x6655'4433}});
  expect_r("prmt.b32.b4e %r, %r0, %r1, %r2;",
           {{{kC, kB, 0}, 0x5566'7700}, {{kC, kB, 1}, 0x6677'0011}, {{kC, kB, 3}, 0x0011'2233}});
  expect_r("prmt.b32.rc8 %r, %r0, %r1, %r2;", {{{kC, kB, 2}, 0x2222'2222}});
  expect_r("prmt.b32.ecl %r, %r0, %r1, %r2;",
           {{{kC, kB, 1}, 0x3322'1111}, {{kC, kB, 2}, 0x3322'2222}});
  expect_r("prmt.b32.ecr %r, %r0, %r1, %r2;",
           {{{kC, kB, 1}, 0x1111'1100}, {{kC, kB, 2}, 0x2222'1100}});
  expect_r("prmt.b32.rc16 %r, %r0, %r1, %r2;",
           {{{kC, kB, 0}, 0x1100'1100}, {{kC, kB, 1}, 0x3322'3322}});
}

TEST(Alu, IntegerComparisons) {
  const std::vector<Row> pairs{{{1, 2}, 0}, {{2, 2}, 0}, {{kMin32, 1}, 0}};
  const auto expect = [&](const std::string& test, std::uint64_t a, std::uint64_t b,
                          std::uint64_t c) {
    expect_p("setp." + test + " %p, %r0, %r1;",
             {{pairs[0].in, a}, {pairs[1].in, b}, {pairs[2].in, c}});
    expect_q("setp." + test + " %p|%q, %r0, %r1;",
             {{pairs[0].in, 1 - a}, {pairs[1].in, 1 - b}, {pairs[2].in, 1 - c}});
  };
  expect("eq.s32", 0, 1, 0);
  expect("ne.b32", 1, 0, 1);
  expect("lt.s32", 1, 0, 1);
  expect("lt.u32", 1, 0, 0);
  expect("le.s32", 1, 1, 1);
  expect("gt.s32", 0, 0, 0);
  expect("gt.u32", 0, 0, 1);
  expect("ge.s32", 0, 1, 0);
  expect("lo.u32", 1, 0, 0);
  expect("ls.u32", 1, 1, 0);
  expect("hi.u32", 0, 0, 1);
  expect("hs.u32", 0, 1, 1);
  expect_p("setp.lt.s64 %p, %d0, %d1;", {{{kMin64, 1}, 1}, {{1, kMin64}, 0}});
  expect_p("setp.lt.u64 %p, %d0, %d1;", {{{kMin64, 1}, 0}});
  expect_p("setp.lt.s16 %p, %h0, %h1;", {{{0x8000, 1}, 1}});
  expect_p("setp.ge.u16 %p, %h0, 32768;", {{{0x8000}, 1}, {{0x7fff}, 0}});
}

TEST(Alu, JoinedComparisons) {
  const auto rows = [](std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
    return std::vector<Row>{{{1, 2, 0}, a}, {{1, 2, 1}, b}, {{2, 1, 0}, c}, {{2, 1, 1}, d}};
  };
  expect_p("setp.lt.and.s32 %p, %r0, %r1, %p2;", rows(0, 1, 0, 0));
  expect_p("setp.lt.or.s32 %p, %r0, %r1, %p2;", rows(1, 1, 0, 1));
  expect_p("setp.lt.xor.s32 %p, %r0, %r1, %p2;", rows(1, 0, 0, 1));
  expect_p("setp.lt.and.s32 %p, %r0, %r1, !%p2;", rows(1, 0, 0, 0));
  expect_q("setp.lt.and.s32 %p|%q, %r0, %r1, %p2;", rows(0, 0, 0, 1));
  expect_q("setp.lt.or.s32 _|%q, %r0, %r1, !%p2;", rows(1, 0, 1, 1));
  expect_r("set.lt.u32.s32 %r, %r0, %r1;", {{{1, 2}, kOnes32}, {{2, 1}, 0}});
  expect_r("set.lt.f32.s32 %r, %r0, %r1;", {{{1, 2}, f(1)}, {{2, 1}, 0}});
  expect_r("set.lt.and.u32.f32 %r, %r0, %r1, %p2;",
           {{{f(1), f(2), 1}, kOnes32}, {{f(1), f(2), 0}, 0}});
}

TEST(Alu, FloatComparisons) {
  constexpr std::uint64_t kNan = 0x7fc0'0000;
  const std::vector<std::vector<std::uint64_t>> pairs{
      {f(1), f(2)}, {f(2), f(1)}, {f(0), f(-0.0f)}, {kNan, f(1)}, {f(1), kNan}};
  const auto expect = [&](const std::string& test, const std::string& results) {
    std::vector<Row> rows;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      rows.push_back({pairs[i], static_cast<std::uint64_t>(results[i] - '0')});
    }
    expect_p("setp." + test + ".f32 %p, %r0, %r1;", rows);
  };
  expect("eq", "00100");
  expect("ne", "11000");
  expect("lt", "10000");
  expect("le", "10100");
  expect("gt", "01000");
  expect("ge", "01100");
  expect("equ", "00111");
  expect("neu", "11011");
  expect("ltu", "10011");
  expect("leu", "10111");
  expect("gtu", "01011");
  expect("geu", "01111");
  expect("num", "11100");
  expect("nan", "00011");
  const std::vector<Row> denormals{{{1, 2}, 1}};
  expect_p("setp.lt.f32 %p, %r0, %r1;", denormals);
  expect_p("setp.eq.ftz.f32 %p, %r0, %r1;", denormals);
  expect_q("setp.lt.f32 %p|%q, %r0, %r1;", {{{kNan, f(1)}, 1}});
  expect_p("setp.lt.f64 %p, %d0, %d1;", {{{d(1), d(2)}, 1}, {{d(1), kMax64}, 0}});
  expect_p("setp.gt.f16 %p, %h0, %h1;", {{{0x0001, 0x8001}, 1}, {{0x7e00, 0}, 0}});
  expect_p("setp.leu.bf16 %p, %h0, %h1;", {{{0x3f80, 0x4000}, 1}, {{0x7fc0, 0}, 1}});
}

TEST(Alu, Choices) {
  expect_r("selp.b32 %r, %r0, %r1, %p2;", {{{7, 8, 1}, 7}, {{7, 8, 0}, 8}});
  expect_d("selp.b64 %d, %d0, %d1, %p2;", {{{kMin64, 8, 1}, kMin64}, {{7, kMin64, 0}, kMin64}});
  expect_h("selp.u16 %h, %h0, -1, %p2;", {{{7, 0, 1}, 7}, {{7, 0, 0}, 0xffff}});
  expect_r("selp.f32 %r, %r0, 0f3F800000, %p2;", {{{7, 0, 0}, f(1)}});
  expect_r("slct.b32.s32 %r, %r0, %r1, %r2;", {{{7, 8, 0}, 7}, {{7, 8, kOnes32}, 8}});
  expect_d("slct.u64.f32 %d, %d0, %d1, %r2;", {{{7, 8, f(-0.0f)}, 7},
                                               {{7, 8, f(-1)}, 8},
                                               {{7, 8, 0x7fc0'0000}, 8},
                                               {{7, 8, 0x8000'0001}, 8}});
  expect_d("slct.ftz.u64.f32 %d, %d0, %d1, %r2;", {{{7, 8, 0x8000'0001}, 7}});
  const auto expect = [](const std::string& test, const std::string& results) {
    constexpr std::uint64_t kInputs[] = {0x3f80'0000, 0x8000'0000, 0x8000'0001, 0xff80'0000,
                                         0xffc0'0000};
    std::vector<Row> rows;
    for (std::size_t i = 0; i < results.size(); ++i) {
      rows.push_back({{kInputs[i]}, static_cast<std::uint64_t>(results[i] - '0')});
    }
    expect_p("testp." + test + ".f32 %p, %r0;", rows);
  };
  expect("finite", "11100");
  expect("infinite", "00010");
  expect("number", "11110");
  expect("notanumber", "00001");
  expect("normal", "11000");
  expect("subnormal", "00100");
}

TEST(Alu, Moves) {
  expect_h("mov.b16 %h, %h0;", {{{0x1234}, 0x1234}});
  expect_r("mov.f32 %r, 0fBF800000;", {{{}, f(-1)}});
  expect_d("mov.f64 %d, 0dBFF0000000000000;", {{{}, d(-1)}});
  expect_d("mov.u64 %d, -2;", {{{}, kOnes64 - 1}});
  expect_p("mov.pred %p, %p0;", {{{0}, 0}, {{1}, 1}});
  expect_p("mov.pred %p, -1;", {{{}, 1}});
  expect_r("mov.u32 %r, %ntid.x;", {{{}, 32}});
  expect_d("mov.b64 %d, {%r0, %r1};", {{{0x1111'1111, 0x2222'2222}, 0x2222'2222'1111'1111}});
  expect_d("mov.b64 %d, {%h0, %h1, %h2, %h3};", {{{1, 2, 3, 4}, 0x0004'0003'0002'0001}});
  expect_r("mov.b32 %r, {0, %h0};", {{{0x3f80}, f(1)}});
  expect_r("mov.b64 {%r, _}, %d0;", {{{0x2222'2222'1111'1111}, 0x1111'1111}});
  expect_r("mov.b64 {_, %r}, %d0;", {{{0x2222'2222'1111'1111}, 0x2222'2222}});
  expect_h("mov.b32 {_, %h}, %r0;", {{{0x2222'1111}, 0x2222}});
  expect_h("mov.b64 {_, _, %h, _}, %d0;", {{{0x0004'0003'0002'0001}, 3}});
}

TEST(Alu, Clocks) {
  const auto now = run_alu("mov.u64 %d, %globaltimer;", Result::kD, {{{}, 0}});
  const auto later = run_alu("mov.u64 %d, %globaltimer;", Result::kD, {{{}, 0}});
  EXPECT_GT(later[0], now[0]);
  EXPECT_EQ(now[0], now[31]);
  const auto upper = run_alu("mov.u32 %r, %globaltimer_hi;", Result::kR, {{{}, 0}});
  EXPECT_GE(upper[0], now[0] >> 32);
}

TEST(Alu, Addresses) {
  constexpr std::uint64_t kRank = std::uint64_t{1} << kRankShift;
  expect_d("cvta.shared.u64 %d, %d0;", {{{64}, kSharedWindow + 64}});
  expect_d("cvta.to.shared.u64 %d, %d0;",
           {{{kSharedWindow + 64}, 64}, {{kSharedWindow + 2 * kRank}, 2 * kRank}});
  expect_d("cvta.local.u64 %d, %d0;", {{{8}, kLocalWindow + 8}});
  expect_d("cvta.to.local.u64 %d, %d0;", {{{kLocalWindow + 8}, 8}});
  expect_d("cvta.to.global.u64 %d, %d0;", {{{0x7fff'1234}, 0x7fff'1234}});
  expect_d("cvta.param.u64 %d, %d0;", {{{0x7fff'1234}, 0x7fff'1234}});
  const std::vector<std::uint64_t> addresses{0x7fff'1234, kSharedWindow + 4, kSharedWindow + kRank,
                                             kSharedWindow + 2 * kRank, kLocalWindow + 4};
  const auto expect = [&](const std::string& space, const std::string& results) {
    std::vector<Row> rows;
    for (std::size_t i = 0; i < addresses.size(); ++i) {
      rows.push_back({{addresses[i]}, static_cast<std::uint64_t>(results[i] - '0')});
    }
    expect_p("isspacep." + space + " %p, %d0;", rows);
  };
  expect("global", "10000");
  expect("shared", "01100");
  expect("shared::cta", "01100");
  expect("shared::cluster", "01110");
  expect("local", "00001");
}

TEST(Alu, WhatIsNotKnownFaultsOnlyWhenItRuns) {
  EXPECT_THROW(run_alu("add.cc.s32 %r, %r0, %r1;", Result::kR, {{{1, 1}, 0}}), Fault);
  EXPECT_THROW(run_alu("add.rz.f32 %r, %r0, %r1;", Result::kR, {{{1, 1}, 0}}), Fault);
  EXPECT_NO_THROW(run_alu("@%p0 add.rz.f32 %r, %r0, %r1;", Result::kR, {{{0, 0}, 0}}));
}

}  // namespace
}  // namespace sonicmoe::emulator
