// Blocks of tokens or experts. Their size is fixed, so results do not depend on the number of
// threads.
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

constexpr std::int64_t blocks_of(std::int64_t count, std::int64_t block) {
  return (count + block - 1) / block;
}

/// Threads for a call that reads (T, E) logits. A logit takes about the time of 100 flops of a
/// GEMM.
inline std::int32_t routing_threads(const Exec& exec, const Tensor& logits) {
  return thread_count(
      exec, 100.0 * static_cast<double>(logits.shape[0]) * static_cast<double>(logits.shape[1]));
}

/// The team of a call whose phases go over blocks of tokens.
class TokenTeam : public Team {
 public:
  TokenTeam(const Exec& exec, const Tensor& logits)
      : Team(routing_threads(exec, logits), blocks_of(logits.shape[0], kTokenBlock)) {}
};

/// The team of a call whose phases go over blocks of tokens and over blocks of experts.
class TokenExpertTeam : public Team {
 public:
  TokenExpertTeam(const Exec& exec, const Tensor& logits)
      : Team(routing_threads(exec, logits), std::max(blocks_of(logits.shape[0], kTokenBlock),
                                                     blocks_of(logits.shape[1], kExpertBlock))) {}
};

/// Calls body(range, worker) for each block of `block` items.
template <class Body>
void for_ranges(Team* team, std::int64_t count, std::int64_t block, const Body& body) {
  team->run(blocks_of(count, block), [&](std::int64_t task, std::int32_t worker) {
    body(Range{task * block, std::min(count, (task + 1) * block)}, worker);
  });
}

}  // namespace sonicmoe::cpu
