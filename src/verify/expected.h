// The expected outputs of a case of the layer.
#pragma once

#include <vector>

#include "verify/inputs.h"
#include "verify/judge.h"

namespace sonicmoe::verify {

struct ExpectedLayer {
  std::vector<Expected> forward;
  std::vector<Expected> backward;
  Verdict sound;  ///< kBadCase where sums of the case's integers are not exact in fp32
};

ExpectedLayer expect_layer(const Case& c, const Tensors& tensors);

}  // namespace sonicmoe::verify
