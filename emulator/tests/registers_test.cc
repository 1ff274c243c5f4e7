// Which registers share a place in a warp's file.
#include "registers.h"

#include <gtest/gtest.h>

#include "kernel_fixture.h"
#include "program.h"

namespace sonicmoe::emulator {
namespace {

Function function(const std::string& body) {
  return first_kernel(".visible .entry test() {\n.reg .pred %p<3>;\n.reg .b32 %r<60>;\n" + body +
                      "ret;\n}\n");
}

bool is_short(const std::string& body, std::string_view name = "%r1") {
  return lifetimes_of(function(body)).at(name).is_short;
}

TEST(Registers, ValuesOfOneBlockAreShort) {
  EXPECT_TRUE(is_short("mov.u32 %r1, 1;\nadd.u32 %r2, %r1, %r1;\n"));
  EXPECT_TRUE(is_short("ld.shared.v2.u32 {%r0, %r1}, [%r2];\nadd.u32 %r2, %r1, %r1;\n"));
}

TEST(Registers, ValuesThatLastLongerAreNot) {
  EXPECT_FALSE(is_short("mov.u32 %r1, 1;\nL:\nadd.u32 %r2, %r1, %r1;\nbra L;\n")) << "a label";
  EXPECT_FALSE(is_short("L:\nadd.u32 %r1, %r1, 1;\nbra L;\n")) << "read where it is written";
  EXPECT_FALSE(is_short("@%p1 mov.u32 %r1, 1;\nadd.u32 %r2, %r1, 1;\n")) << "a part of the lanes";
  EXPECT_FALSE(is_short("st.shared.u32 [%r1], %r2;\nmov.u32 %r1, 1;\n")) << "read first";
  EXPECT_FALSE(
      is_short("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];\n"
               "tcgen05.wait::ld.sync.aligned;\nadd.u32 %r3, %r1, 1;\n"))
      << "written later";
  EXPECT_FALSE(
      is_short("mov.u32 %r1, 1;\n"
               "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1}, %r2, %r3;\n"))
      << "written later, after another write";
}

TEST(Registers, ShortValuesShareAPlace) {
  std::string chain = "mov.u32 %r1, %tid.x;\n";
  for (int i = 2; i < 60; ++i) {
    chain += "add.u32 %r" + std::to_string(i) + ", %r" + std::to_string(i - 1) + ", 1;\n";
  }
  constexpr std::size_t kPlace = 4 * kLanes;
  const Function whole = function(chain);
  // Two values at a time, the thread's number and the constant.
  EXPECT_EQ(Builder(whole, {}, {90, true}).build().file_bytes, 4 * kPlace);
}

}  // namespace
}  // namespace sonicmoe::emulator
