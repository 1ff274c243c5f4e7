// One instruction on many inputs, for the tests of the arithmetic opcodes.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "kernel_fixture.h"

namespace sonicmoe::emulator {

/// Up to four inputs and the expected result.
struct Row {
  std::vector<std::uint64_t> in;
  std::uint64_t out;
};

constexpr std::uint64_t kUntouched = 0xcccc'cccc'cccc'cccc;
constexpr std::size_t kInputs = 4;
constexpr std::size_t kResults = 5;

/// The kernel around an instruction. Input k is in %hk (16 bits), %rk (32), %dk (64) and %pk (its
/// last bit). The result is expected in %h, %r, %d, %p or %q. %odd: the lane's number is odd.
inline std::string alu_kernel(const std::string& instruction) {
  std::string text = R"(.visible .entry test(.param .u64 out, .param .u64 in) {
.reg .pred %p, %q, %odd, %p0, %p1, %p2, %p3;
.reg .b16 %h, %h0, %h1, %h2, %h3;
.reg .b32 %r, %r0, %r1, %r2, %r3, %lane;
.reg .b64 %d, %d0, %d1, %d2, %d3, %from, %to, %offset;
ld.param.u64 %to, [out];
ld.param.u64 %from, [in];
mov.u32 %lane, %tid.x;
mul.wide.u32 %offset, %lane, 8;
add.s64 %to, %to, %offset;
add.s64 %from, %from, %offset;
and.b32 %r, %lane, 1;
setp.ne.u32 %odd, %r, 0;
)";
  for (std::size_t k = 0; k < kInputs; ++k) {
    const std::string n = std::to_string(k);
    const std::string at = ", [%from+" + std::to_string(256 * k) + "];\n";
    text += "ld.global.u16 %h" + n + at + "ld.global.u64 %d" + n + at + "ld.global.u32 %r" + n + at;
    text += "and.b32 %r, %r" + n + ", 1;\nsetp.ne.u32 %p" + n + ", %r, 0;\n";
  }
  return text + R"(
mov.b16 %h, 0xcccc;
mov.b32 %r, 0xcccccccc;
mov.b64 %d, 0xcccccccccccccccc;
setp.ne.u32 %p, %lane, %lane;
setp.ne.u32 %q, %lane, %lane;
)" + instruction +
         R"(
st.global.u16 [%to], %h;
st.global.u32 [%to+256], %r;
st.global.u64 [%to+512], %d;
selp.b32 %r, 1, 0, %p;
st.global.u32 [%to+768], %r;
selp.b32 %r, 1, 0, %q;
st.global.u32 [%to+1024], %r;
ret;
}
)";
}

enum class Result : std::size_t { kH, kR, kD, kP, kQ };

inline std::uint64_t untouched(Result result) {
  switch (result) {
    case Result::kH:
      return kUntouched & 0xffff;
    case Result::kR:
      return kUntouched & 0xffff'ffff;
    case Result::kD:
      return kUntouched;
    default:
      return 0;
  }
}

/// The results of all lanes; lane i gets row i modulo the number of rows.
inline std::vector<std::uint64_t> run_alu(const std::string& instruction, Result result,
                                          const std::vector<Row>& rows) {
  Arrays memory;
  std::vector<std::uint64_t> in(kInputs * kLanes);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const Row& row = rows[lane % rows.size()];
    for (std::size_t k = 0; k < row.in.size(); ++k) in[k * kLanes + lane] = row.in[k];
  }
  const std::uint64_t* from = memory.add(in);
  const std::uint64_t* to = memory.add(std::vector<std::uint64_t>(kResults * kLanes));
  run_kernel(alu_kernel(instruction), {}, memory, {word_of(to), word_of(from)});
  const std::uint64_t* const first = to + static_cast<std::size_t>(result) * kLanes;
  return {first, first + kLanes};
}

/// Runs the instruction by all lanes, and then by the odd lanes alone: the even lanes must keep
/// their registers.
inline void expect_rows(const std::string& instruction, Result result,
                        const std::vector<Row>& rows) {
  for (std::size_t first = 0; first < rows.size(); first += kLanes) {
    const std::size_t end = std::min(rows.size(), first + kLanes);
    const std::vector<Row> some(rows.begin() + static_cast<std::ptrdiff_t>(first),
                                rows.begin() + static_cast<std::ptrdiff_t>(end));
    const auto all = run_alu(instruction, result, some);
    const auto odd = run_alu("@%odd " + instruction, result, some);
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const Row& row = some[lane % some.size()];
      std::string inputs;
      for (const std::uint64_t x : row.in) inputs += " " + std::to_string(x);
      SCOPED_TRACE(instruction + " lane " + std::to_string(lane) + " of" + inputs);
      EXPECT_EQ(all[lane], row.out);
      EXPECT_EQ(odd[lane], lane % 2 == 1 ? row.out : untouched(result));
      if (testing::Test::HasFailure()) return;
    }
  }
}

inline void expect_h(const std::string& instruction, const std::vector<Row>& rows) {
  expect_rows(instruction, Result::kH, rows);
}
inline void expect_r(const std::string& instruction, const std::vector<Row>& rows) {
  expect_rows(instruction, Result::kR, rows);
}
inline void expect_d(const std::string& instruction, const std::vector<Row>& rows) {
  expect_rows(instruction, Result::kD, rows);
}
inline void expect_p(const std::string& instruction, const std::vector<Row>& rows) {
  expect_rows(instruction, Result::kP, rows);
}
inline void expect_q(const std::string& instruction, const std::vector<Row>& rows) {
  expect_rows(instruction, Result::kQ, rows);
}

/// The bits of a float and of a double.
inline std::uint64_t f(float x) { return std::bit_cast<std::uint32_t>(x); }
inline std::uint64_t d(double x) { return std::bit_cast<std::uint64_t>(x); }
/// The bits of a bf16, and of a normal f16, that hold x exactly.
inline std::uint64_t b(float x) { return f(x) >> 16; }
inline std::uint64_t h(float x) {
  const std::uint64_t bits = f(x);
  return (bits >> 16 & 0x8000) | (((bits & 0x7fff'ffff) >> 13) - (112 << 10));
}
/// Two numbers of 16 bits.
inline std::uint64_t pair(std::uint64_t upper, std::uint64_t lower) { return upper << 16 | lower; }

}  // namespace sonicmoe::emulator
