// The row capacity C of the layer, from the problem alone.
#include "core/checks.h"

namespace sonicmoe {

std::int64_t row_capacity(const Problem& problem) {
  checks::problem(problem);
  return checks::rows(problem);
}

}  // namespace sonicmoe
