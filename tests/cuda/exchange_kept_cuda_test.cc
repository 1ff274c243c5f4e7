// Steps that keep the rows of x for backward have the bits of steps that send them again.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/rank_group.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::Group;
using testing::must;
using testing::options_of;
using testing::RankLayer;
using testing::RankShape;

constexpr RankShape kShape{.tokens = 100, .hidden = 72, .width = 40};

/// The ranks of a group, whose steps keep rows.
struct KeptRows {
  explicit KeptRows(Group& g) : group(g) {
    for (std::int32_t r = 0; r < g.ranks.size(); ++r) {
      must(cudaSetDevice(g.ranks.ordinal(r)));
      const RankLayer& layer = *g.layers[r];
      kept.push_back(std::make_unique<DeviceArray>(
          exchange_kept_bytes(g.ranks.exchange(r), layer.problem(), layer.exec())));
    }
    must(cudaSetDevice(0));
  }

  void forward() {
    std::vector<BegunForward> begun;
    std::vector<ComputedStep> computed;
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      const RankLayer& l = *group.layers[r];
      begun.emplace_back(group.ranks.exchange(r), l.problem(), l.forward_args(), l.exec());
    }
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      const RankLayer& l = *group.layers[r];
      const ForwardArgs& a = l.forward_args();
      computed.push_back(
          std::move(begun[r]).compute(l.rows(), {a.h, a.saved, a.scratch, kept[r]->buffer()}));
    }
    for (ComputedStep& step : computed) std::move(step).finish();
  }
  /// `keeps(r)`: whether rank r uses the rows that it has kept.
  template <class Keeps>
  void backward(const Keeps& keeps) {
    std::vector<BegunBackward> begun;
    std::vector<ComputedStep> computed;
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      const RankLayer& l = *group.layers[r];
      begun.emplace_back(group.ranks.exchange(r), l.problem(), l.rows(), l.backward_args(),
                         l.exec(), keeps(r) ? kept[r]->buffer() : Buffer{});
    }
    for (BegunBackward& step : begun) computed.push_back(std::move(step).compute());
    for (ComputedStep& step : computed) std::move(step).finish();
  }
  /// Writes NaN where rows of x have come, as another layer's step writes other rows.
  void spoil_rows() {
    group.ranks.wait();
    const ExchangeShape& s = group.ranks.shape();
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      must(cudaMemset(group.ranks.at<void>(r, group.ranks.exchange(r).layout.x), 0xff,
                      s.ranks * s.max_tokens * s.hidden * 2));
    }
    DeviceArray::wait();
  }
  Bits step() {
    group.poison();
    forward();
    spoil_rows();
    backward([](std::int32_t) { return true; });
    return group.bits();
  }

  Group& group;
  std::vector<std::unique_ptr<DeviceArray>> kept;
};

void expect_bits_of_rows_sent_again(std::int32_t count, const RankShape& shape) {
  for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
    testing::GroupOptions options = options_of(shape, count, transport);
    options.shape.hidden += 136;  // a layer may be narrower than the exchange
    Group group(shape, options);
    KeptRows rows(group);
    const int all = static_cast<int>(shape.experts);
    for (const int experts : {all, 1, 0}) {  // 1: all rows to rank 0; 0: no rows
      group.route(1, experts);
      const Bits want = group.run();
      EXPECT_TRUE(rows.step() == want) << count << " ranks, " << experts << " experts";
      EXPECT_TRUE(group.run() == want) << "sent again after a step that has kept rows";
    }
    group.route(1, all);
    const Bits want = group.run();
    group.poison();
    rows.forward();
    group.ranks.wait();
    for (auto& kept : rows.kept) kept->fill(0);
    rows.backward([](std::int32_t) { return true; });
    EXPECT_FALSE(group.bits() == want) << "backward does not read the rows that were kept";
  }
}

// One test for each number of ranks, so that the emulator can run one alone.
TEST(ExchangeKept, OneRankHasTheBitsOfRowsSentAgain) { expect_bits_of_rows_sent_again(1, kShape); }
TEST(ExchangeKept, TwoRanksHaveTheBitsOfRowsSentAgain) {
  expect_bits_of_rows_sent_again(2, kShape);
}
TEST(ExchangeKept, ThreeRanksHaveTheBitsOfRowsSentAgain) {
  expect_bits_of_rows_sent_again(3, kShape);
}
TEST(ExchangeKept, TwoRanksInFp8HaveTheBitsOfRowsSentAgain) {
  const cuda::Device* device = cuda::open_device(0);
  const bool has_fp8 = device->engine->quantizers != nullptr;
  cuda::close_device(device);
  if (!has_fp8) GTEST_SKIP() << "the device's first engine has no FP8";
  RankShape shape{.tokens = 100, .hidden = 192, .width = 64, .experts = 6, .top_k = 2};
  shape.precision = Precision::kFp8;
  expect_bits_of_rows_sent_again(2, shape);
}

/// A captured step is replayed over other routings.
TEST(ExchangeKept, Replays) {
  Group group(kShape, options_of(kShape, 1, ExchangeTransport::kCopy));
  KeptRows rows(group);
  group.route(1, 24);
  group.run();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  must(cudaStreamBeginCapture(group.ranks.stream(0), cudaStreamCaptureModeThreadLocal));
  rows.forward();
  rows.backward([](std::int32_t) { return true; });
  must(cudaStreamEndCapture(group.ranks.stream(0), &graph));
  must(cudaGraphInstantiate(&replay, graph, 0));
  for (const unsigned seed : {2u, 3u}) {
    group.route(seed, 24);
    const Bits want = group.run();
    group.poison();
    must(cudaGraphLaunch(replay, group.ranks.stream(0)));
    EXPECT_TRUE(group.bits() == want) << seed;
  }
  must(cudaGraphExecDestroy(replay));
  must(cudaGraphDestroy(graph));
}

TEST(ExchangeKept, RanksThatDifferFail) {
  testing::GroupOptions options = options_of(kShape, 2, ExchangeTransport::kPush);
  Group group(kShape, options);
  group.route(1, 24);
  const Bits want = group.run();
  KeptRows rows(group);
  rows.forward();
  group.ranks.wait();
  for (std::int32_t r = 0; r < 2; ++r) group.ranks.exchange(r).limits.nanoseconds = 1'000'000'000;
  rows.backward([](std::int32_t r) { return r == 0; });
  const std::string sentence = group.fault(1);
  EXPECT_NE(sentence.find("rank 0 did not send its rows of x in backward"), std::string::npos)
      << sentence;
  group.ranks.reset();
  for (std::int32_t r = 0; r < 2; ++r) group.ranks.exchange(r).limits.nanoseconds = 20'000'000'000;
  EXPECT_TRUE(group.run() == want) << "after a reset";
}

}  // namespace
}  // namespace sonicmoe
