// Fixed blocks of work, so that results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/threads.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Items [begin, end): tokens or experts.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

inline constexpr std::int64_t kTokenBlock = 256;
inline constexpr std::int64_t kExpertBlock = 4;

/// Threads for a call that reads (T, E) logits. A logit costs about as much as 100 flops of a GEMM.
inline std::int32_t routing_threads(const Exec& exec, const Tensor& logits) {
  return thread_count(
      exec, 100.0 * static_cast<double>(logits.shape[0]) * static_cast<double>(logits.shape[1]));
}

/// Calls body(range) for each block of `block` items.
template <class Body>
void for_ranges(Team* team, std::int64_t count, std::int64_t block, const Body& body) {
  team->run((count + block - 1) / block, [&](std::int64_t task, std::int32_t) {
    body(Range{task * block, std::min(count, (task + 1) * block)});
  });
}

}  // namespace sonicmoe::cpu
