#include "verify/harness.h"

#include <algorithm>
#include <chrono>

#include "verify/caller.h"

namespace sonicmoe::verify {
bool serves(const Implementation& implementation, const Case& c) {
  if (c.problem.precision == Precision::kFp8 && !implementation.quantize_weights) return false;
  if (c.subject == Subject::kGroupedGemm && !implementation.grouped_gemm) return false;
  if (c.subject == Subject::kGroupedGemmK && !implementation.grouped_gemm_k) return false;
  if (c.subject == Subject::kRoute && !implementation.route) return false;
  if (c.subject == Subject::kTokenRound && !implementation.token_round) return false;
  if (c.subject == Subject::kUnpack && !implementation.unpack_weights) return false;
  return !implementation.serves || implementation.serves(c);
}

bool asked_for(const VerifyOptions& options, const Case& c) {
  return !options.precision || *options.precision == c.problem.precision;
}

double CaseResult::worst_ratio() const {
  double worst = 0.0;
  for (const Measure& m : measures) worst = std::max(worst, m.ratio());
  return worst;
}

CaseResult run_case(const Case& c, const Implementation& implementation) {
  const auto start = std::chrono::steady_clock::now();
  CaseResult result;
  result.name = c.name;
  try {
    switch (c.subject) {
      case Subject::kLayer:
        run_layer(c, implementation, result);
        break;
      case Subject::kRoute:
        run_route(c, implementation, result);
        break;
      case Subject::kTokenRound:
        run_token_round(c, implementation, result);
        break;
      case Subject::kUnpack:
        run_unpack(c, implementation, result);
        break;
      default:
        run_grouped_gemm(c, implementation, result);
    }
  } catch (const Rejected& rejected) {
    result.fault = rejected.verdict.fault;
    result.message = rejected.verdict.message;
  } catch (const std::exception& error) {
    result.fault = Fault::kThrew;
    result.message = error.what();
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

std::vector<CaseResult> verify(const VerifyOptions& options, const Implementation& implementation,
                               const Progress& progress) {
  std::vector<Case> cases = all_cases(options.extent, options.filter);
  std::erase_if(
      cases, [&](const Case& c) { return !asked_for(options, c) || !serves(implementation, c); });
  std::vector<CaseResult> results;
  for (const Case& c : cases) {
    results.push_back(run_case(c, implementation));
    if (progress) progress(results.back(), results.size(), cases.size());
  }
  return results;
}

}  // namespace sonicmoe::verify
