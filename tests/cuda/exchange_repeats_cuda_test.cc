// Many steps over pretended ranks: every repeat has equal bits, whatever arrives first.
#include <algorithm>
#include <iterator>
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

/// In how many launches rows of other ranks are multiplied; 0: as the exchange chooses.
void set_groups(Group& group, int groups) {
  for (std::int32_t r = 0; r < group.ranks.size(); ++r) group.ranks.exchange(r).groups = groups;
}

/// Whether tiles wait for rows of other ranks.
void set_awaits_rows(Group& group, bool awaits_rows) {
  for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
    group.ranks.exchange(r).awaits_from = awaits_rows ? 0 : Exchange::kNever;
  }
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

/// A step in which tiles wait for their rows. Ranks that share a GPU may do so only if all rows
/// have come before the first product begins.
Bits run_awaiting(Group& group) {
  group.poison();
  set_awaits_rows(group, true);
  for (const bool backward : {false, true}) {
    for (const ExchangePart part : testing::kParts) {
      for (auto& layer : group.layers) backward ? layer->backward(part) : layer->forward(part);
      group.ranks.wait();
    }
  }
  set_awaits_rows(group, false);
  return group.bits();
}

/// Rows of other ranks may be multiplied in any number of launches. RankShape{} has records with
/// rows of three ranks; of 7 tokens, all ranks but the first have none.
TEST(ExchangeRepeats, EqualBitsInAnyGroups) {
  for (const std::int32_t count : {1, 2, 3, 4, 5}) {
    RankShape base;
    base.experts = 6 * count;
    for (const RankShape& shape :
         {base, shape_with_own_records(count), RankShape{.tokens = 7, .experts = base.experts}}) {
      Group push(shape, options_of(shape, count, ExchangeTransport::kPush));
      Group copy(shape, options_of(shape, count, ExchangeTransport::kCopy));
      for (const int experts : {static_cast<int>(shape.experts), 1}) {
        push.route(1, experts);
        copy.route(1, experts);
        set_groups(push, 1);
        const Bits want = push.run();
        for (const int groups : {0, 1, 2, count - 1}) {
          set_groups(push, groups);
          set_groups(copy, groups);
          EXPECT_TRUE(push.run() == want) << count << " ranks, push, groups " << groups;
          EXPECT_TRUE(copy.run() == want) << count << " ranks, copy, groups " << groups;
        }
        EXPECT_TRUE(run_awaiting(copy) == want) << count << " ranks";
      }
    }
  }
}

/// The small form of the test above, for the emulator. An expert has about 45 rows of each rank, or
/// 16: so records have rows of three ranks, or of four. The links limit these shapes, so that Y
/// follows A; the first one has more work for each row. In the last one ranks have records of own
/// rows.
TEST(ExchangeRepeats, FourRanksInAnyGroups) {
  const RankShape narrow{.tokens = 100, .hidden = 136, .width = 72, .experts = 8, .top_k = 4};
  RankShape wide = narrow, few = narrow, many = narrow;
  wide.tokens = 40;
  wide.width = 376;
  wide.top_k = 8;
  few.tokens = 36;
  many.tokens = 170;
  many.top_k = 8;
  for (const RankShape& shape : {wide, narrow, few, many}) {
    Group push(shape, options_of(shape, 4, ExchangeTransport::kPush));
    Group copy(shape, options_of(shape, 4, ExchangeTransport::kCopy));
    route(push);
    route(copy);
    set_groups(push, 1);
    const Bits want = push.run();
    for (const int groups : {1, 2, 3}) {
      set_groups(push, groups);
      set_groups(copy, groups);
      EXPECT_TRUE(push.run() == want) << "push, groups " << groups;
      EXPECT_TRUE(copy.run() == want) << "copy, groups " << groups;
    }
    EXPECT_TRUE(run_awaiting(copy) == want) << "tiles that wait";
    expect_repeats(copy, want, 3, 1);
  }
}

/// Enqueues `repeats` steps for all ranks of both groups, part by part: the next part is of any
/// rank.
void step_together(Group& one, Group& two, std::size_t repeats, std::mt19937& random) {
  constexpr std::size_t kPasses = 2 * std::size(testing::kParts);
  struct Turn {
    testing::RankLayer* layer;
    std::size_t done = 0;
  };
  std::vector<Turn> turns;
  for (Group* group : {&one, &two}) {
    for (auto& layer : group->layers) turns.push_back({layer.get()});
  }
  for (std::size_t left = turns.size() * repeats * kPasses; left > 0; --left) {
    std::size_t next = random() % turns.size();
    while (turns[next].done == repeats * kPasses) next = (next + 1) % turns.size();
    Turn& turn = turns[next];
    const std::size_t at = turn.done % kPasses;
    const ExchangePart part = testing::kParts[at % std::size(testing::kParts)];
    at < kPasses / 2 ? turn.layer->forward(part) : turn.layer->backward(part);
    if (at + 1 == kPasses) turn.layer->keep(turn.done / kPasses);
    ++turn.done;
  }
}

/// Two exchanges at once: a rank waits in one of them while another rank waits in the other one.
TEST(ExchangeRepeats, TwoExchangesAtOnce) {
  constexpr std::size_t kSteps = 2;
  int devices = 0;
  must(cudaGetDeviceCount(&devices));
  const RankShape shape{.tokens = 100, .hidden = 136, .width = 72, .experts = 8, .top_k = 4};
  for (const auto transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
    GroupOptions options = options_of(shape, 2, transport);
    options.devices = std::min(devices, 2);
    Group one(shape, options), two(shape, options);
    one.route(1, static_cast<int>(shape.experts));
    two.route(2, static_cast<int>(shape.experts));
    const Bits want_one = one.run(), want_two = two.run();
    EXPECT_FALSE(want_one == want_two);
    std::mt19937 random(1);
    for (int round = 0; round < 3; ++round) {
      one.poison();
      two.poison();
      step_together(one, two, kSteps, random);
      one.ranks.wait();
      two.ranks.wait();
      for (std::size_t i = 0; i < kSteps; ++i) {
        EXPECT_TRUE(one.kept(i) == want_one) << "round " << round << ", step " << i;
        EXPECT_TRUE(two.kept(i) == want_two) << "round " << round << ", step " << i;
      }
    }
  }
}

TEST(ExchangeRepeats, SeveralGpusEqualPretendedRanks) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "needs two GPUs";
  for (const std::int32_t count : {2, 3, 4}) {
    RankShape base;
    base.experts = 6 * count;
    for (const RankShape& shape : {base, shape_with_own_records(count)}) {
      for (const auto transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
        GroupOptions options = options_of(shape, count, transport);
        Group pretended(shape, options);
        options.devices = std::min<int>(devices, count);
        Group several(shape, options);
        route(pretended);
        route(several);
        const Bits want = pretended.run();
        for (const int groups : {0, 1, 2, 3}) {
          set_groups(several, groups);
          expect_repeats(several, want, 20, static_cast<unsigned>(groups));
        }
        if (devices < count) continue;
        set_awaits_rows(several, true);
        expect_repeats(several, want, 20, 9);
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
