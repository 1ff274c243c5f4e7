// What the outputs of a layer case must be.
#pragma once

#include <vector>

#include "verify/inputs.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

struct ExpectedLayer {
  std::vector<Expected> forward;
  std::vector<Expected> backward;
  Verdict sound;  ///< kBadCase when the case's integers are not exact after all
};

ExpectedLayer expect_layer(const Case& c, const Tensors& tensors);

}  // namespace sonicmoe::verify
