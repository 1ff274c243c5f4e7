// The state of an exchange that the core reads: its shape, and the step that it runs.
#pragma once

#include "sonicmoe/exchange.h"

namespace sonicmoe {

/// The arguments of a step. They are checked when the step begins; its later parts read them here.
struct ExchangeStep {
  Pass pass = Pass::kForward;  ///< kForward or kBackward; a forward without `saved` is inference
  Problem problem{};
  std::int64_t rows = 0;  ///< of a forward: known when it computes, as the buffers in `forward`
  ForwardArgs forward{};
  BackwardArgs backward{};
  Exec exec{};
  Buffer kept_x{};  ///< ExchangeBuffers::kept_x; empty: backward sends x again
};

struct ExchangeState {
  ExchangeShape shape{};
  ExchangeStep step{};
  /// The part that must be called next. kAll: a part has failed, so every part is refused until
  /// exchange_reset().
  ExchangePart next = ExchangePart::kBegin;
};

}  // namespace sonicmoe
