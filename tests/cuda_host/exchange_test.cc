// Where the arrays of an exchange lie, as far as the host computes it.
#include <gtest/gtest.h>

#include "cuda/exchange/kernels.h"

namespace sonicmoe::cuda {
namespace {

/// send_partials() places the sums of rank r behind r * max_tokens rows of the layer. The shape has
/// the largest d of any layer.
TEST(Exchange, SumsOfALayerNarrowerThanTheShapeAreFound) {
  const ExchangeShape shape{2, 100, 400, 512, DType::kBF16};
  Peers peers{};
  peers.ranks = 2;
  for (const std::int64_t hidden : {512, 264}) {
    EXPECT_EQ(other_sums(peers, shape, hidden).rank_bytes, 100 * hidden * 2);
  }
}

TEST(Exchange, PartsHaveEveryTokenOnce) {
  for (const std::int32_t ranks : {1, 2, 3, 8}) {
    for (const std::int64_t tokens : {1, 2, 3, 101}) {
      const auto parts = token_parts({ranks, tokens, 1, 8, DType::kBF16});
      EXPECT_EQ(parts[0].first, 0);
      EXPECT_EQ(parts[1].first, parts[0].count);
      EXPECT_EQ(parts[0].count + parts[1].count, tokens);
      EXPECT_NE(parts[0].phase, parts[1].phase);
    }
  }
}

}  // namespace
}  // namespace sonicmoe::cuda
