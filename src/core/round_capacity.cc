// C of token_round, from what the host knows.
#include <algorithm>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {

std::int64_t round_capacity(const RoundOptions& options, std::int64_t tokens,
                            std::int64_t experts) {
  checks::round_options(options, tokens, experts);
  // Every factor is below 2^31, so each product fits; so does the sum of two.
  const std::int64_t chosen = tokens * options.route.top_k;
  const std::int64_t added = experts * options.tile;
  std::int64_t rows = chosen;
  if (options.mode == RoundingMode::kNearest) {
    rows = chosen + added / 2;
  } else if (options.mode != RoundingMode::kDown) {
    rows = std::min(tokens * experts, chosen + added);
  }
  checks::below_2_31("row capacity C", rows);
  return rows;
}

}  // namespace sonicmoe
