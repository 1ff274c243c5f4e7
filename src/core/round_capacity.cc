// The row capacity C of token_round, from its options and sizes alone.
#include <algorithm>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {

std::int64_t round_capacity(const RoundOptions& options, std::int64_t tokens,
                            std::int64_t experts) {
  checks::round_options(options, tokens, experts);
  const std::int64_t chosen = tokens * options.route.top_k;  // both below 2^31
  const std::int64_t added = checks::product("experts * tile", {experts, options.tile});
  const std::int64_t every = tokens * experts;
  std::int64_t rows = chosen;
  if (options.mode == RoundingMode::kNearest) {
    rows = chosen + added / 2;
  } else if (options.mode != RoundingMode::kDown) {
    rows = std::min(every, chosen + std::min(added, every));  // both summands are below 2^62
  }
  checks::below_2_31("row capacity C", rows);
  return rows;
}

}  // namespace sonicmoe
