// Many steps over pretended ranks: every repeat has equal bits, whatever arrives first.
#include <algorithm>
#include <random>

#include "cuda/rank_group.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::Group;
using testing::GroupOptions;
using testing::must;
using testing::options_of;
using testing::RankShape;
using testing::shape_with_own_records;

/// Runs steps, which the host enqueues without a wait, for the ranks in a new order each time.
/// Compares the outputs of every step with `want`.
void expect_repeats(Group& group, const Bits& want, std::size_t repeats, unsigned seed) {
  std::mt19937 random(seed);
  group.poison();
  for (std::size_t i = 0; i < repeats; ++i) {
    std::shuffle(group.order.begin(), group.order.end(), random);
    group.step();
    group.keep(i);
  }
  group.ranks.wait();
  for (std::size_t i = 0; i < repeats; ++i) {
    ASSERT_TRUE(group.kept(i) == want) << group.ranks.size() << " ranks, repeat " << i;
  }
}

/// Fails if the launch over own rows has no records on some rank, in forward or in backward.
void expect_own_records(Group& group) {
  group.forward();
  group.ranks.wait();
  for (auto& layer : group.layers) EXPECT_GT(layer->own_records(Pass::kForward), 0);
  group.backward();
  group.ranks.wait();
  for (auto& layer : group.layers) EXPECT_GT(layer->own_records(Pass::kBackward), 0);
}

void route(Group& group) { group.route(1, static_cast<int>(group.shape.experts)); }

TEST(ExchangeRepeats, EqualBitsWhateverArrivesFirst) {
  for (const std::int32_t count : {2, 3, 8}) {
    for (const RankShape& shape : {RankShape{}, shape_with_own_records(count)}) {
      Group push(shape, options_of(shape, count, ExchangeTransport::kPush));
      Group copy(shape, options_of(shape, count, ExchangeTransport::kCopy));
      route(push);
      route(copy);
      const Bits want = push.run();
      for (unsigned batch = 0; batch < 5; ++batch) {
        expect_repeats(push, want, 20, batch);
        expect_repeats(copy, want, 20, batch);
      }
    }
  }
}

/// The small form of the test above, for the emulator.
TEST(ExchangeRepeats, OwnRowsAreMultipliedFirst) {
  const RankShape shape = shape_with_own_records(2);
  Group push(shape, options_of(shape, 2, ExchangeTransport::kPush));
  Group copy(shape, options_of(shape, 2, ExchangeTransport::kCopy));
  route(push);
  route(copy);
  const Bits want = push.run();
  expect_own_records(push);
  expect_own_records(copy);
  expect_repeats(push, want, 3, 1);
  expect_repeats(copy, want, 3, 1);
}

TEST(ExchangeRepeats, TwoGpusEqualPretendedRanks) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two GPUs";
  for (const std::int32_t count : {2, 4}) {
    for (const RankShape& shape : {RankShape{}, shape_with_own_records(count)}) {
      for (const auto transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
        GroupOptions options = options_of(shape, count, transport);
        Group pretended(shape, options);
        options.devices = 2;
        Group two(shape, options);
        route(pretended);
        route(two);
        const Bits want = pretended.run();
        for (unsigned batch = 0; batch < 5; ++batch) expect_repeats(two, want, 20, batch);
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
