// The checks of a backend: exact results on integers; at most twice the reference's error on random
// data; every output element written, no other byte changed, equal bits on every run. negative.h
// checks the harness itself: it must reject broken implementations. See docs/testing.md.
#pragma once

#include <optional>

#include "verify/cases.h"
#include "verify/implementation.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

struct CaseResult {
  std::string name;
  Fault fault = Fault::kNone;
  std::string message;            ///< one sentence when it failed
  std::vector<Measure> measures;  ///< of random cases: one for each output
  double seconds = 0.0;

  bool passed() const { return fault == Fault::kNone; }
  /// Largest ratio of an error to its limit; 0 for integer cases.
  double worst_ratio() const;
};

struct VerifyOptions {
  Extent extent = Extent::kQuick;
  std::string filter;                    ///< runs only the cases whose names contain the filter
  std::optional<Precision> precision{};  ///< runs only the cases in this precision
};

/// Called after each case.
using Progress = std::function<void(const CaseResult&, std::size_t done, std::size_t total)>;

/// Runs every case that the implementation serves. Exceptions of the implementation become faults.
std::vector<CaseResult> verify(const VerifyOptions& options, const Implementation& implementation,
                               const Progress& progress = {});

/// Whether a case has the precision that the options ask for.
bool asked_for(const VerifyOptions& options, const Case& c);

/// Whether the implementation has the function that the case needs and says that it serves
/// the case.
bool serves(const Implementation& implementation, const Case& c);

CaseResult run_case(const Case& c, const Implementation& implementation);

}  // namespace sonicmoe::verify
