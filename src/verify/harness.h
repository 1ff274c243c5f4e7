// The three checks of a backend: exact integers, the twice-the-error rule on random data, and
// memory discipline (every element written, nothing else touched, equal bits on every run).
// negative.h holds the fourth: that broken implementations are rejected. See docs/testing.md.
#pragma once

#include "verify/cases.h"
#include "verify/implementation.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

struct CaseResult {
  std::string name;
  Fault fault = Fault::kNone;
  std::string message;            ///< one sentence when it failed
  std::vector<Measure> measures;  ///< of random cases: one an output
  double seconds = 0.0;

  bool passed() const { return fault == Fault::kNone; }
  /// The largest error over what is allowed; 0 for integer cases.
  double worst_ratio() const;
};

struct VerifyOptions {
  Extent extent = Extent::kQuick;
  std::string filter;  ///< a part of a case's name; empty: every case
};

/// Called after each case.
using Progress = std::function<void(const CaseResult&, std::size_t done, std::size_t total)>;

/// Runs every case that the implementation serves; throws nothing of the implementation's.
std::vector<CaseResult> verify(const VerifyOptions& options, const Implementation& implementation,
                               const Progress& progress = {});

/// Whether the implementation has the part that the case needs, and promises to serve it.
bool serves(const Implementation& implementation, const Case& c);

CaseResult run_case(const Case& c, const Implementation& implementation);

}  // namespace sonicmoe::verify
