// The public API on the CPU backend under the harness, with another number of threads on every
// call: the bits must not depend on it.
#include <gtest/gtest.h>

#include <memory>

#include "verify/negative.h"

namespace sonicmoe::verify {
namespace {

Implementation with_changing_threads() {
  const auto next = [calls = std::make_shared<std::int32_t>(0)] {
    return Exec{.num_threads = 1 + (*calls)++ % 4};
  };
  Implementation i = public_api({});
  i.quantize_weights = [next](const Problem& p, const Weights& weights, const Buffer& out) {
    quantize_weights(p, weights, out, next());
  };
  i.moe_forward = [next](const Problem& p, const ForwardArgs& args) {
    moe_forward(p, args, next());
  };
  i.moe_backward = [next](const Problem& p, const BackwardArgs& args) {
    moe_backward(p, args, next());
  };
  i.grouped_gemm = [next](const GroupedGemm& args) { grouped_gemm(args, next()); };
  i.grouped_gemm_k = [next](const GroupedGemmK& args) { grouped_gemm_k(args, next()); };
  return i;
}

TEST(CpuVerify, PassesWithAnyNumberOfThreads) {
  for (const CaseResult& r : verify({}, with_changing_threads())) {
    EXPECT_TRUE(r.passed()) << r.name << ": " << fault_name(r.fault) << ": " << r.message;
  }
}

TEST(CpuVerify, BrokenBackendsAreRejected) {
  const std::vector<ControlResult> results = negative_controls({}, public_api({}));
  EXPECT_GE(results.size(), 50u);
  for (const ControlResult& r : results) {
    EXPECT_TRUE(r.for_the_right_reason())
        << r.name << " on " << r.case_name << ": expected " << fault_name(r.expected) << ", found "
        << fault_name(r.fault) << ": " << r.message;
  }
}

}  // namespace
}  // namespace sonicmoe::verify
