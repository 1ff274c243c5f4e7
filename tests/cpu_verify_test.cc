// The public API on the CPU backend under the harness, with another number of threads on every
// call: the bits must not depend on it.
#include <gtest/gtest.h>

#include <memory>

#include "parts.h"
#include "verify/negative.h"

namespace sonicmoe::verify {
namespace {

Implementation with_changing_threads() {
  const auto next = [calls = std::make_shared<std::int32_t>(0)] {
    return Exec{.num_threads = 1 + (*calls)++ % 5};
  };
  Implementation i = public_api({});
  i.name += ", changing threads";
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
  i.unpack_weights = [next](const PackedWeights& packed, const Tensor& out) {
    unpack_weights(packed, out, next());
  };
  i.route = [next](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                   const Tensor& weights) { route(o, logits, ids, weights, next()); };
  i.route_backward = [next](const RouteOptions& o, const Tensor& logits, const Tensor& ids,
                            const Tensor& dweights, const Tensor& dlogits) {
    route_backward(o, logits, ids, dweights, dlogits, next());
  };
  i.token_round = [next](const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                         Buffer scratch) { token_round(o, logits, pairs, scratch, next()); };
  i.token_round_backward = [next](const RoundOptions& o, const Tensor& logits, const Pairs& pairs,
                                  const Tensor& dweight, const Tensor& dlogits, Buffer scratch) {
    token_round_backward(o, logits, pairs, dweight, dlogits, scratch, next());
  };
  return i;
}

TEST(CpuVerify, PassesWithAnyNumberOfThreads) {
  const Implementation today = for_day_asked(with_changing_threads(), Extent::kQuick);
  for (const CaseResult& r : verify({}, for_part_if_sanitized(today, 1, 16))) {
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
