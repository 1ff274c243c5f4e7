// Which code a device runs, and which instructions code for an architecture may have.
#include "target.h"

#include <gtest/gtest.h>

#include "kernel_fixture.h"
#include "runtime/error.h"
#include "runtime/module.h"

namespace sonicmoe::emulator {
namespace {

Statement statement(const std::string& line) {
  const std::string text =
      ".visible .entry test() {\n.reg .pred %p;\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n"
      ".reg .b16 %h;\n" +
      line + "\nret;\n}\n";
  return first_kernel(text).statements.at(0);
}

bool has(const Target& target, const std::string& line) {
  try {
    target.check(statement(line));
    return true;
  } catch (const Fault&) {
    return false;
  }
}

TEST(Target, LacksLaterInstructions) {
  struct {
    int first;  ///< capability that has the instruction
    const char* line;
  } const cases[] = {
      {80, "mbarrier.test_wait.parity.shared.b64 %p, [%r0], %r1;"},
      {80, "cp.async.mbarrier.arrive.noinc.shared.b64 [%r0];"},
      {80, "cp.async.ca.shared.global [%r0], [%rd0], 16, %r1;"},
      {80, "fence.acq_rel.gpu;"},
      {80, "mov.u32 %r0, %ctaid.x;"},
      {89, "cvt.rn.satfinite.e4m3x2.f32 %h, %r0, %r1;"},
      {90, "mbarrier.try_wait.parity.shared::cta.b64 %p, [%r0], %r1;"},
      {90, "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], %r1;"},
      {90, "griddepcontrol.wait;"},
      {90, "griddepcontrol.launch_dependents;"},
      {90, "cp.async.bulk.commit_group;"},
      {90,
       "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0], %r1, "
       "[%r2];"},
      {90, "barrier.cluster.arrive.aligned;"},
      {90, "fence.proxy.async;"},
      {90, "fence.acq_rel.cluster;"},
      {90, "mapa.u64 %rd0, %rd1, %r0;"},
      {90, "mov.u32 %r0, %cluster_ctarank;"},
      {90, "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r0], {%r0, %r1, %r2, %r3};"},
      {100, "add.f32x2 %rd0, %rd1, %rd2;"},
  };
  for (const auto& c : cases) {
    for (const int capability : {80, 86, 89, 90, 100, 120}) {
      EXPECT_EQ(has({capability, false}, c.line), capability >= c.first) << capability << c.line;
    }
  }
}

TEST(Target, OnlyCodeForHopperAloneHasWgmma) {
  const char* const wgmma = "wgmma.fence.sync.aligned;";
  const char* const registers = "setmaxnreg.dec.sync.aligned.u32 40;";
  EXPECT_TRUE(has({90, true}, wgmma));
  EXPECT_FALSE(has({90, false}, wgmma));
  EXPECT_FALSE(has({100, true}, wgmma));
  EXPECT_TRUE(has({90, true}, registers));
  EXPECT_TRUE(has({100, true}, registers));
  EXPECT_FALSE(has({120, false}, registers));
}

TEST(Target, TensorMemoryIsOfOneFamily) {
  const char* const free = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;";
  const char* const gather =
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
      "[%r0], [%rd0, {%r0, %r1, %r2, %r3, %r0}], [%r1];";
  EXPECT_TRUE(has({100, true}, free));
  EXPECT_TRUE(has({103, true}, free));
  EXPECT_TRUE(has({100, false, true}, free));
  EXPECT_FALSE(has({100}, free));
  EXPECT_FALSE(has({120, true}, free));
  EXPECT_FALSE(has({90, true}, free));
  const auto scaled = [](const std::string& size) {
    return "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale" + size +
           " [%r0], %rd0, %rd0, %r0, [%r0], [%r0], %p0;";
  };
  EXPECT_TRUE(has({100, true}, scaled(".scale_vec::1X")));
  EXPECT_FALSE(has({100, false, true}, scaled(".scale_vec::1X")));
  EXPECT_TRUE(has({100, false, true}, scaled(".block32")));
  EXPECT_TRUE(has({100}, gather));
  EXPECT_FALSE(has({90, true}, gather));
}

TEST(Target, AFamilyHasOneMajorVersion) {
  const Target family{100, false, true};
  EXPECT_EQ(target_of(".version 9.0\n.target sm_100f\n"), family);
  EXPECT_EQ(family.name(), "sm_100f");
  EXPECT_TRUE(family.runs_on(100));
  EXPECT_TRUE(family.runs_on(103));
  EXPECT_FALSE(family.runs_on(120));
  EXPECT_FALSE((Target{103, false, true}).runs_on(100));
}

TEST(Target, IsReadFromTheText) {
  EXPECT_EQ(target_of("// a\n.version 9.0\n.target sm_90a\n"), (Target{90, true}));
  EXPECT_EQ(target_of(".version 9.0\n.target sm_120, debug\n"), (Target{120, false}));
  EXPECT_THROW(target_of(".version 9.0\n"), Fault);
  EXPECT_EQ((Target{90, true}).name(), "sm_90a");
}

TEST(Target, AKernelIsRefusedWhole) {
  const char* const text = R"(.visible .entry test() {
ret;
griddepcontrol.wait;
})";
  const Arrays memory;
  BenchShape shape;
  EXPECT_NO_THROW(run_kernel(text, shape, memory, {}));
  shape.target = {86, false};
  try {
    run_kernel(text, shape, memory, {});
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Fault& fault) {
    EXPECT_STREQ(fault.what(),
                 "PTX line 3, griddepcontrol.wait: sm_86 does not have this instruction");
  }
}

