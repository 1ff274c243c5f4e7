// The naive routing of the harness on the tests' buffers.
#pragma once

#include "routing_support.h"
#include "verify/routing_reference.h"

namespace sonicmoe::testing {

using namespace reference;

template <class Real>
Rows<Real> read_logits(Guarded* logits, DType dtype, std::int64_t tokens, std::int64_t experts) {
  Rows<Real> x(tokens, std::vector<Real>(experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < experts; ++e) {
      x[t][e] = cleaned<Real>(logits->value(t * experts + e), dtype);
    }
  }
  return x;
}

}  // namespace sonicmoe::testing
