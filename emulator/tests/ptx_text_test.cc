// Which kernels a text of PTX has, and in which line it is wrong.
#include "ptx_text.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace sonicmoe::emulator {
namespace {

constexpr const char* kText = R"(.version 9.0
.target sm_90a
.shared .align 16 .b8 outside[64];
.func helper(.param .b32 a);
.func (.param .b32 out) helper(.param .b32 a)
{
{ ret; } // a brace: {
}
.visible .entry first(.param .u64 out) .maxntid 64
{
.reg .b32 %r<2>; // and one more: }
{ mov.u32 %r1, outside; }
ret;
}
.visible .entry second()
{
ret;
unknown %r1
}
)";

std::string message(const Module& module, const KernelText& kernel) {
  try {
    parse_kernel(module, kernel);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(PtxText, HasKernelsBehindFunctions) {
  const Module module = parse_module(kText);
  ASSERT_EQ(module.kernels.size(), 2u);
  EXPECT_EQ(module.kernels[0].name, "first");
  EXPECT_EQ(module.kernels[1].name, "second");
  const Function first = parse_kernel(module, module.kernels[0]);
  EXPECT_EQ(first.name, "first");
  EXPECT_EQ(first.most_threads, 64);
  ASSERT_EQ(first.parameters.size(), 1u);
  ASSERT_EQ(first.statements.size(), 2u);
  EXPECT_EQ(first.statements[0].line, 12);
  ASSERT_EQ(first.variables.size(), 1u);
  EXPECT_EQ(first.variables[0].name, "outside");
}

TEST(PtxText, AKernelThatCannotBeReadIsNamedByItsLine) {
  const Module module = parse_module(kText);
  EXPECT_EQ(message(module, module.kernels[0]), "");
  EXPECT_EQ(message(module, module.kernels[1]), "PTX line 19: expected ',' at '}'.");
}

TEST(PtxText, ABodyWithoutAnEndIsRefused) {
  try {
    parse_module(".entry open()\n{\n{ ret; }\n");
    FAIL() << "no fault";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "PTX line 4: expected '}' before the end.");
  }
}

}  // namespace
}  // namespace sonicmoe::emulator