TEST(Target, ADeviceRunsTheLatestCodeThatServesIt) {
  static constexpr char kTexts[] =
      "\n.target sm_90a\n.entry hopper(){}\n\0"
      "\n.target sm_120\n.entry many(){}\n\0"
      "\n.target sm_90\n.entry many(){}\n\0"
      "\n.target sm_80\n.entry many(){}\n\0"
      "\n.target sm_80\n.entry many(){}\n.entry old(){}\n\0"
      "\n.target sm_86\n.entry many(){}\n";
  PtxTexts texts;
  texts.add(kTexts, kTexts + sizeof kTexts);
  const auto target = [&](const char* kernel, int capability) {
    return texts.with(kernel, capability).target();
  };
  struct {
    int device, code;
  } const cases[] = {{80, 80},  {86, 86},  {87, 86},   {89, 86},   {90, 90},
                     {100, 80}, {110, 80}, {120, 120}, {121, 120}, {130, 80}};
  for (const auto& c : cases) EXPECT_EQ(target("many", c.device), (Target{c.code, false}));
  EXPECT_EQ(target("hopper", 90), (Target{90, true}));
  EXPECT_EQ(target("old", 120), (Target{80, false}));
  const auto status = [&](const char* kernel, int capability) {
    try {
      texts.with(kernel, capability);
    } catch (const ApiError& error) {
      return error.status;
    }
    return cudaSuccess;
  };
  EXPECT_EQ(status("hopper", 89), cudaErrorNoKernelImageForDevice);
  EXPECT_EQ(status("hopper", 100), cudaErrorNoKernelImageForDevice);
  EXPECT_EQ(status("missing", 90), cudaErrorInvalidDeviceFunction);
}

TEST(Target, AKernelIsFoundWhateverTheFolderOfItsObject) {
  static constexpr char kText[] =
      "\n.target sm_80\n.entry _ZN1a43_GLOBAL__N__2b36f7db_10_factors_cu_c9e643074copyEv(){ret;}\n";
  PtxTexts texts;
  texts.add(kText, kText + sizeof kText);
  const std::string other = "_ZN1a43_GLOBAL__N__313793cc_10_factors_cu_c9e643074copyEv";
  EXPECT_NO_THROW(texts.with(other, 80).build(other));
  EXPECT_THROW(texts.with("_ZN1a43_GLOBAL__N__313793cc_10_factors_cu_c9e643075otherEv", 80),
               ApiError);
}

}  // namespace
}  // namespace sonicmoe::emulator
