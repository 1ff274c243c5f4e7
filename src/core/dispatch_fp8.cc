// The public functions of Precision::kFp8 other than moe_forward() and moe_backward().
#include <limits>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/fp8_layout.h"

namespace sonicmoe {
namespace {

// The smallest sizes for which "auto" takes fp8. Every measured layer of at least these sizes was
// faster in fp8 than in bf16, even with weights that are quantised once for each micro-batch
// (docs/fp8.md). The time to quantise them does not depend on the rows, so a layer needs a least
// number of rows.
constexpr std::int64_t kLeastHidden = 768;
constexpr std::int64_t kLeastWidth = 256;
constexpr std::int64_t kLargeMatrix = std::int64_t{1} << 20;  // d n
constexpr std::int64_t kRowsOfLarge = 640;                    // an expert
constexpr std::int64_t kRowsOfSmall = 1280;

/// Whether the device of `exec` serves `problem` in fp8, and fp8 is faster than bf16 for large
/// problems there (BackendTable::fast_fp8).
bool is_fast(const Problem& problem, const Exec& exec) {
  const BackendTable& table = backend_table(exec.backend);
  if (table.fast_fp8 == nullptr || table.quantize_weights == nullptr) return false;
  if (table.refusal != nullptr && !table.refusal(problem, exec).empty()) return false;
  return table.fast_fp8(exec);
}

}  // namespace

std::int64_t fp8_weights_bytes(const Problem& problem, const Exec& exec) {
  checks::exec(exec);
  checks::problem(problem);
  return problem.precision == Precision::kFp8 ? fp8::weights_layout(problem).bytes : 0;
}

void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec) {
  checks::quantize_weights(problem, weights, exec);
  checks::fp8_weights(problem, out, exec);
  checks::quantize_weights_overlap(weights, out);
  serve(exec, "quantize_weights", &BackendTable::quantize_weights)(problem, weights, out, exec);
}

std::int64_t auto_fp8_rows(const Problem& problem, const Exec& exec) {
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  checks::exec(exec);
  Problem p = problem;
  p.precision = Precision::kTensors;
  checks::problem(p);
  const bool served =
      p.dtype == DType::kBF16 && p.hidden % fp8::kBlock == 0 && p.width % fp8::kBlock == 0;
  if (!served || p.hidden < kLeastHidden || p.width < kLeastWidth) return kNever;
  p.precision = Precision::kFp8;
  if (!is_fast(p, exec)) return kNever;
  return (p.hidden * p.width < kLargeMatrix ? kRowsOfSmall : kRowsOfLarge) * p.experts;
}

Precision auto_precision(const Problem& problem, const Exec& exec) {
  const std::int64_t least = auto_fp8_rows(problem, exec);
  return checks::rows(problem) >= least ? Precision::kFp8 : Precision::kTensors;
}

}  // namespace sonicmoe
