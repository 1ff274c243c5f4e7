// Verdicts on one output tensor: equality, or the twice rule.
#pragma once

#include <string>

#include "verify/blocks.h"
#include "verify/cases.h"
#include "verify/matrix.h"

namespace sonicmoe::verify {

/// Why a result was rejected.
enum class Fault {
  kNone,
  kUnwritten,      ///< an output element still holds the poison
  kOutside,        ///< a byte outside the outputs changed
  kInputChanged,   ///< an input, or state kept for backward, changed
  kNotRepeatable,  ///< equal inputs gave different bits
  kBatch,          ///< the bits of a token's results depend on other tokens of the batch
  kUnequal,        ///< a value differs in a check for equality
  kInaccurate,     ///< an error above twice the error of the same formula in the same precision
  kNotZero,        ///< not exactly zero (or untouched) where no row contributes
  kSizes,          ///< a result of moe_sizes exceeds its limit, or h_bytes is not the exact size
  kThrew,          ///< the call threw
  kBadCase,        ///< the case itself is wrong: its integers are not exact
};
const char* fault_name(Fault fault);

/// Errors of the rows of one tensor, divided by the rms row norm, and their limits.
struct Measure {
  std::string tensor;
  double max_error = 0.0;
  double max_allowed = 0.0;
  double mean_error = 0.0;
  double mean_allowed = 0.0;

  /// Above 1: rejected.
  double ratio() const;
};

struct Verdict {
  Fault fault = Fault::kNone;
  std::string message;
};

/// The expected values of an output. Errors are divided by the rms norm of `group_rows` consecutive
/// rows; for dW these are the rows of an expert.
struct Expected {
  std::string what;
  BlockView tensor;
  oracle::Matrix<double> exact;  ///< fp64
  oracle::Matrix<double> same;   ///< the same formula in the same precision
  std::int64_t group_rows = 0;
};

/// Judges a downloaded output; `filling` is the byte that it held before the call.
Verdict judge_equal(const Expected& expected, std::uint8_t filling);
Verdict judge_error(const Expected& expected, std::uint8_t filling, Measure& measure);

}  // namespace sonicmoe::verify
