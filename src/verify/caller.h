// One call at a time on guarded memory, and what is looked at after each: shared by the cases of
// the layer and of the grouped GEMMs.
#pragma once

#include "verify/harness.h"

namespace sonicmoe::verify {

/// The first fault found; unwinds one case.
struct Rejected {
  Verdict verdict;
};

inline void require(bool condition, Fault fault, const std::string& message) {
  if (!condition) throw Rejected{{fault, message}};
}

/// What a call may write besides its outputs, and what its outputs hold beforehand.
struct CallSetup {
  std::string what;
  std::uint8_t filling = kPoison;
  std::vector<Block*> buffers;
  std::function<void()> prepare;  ///< after the filling, before the upload; optional
};

class Caller {
 public:
  Caller(const Case& c, const Implementation& implementation, CaseResult& result)
      : case_(c), result_(result), blocks_(implementation.memory) {}

  Blocks& blocks() { return blocks_; }

  /// Fills outputs and buffers, runs, and looks at every byte of every block.
  void call(const CallSetup& setup, const std::vector<Expected>& outputs,
            const std::function<void()>& run);
  /// Every element of every output.
  void judge(const std::vector<Expected>& outputs, std::uint8_t filling);

  using Bits = std::vector<std::vector<std::uint8_t>>;
  static Bits bits(const std::vector<Expected>& outputs);
  static void require_same(const Bits& before, const std::vector<Expected>& outputs,
                           const std::string& when);

 private:
  const Case& case_;
  CaseResult& result_;
  Blocks blocks_;
};

/// The bodies of run_case; they throw Rejected.
void run_layer(const Case& c, const Implementation& implementation, CaseResult& result);
void run_grouped_gemm(const Case& c, const Implementation& implementation, CaseResult& result);
void run_route(const Case& c, const Implementation& implementation, CaseResult& result);
void run_token_round(const Case& c, const Implementation& implementation, CaseResult& result);

}  // namespace sonicmoe::verify
