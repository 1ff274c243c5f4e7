// The CPU layer on every instruction set that this processor has, under the harness.
#include <gtest/gtest.h>

#include "cpu/backend.h"
#include "cpu/moe_layer.h"
#include "parts.h"
#include "verify/harness.h"

namespace sonicmoe::cpu {
namespace {

verify::Implementation implementation_on(Isa isa, std::int32_t threads) {
  const Exec exec{.num_threads = threads};
  verify::Implementation i;
  i.name = isa_name(isa);
  i.memory = verify::host_memory();
  i.moe_sizes = [exec](const Problem& p, Pass pass) { return cpu::moe_sizes(p, pass, exec); };
  i.moe_forward = [=](const Problem& p, const ForwardArgs& args) {
    moe_forward_on(isa, p, args, exec);
  };
  i.moe_backward = [=](const Problem& p, const BackwardArgs& args) {
    moe_backward_on(isa, p, args, exec);
  };
  i.grouped_gemm = [=](const GroupedGemm& args) { grouped_gemm_on(isa, args, exec); };
  i.grouped_gemm_k = [=](const GroupedGemmK& args) { grouped_gemm_k_on(isa, args, exec); };
  return i;
}

class CpuLayer : public testing::TestWithParam<Isa> {};

TEST_P(CpuLayer, PassesTheHarness) {
  const Isa isa = GetParam();
  if (!isa_available(isa)) GTEST_SKIP() << isa_name(isa) << " is not available here";
  const auto part = static_cast<std::size_t>(isa) % 4 + 1;
  const auto today = verify::for_day_asked(implementation_on(isa, 2), verify::Extent::kQuick);
  const auto implementation = verify::for_part_if_sanitized(today, part, 4);
  for (const verify::CaseResult& r : verify::verify({}, implementation)) {
    EXPECT_TRUE(r.passed()) << r.name << ": " << verify::fault_name(r.fault) << ": " << r.message;
  }
}

INSTANTIATE_TEST_SUITE_P(EveryIsa, CpuLayer,
                         testing::Values(Isa::kPortable, Isa::kAvx2, Isa::kAvx512,
                                         Isa::kAvx512Bf16),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

}  // namespace
}  // namespace sonicmoe::cpu
