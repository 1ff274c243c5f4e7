// Fixed blocks of work, so that results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Items [begin, end): tokens or experts.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

inline constexpr std::int64_t kTokenBlock = 256;
inline constexpr std::int64_t kExpertBlock = 4;

/// Calls body(range) for each block of `block` items.
template <class Body>
void for_ranges(std::int64_t count, std::int64_t block, const Exec&, const Body& body) {
  for (std::int64_t i = 0; i < count; i += block) body(Range{i, std::min(count, i + block)});
}

}  // namespace sonicmoe::cpu
