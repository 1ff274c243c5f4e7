// Negative controls: implementations broken on purpose, each of which the harness must reject.
#pragma once

#include "verify/harness.h"

namespace sonicmoe::verify {

struct ControlResult {
  std::string name;  ///< what is broken
  std::string case_name;
  Fault expected = Fault::kNone;
  Fault fault =
      Fault::kNone;  ///< found by the harness; kNone: it accepted the broken implementation
  std::string message;

  bool rejected() const { return fault != Fault::kNone; }
  bool for_the_right_reason() const { return fault == expected; }
};

using ControlProgress = std::function<void(const ControlResult&)>;

/// What each control breaks.
std::vector<std::string> negative_control_names();

/// Breaks `sound` in every known way, and judges each broken implementation on the cases that show
/// the breakage, as far as `sound` serves them.
std::vector<ControlResult> negative_controls(const VerifyOptions& options,
                                             const Implementation& sound,
                                             const ControlProgress& progress = {});

}  // namespace sonicmoe::verify
