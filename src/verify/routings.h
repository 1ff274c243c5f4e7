// The index tensors of every routing pattern.
#pragma once

#include "verify/cases.h"

namespace sonicmoe::verify {

/// Only the members of the case's routing form are filled.
struct Indices {
  std::vector<std::int64_t> ids;                   ///< (T, K)
  std::vector<std::int64_t> token, expert;         ///< (C)
  std::vector<std::int64_t> row_begin, row_count;  ///< (E)
};

/// Depends on the case's pattern, counts and sizes only.
Indices make_indices(const Case& c);

}  // namespace sonicmoe::verify
