// Runs calls on guarded memory and checks every byte after each call. Used by all kinds of cases.
#pragma once

#include "verify/harness.h"

namespace sonicmoe::verify {

/// Thrown at the first fault; ends the case.
struct Rejected {
  Verdict verdict;
};

inline void require(bool condition, Fault fault, const std::string& message) {
  if (!condition) throw Rejected{{fault, message}};
}

/// A call: the buffers that it may write besides its outputs, and the byte with which outputs and
/// buffers are filled before the call.
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

  /// Fills outputs and buffers, runs, and checks every byte of every block.
  void call(const CallSetup& setup, const std::vector<Expected>& outputs,
            const std::function<void()>& run);
  /// Checks every element of every output; throws Rejected.
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
void run_unpack(const Case& c, const Implementation& implementation, CaseResult& result);

}  // namespace sonicmoe::verify
