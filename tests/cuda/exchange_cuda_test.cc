// Steps over pretended ranks: equal bits of every replay, faults that end in a sentence.
#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <thread>

#include "cuda/engines.h"
#include "cuda/rank_group.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::Group;
using testing::GroupOptions;
using testing::must;
using testing::options_of;
using testing::PretendedRanks;
using testing::random_bf16;
using testing::RankShape;

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// A time limit that sound steps meet on slow machines too (emulated GPUs): four times what a step
/// of `group` takes now, but not less than `least`.
milliseconds limit_of(Group& group, milliseconds least) {
  const auto start = steady_clock::now();
  group.run();
  return std::max(least, std::chrono::ceil<milliseconds>(4 * (steady_clock::now() - start)));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool is_nan(const DeviceArray& rows) {
  const std::vector<std::uint16_t> values = rows.get<std::uint16_t>();
  return std::all_of(values.begin(), values.end(),
                     [](std::uint16_t v) { return (v & 0x7fff) > 0x7f80; });
}

TEST(Exchange, ReplaysOverOtherRoutings) {
  const RankShape shape;
  for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
    Group group(shape, options_of(shape, 2, transport));
    group.route(1, 24);
    group.run();
    std::vector<cudaGraphExec_t> replays;
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      cudaGraph_t graph = nullptr;
      const cudaStream_t stream = group.ranks.stream(r);
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      group.layers[r]->forward(ExchangePart::kAll);
      group.layers[r]->backward(ExchangePart::kAll);
      must(cudaStreamEndCapture(stream, &graph));
      must(cudaGraphInstantiate(&replays.emplace_back(), graph, 0));
      must(cudaGraphDestroy(graph));
    }
    for (const auto& [seed, experts] : {std::pair{2u, 24}, {3u, 24}, {4u, 1}, {5u, 0}, {6u, 9}}) {
      group.route(seed, experts);
      const Bits want = group.run();
      group.poison();
      for (int repeat = 0; repeat < 3; ++repeat) {
        for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
          must(cudaGraphLaunch(replays[r], group.ranks.stream(r)));
        }
      }
      ASSERT_EQ(group.bits(), want) << "routing " << seed;
    }
    for (cudaGraphExec_t replay : replays) must(cudaGraphExecDestroy(replay));
  }
}

/// The shape has the largest d of any layer of a group.
TEST(Exchange, LayersMayBeNarrowerThanTheShape) {
  const RankShape shape;
  for (const std::int32_t count : {2, 3}) {
    for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
      GroupOptions options = options_of(shape, count, transport);
      Group equal(shape, options);
      equal.route(1, 24);
      const Bits want = equal.run();
      options.shape.hidden += 136;
      Group wide(shape, options);
      wide.route(1, 24);
      EXPECT_EQ(wide.run(), want) << count << " ranks";
    }
  }
}

TEST(Exchange, AskedRowsAreTheRowsRouted) {
  const RankShape shape;
  Group group(shape, options_of(shape, 3, ExchangeTransport::kPush));
  group.route(1, 8);  // experts 0 to 7: all of rank 0
  for (auto& layer : group.layers) layer->forward(ExchangePart::kBegin);
  std::int64_t valid = 0;
  for (std::int32_t r = 0; r < 3; ++r) {
    std::mt19937 random(100 + r);
    for (std::int64_t i = 0; i < (shape.tokens - 7 * r) * shape.top_k; ++i) {
      valid += random() % 9 != 0 ? 1 : 0;
    }
  }
  EXPECT_EQ(group.layers[0]->rows_asked(), valid);
  EXPECT_EQ(group.layers[1]->rows_asked(), 0);
  EXPECT_EQ(group.layers[2]->rows_asked(), 0);
}

TEST(Exchange, AnEmptyListOfPairsGoesToNoRank) {
  constexpr std::int64_t kTokens = 300;
  const PretendedRanks ranks(options_of({}, 1, ExchangeTransport::kPush));
  DeviceArray masks(kTokens * 8);
  cuda::OwnSlots slots{};  // of no length and at no address, as an empty tensor of torch
  slots.tokens = kTokens;
  slots.experts = slots.experts_per_rank = 24;
  cuda::mark_ranks(*ranks.exchange(0).device, slots, static_cast<std::uint64_t*>(masks.data()),
                   ranks.stream(0));
  ranks.wait();
  EXPECT_EQ(masks.get<std::uint64_t>(), std::vector<std::uint64_t>(kTokens, 0));
}

TEST(Exchange, RowsOfAnyStrideAreCopied) {
  const RankShape shape;
  const PretendedRanks ranks(options_of(shape, 1, ExchangeTransport::kCopy));
  const cuda::ExchangeLayout layout = cuda::exchange_layout(ranks.shape());
  const std::vector<std::uint16_t> values = random_bf16(3 * 2 * shape.hidden, 1);
  DeviceArray memory(static_cast<std::int64_t>(values.size()) * 2);
  memory.set(values);
  struct {
    std::int64_t rows, stride;
  } const cases[] = {{3, shape.hidden}, {3, shape.hidden + 8}, {3, 8}, {1, 0}, {1, 1}, {0, 8}};
  for (const auto& [rows, stride] : cases) {
    Tensor t = tensor2(memory.data(), DType::kBF16, rows, shape.hidden);
    t.stride[0] = stride;
    cuda::copy_own_rows(ranks.exchange(0).peers, {t.data, t.stride[0], rows, shape.hidden},
                        layout.x, ranks.stream(0));
    ranks.wait();
    std::vector<std::uint16_t> want, got(rows * shape.hidden);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto first = values.begin() + r * stride;
      want.insert(want.end(), first, first + shape.hidden);
    }
    must(cudaMemcpy(got.data(), ranks.at<void>(0, layout.x), got.size() * 2,
                    cudaMemcpyDeviceToHost));
    EXPECT_EQ(got, want) << rows << " rows, stride " << stride;
  }
}

void expect_missing_rank_named(ExchangeTransport transport) {
  const RankShape shape;
  GroupOptions options = options_of(shape, 3, transport);
  Group sound(shape, options);
  sound.route(1, 24);
  const Bits want = sound.run();
  const milliseconds limit = limit_of(sound, milliseconds(300));
  options.time_limit_ms = limit.count();
  Group group(shape, options);
  group.route(1, 24);
  const auto start = steady_clock::now();
  for (const ExchangePart part : testing::kParts) {
    for (const std::int32_t r : {0, 1}) {
      try {
        group.layers[r]->forward(part);
      } catch (const Error&) {
        // The fault may have been found before the host has enqueued all parts.
      }
    }
  }
  const std::string first = group.fault(0), second = group.fault(1);
  EXPECT_LT(steady_clock::now() - start, 15 * limit);
  EXPECT_TRUE(contains(first, "rank 2 did not send its r")) << first;
  EXPECT_TRUE(contains(second, "rank 2 did not send its r")) << second;
  EXPECT_THROW(group.layers[0]->forward(ExchangePart::kBegin), Error);
  // The late rank learns at its first wait that the other ranks have ended the step.
  try {
    for (const ExchangePart part : testing::kParts) {
      group.layers[2]->forward(part);
    }
  } catch (const Error&) {
  }
  const std::string late = group.fault(2);
  EXPECT_TRUE(contains(late, "rank 2 did not send its r")) << late;
  EXPECT_TRUE(contains(late, "says rank ")) << late;
  group.ranks.reset();
  EXPECT_EQ(group.run(), want) << "after a reset";
}
TEST(Exchange, AMissingRankIsNamedWithinTheTimeLimit) {
  expect_missing_rank_named(ExchangeTransport::kPush);
}
/// There the ranks meet before they send rows.
TEST(Exchange, ARankThatDoesNotComeToTheMeetingIsNamed) {
  expect_missing_rank_named(ExchangeTransport::kCopy);
}

/// Rank 1 leaves the step after its forward: it never calls backward, but begins another forward.
/// Its rows of x then arrive where the other ranks wait for its rows of dout, so they pass this
/// wait.
TEST(Exchange, ARankThatLeavesAStepEndsItOnEveryRank) {
  const RankShape shape{.tokens = 100, .hidden = 72, .width = 40};
  Group group(shape, options_of(shape, 3, ExchangeTransport::kPush));
  group.route(1, 24);
  const Bits want = group.run();
  group.poison();
  group.forward();
  group.ranks.wait();
  const auto set_limit = [&](milliseconds limit) {
    for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
      group.ranks.exchange(r).limits.nanoseconds = std::chrono::nanoseconds(limit).count();
    }
  };
  set_limit(milliseconds(1'000));
  const auto start = steady_clock::now();
  for (const ExchangePart part : testing::kParts) {
    group.layers[0]->backward(part);
    group.layers[1]->forward(part);
    group.layers[2]->backward(part);
  }
  for (std::int32_t r = 0; r < group.ranks.size(); ++r) {
    const std::string sentence = group.fault(r);
    EXPECT_TRUE(contains(sentence, " within the time limit of 1000 ms")) << r << ": " << sentence;
    EXPECT_THROW(group.layers[r]->forward(ExchangePart::kBegin), Error);
  }
  // Much less than the default time limit, also on an emulated GPU.
  EXPECT_LT(steady_clock::now() - start, milliseconds(40'000));
  EXPECT_TRUE(is_nan(group.layers[0]->dx()));
  EXPECT_TRUE(is_nan(group.layers[1]->out()));
  EXPECT_TRUE(is_nan(group.layers[2]->dx()));
  group.ranks.reset();
  set_limit(milliseconds(20'000));
  EXPECT_TRUE(group.run() == want) << "after a reset";
}

/// After a fault neither the slots of other ranks nor a list of pairs may be trusted: memory beside
/// the arrays is not written (DeviceArray looks at it).
TEST(Exchange, AFailedStepWritesNothingBesideItsArrays) {
  constexpr std::int64_t kRows = 2'000;
  const RankShape shape;
  const PretendedRanks ranks(options_of(shape, 2, ExchangeTransport::kPush));
  const ExchangeShape& s = ranks.shape();
  const Exchange& exchange = ranks.exchange(0);
  const cuda::ExchangeLayout layout = exchange.layout;
  const std::int64_t places = s.ranks * s.max_slots;
  // Slots that name expert 0 of this rank, but whose tokens were never written.
  must(cudaMemset(ranks.at<void>(0, layout.slot_expert), 0, places * 4));
  must(cudaMemset(ranks.at<void>(0, layout.slot_token), 0x01, places * 4));
  const auto count = static_cast<std::int32_t>(s.max_slots);
  const std::int32_t counts[2] = {count, count};
  const std::uint32_t fault = cuda::FaultCode::pack(cuda::kFaultMissing, cuda::kPhaseRouting, 1);
  auto* control = ranks.at<cuda::Control>(0, layout.control);
  must(cudaMemcpy(control->slots, counts, sizeof(counts), cudaMemcpyHostToDevice));
  must(cudaMemcpy(&control->fault, &fault, sizeof(fault), cudaMemcpyHostToDevice));
  DeviceArray token(kRows * 4), expert(kRows * 4), weight(kRows * 4), slot(kRows * 4);
  const cuda::PairList list{
      static_cast<std::int32_t*>(token.data()), static_cast<std::int32_t*>(expert.data()),
      static_cast<float*>(weight.data()), static_cast<std::int32_t*>(slot.data()), kRows};
  const cuda::PairWork work{exchange.device, exchange.peers, s, shape.experts / 2, exchange.limits};
  cuda::wait_for(*exchange.device, exchange.peers, {cuda::kPhaseRouting}, exchange.limits,
                 ranks.stream(0));
  cuda::list_pairs(work, list, ranks.stream(0));
  ranks.wait_quietly();
  EXPECT_EQ(token.get<std::int32_t>(), std::vector<std::int32_t>(kRows, -1));
  EXPECT_EQ(expert.get<std::int32_t>(), std::vector<std::int32_t>(kRows, -1));
  token.fill(0);
  slot.fill(0);
  const std::vector<std::uint8_t> before = ranks.buffer(0).get();
  cuda::push_score_grads(exchange.peers, s, list, static_cast<float*>(weight.data()),
                         ranks.stream(0));
  ranks.wait_quietly();
  EXPECT_EQ(ranks.buffer(0).get() == before, true);
}

/// A slow rank may still read what an earlier step has sent to it.
TEST(Exchange, AFailedRankSendsNothing) {
  const RankShape shape;
  const PretendedRanks ranks(options_of(shape, 2, ExchangeTransport::kPush));
  const ExchangeShape& s = ranks.shape();
  const Exchange& exchange = ranks.exchange(0);
  const cudaStream_t stream = ranks.stream(0);
  DeviceArray rows(s.ranks * s.max_tokens * s.hidden * 2, 0x11);
  DeviceArray ids(shape.top_k * 4, 0), weights(ids.bytes(), 0);
  std::vector<std::int32_t> offsets(s.ranks * s.max_tokens + 1);  // each token has a row
  for (std::size_t t = 0; t < offsets.size(); ++t) offsets[t] = static_cast<std::int32_t>(t);
  DeviceArray token_offsets(static_cast<std::int64_t>(offsets.size()) * 4);
  token_offsets.set(offsets);
  const std::vector<std::uint64_t> masks(s.max_tokens, 2);  // rank 1
  must(cudaMemcpy(ranks.at<void>(0, exchange.layout.rank_masks), masks.data(), masks.size() * 8,
                  cudaMemcpyHostToDevice));
  cuda::OwnSlots slots{};
  slots.expert = tensor2(ids.data(), DType::kI32, 1, shape.top_k);
  slots.weight = tensor2(weights.data(), DType::kF32, 1, shape.top_k);
  slots.count = slots.top_k = shape.top_k;
  slots.tokens = 1;
  slots.experts = shape.experts;
  slots.experts_per_rank = shape.experts / 2;
  auto* control = ranks.at<cuda::Control>(0, exchange.layout.control);
  const std::vector<std::uint8_t> before = ranks.buffer(1).get();
  for (const std::uint32_t kind : {cuda::kFaultMissing, cuda::kFaultNone}) {
    const std::uint32_t fault = cuda::FaultCode::pack(kind, 0, 0);
    must(cudaMemcpy(&control->fault, &fault, sizeof(fault), cudaMemcpyHostToDevice));
    const bool failed = kind != cuda::kFaultNone;
    const auto send = [&](const char* what, const auto& work) {
      must(
          cudaMemcpy(ranks.buffer(1).data(), before.data(), before.size(), cudaMemcpyHostToDevice));
      DeviceArray::wait();
      work();
      ranks.wait_quietly();
      EXPECT_EQ(ranks.buffer(1).get() == before, failed) << what;
    };
    send("slots", [&] { cuda::send_slots(*exchange.device, exchange.peers, s, slots, stream); });
    send("rows", [&] {
      cuda::push_rows(exchange.peers, s, {rows.data(), s.hidden, s.max_tokens, s.hidden},
                      {exchange.layout.x, cuda::kPhaseRows}, 8, stream);
    });
    send("partial sums", [&] {
      for (const cuda::TokenPart& part : cuda::token_parts(s)) {
        cuda::push_partials(
            exchange.peers, s,
            {rows.data(), s.hidden, static_cast<std::int32_t*>(token_offsets.data()), part, 1}, 8,
            stream);
      }
    });
    for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
      send("an announcement", [&] {
        Exchange by = exchange;
        by.transport = transport;
        cuda::begin_phases(*exchange.device, exchange.peers, cuda::phase_bit(cuda::kPhasePartials),
                           stream);
        cuda::announce(by, cuda::kPhasePartials, stream);
      });
    }
  }
}

TEST(Exchange, AFailedStepLeavesNaN) {
  const RankShape shape;
  GroupOptions options = options_of(shape, 2, ExchangeTransport::kCopy);
  Group sound(shape, options);
  sound.route(1, 24);
  options.time_limit_ms = limit_of(sound, milliseconds(1'000)).count();
  Group group(shape, options);
  group.route(1, 24);
  // Rank 1 sends its rows but never computes.
  group.layers[1]->forward(ExchangePart::kBegin);
  group.layers[0]->forward(ExchangePart::kAll);
  const std::string sentence = group.fault(0);
  EXPECT_TRUE(contains(sentence, "rank 1 did not send its partial sums")) << sentence;
  EXPECT_TRUE(is_nan(group.layers[0]->out()));
}

/// As if the last rank stalled between its start and its rows, for a product whose tiles wait for
/// rows.
void expect_tiles_wait_until_the_limit(std::int32_t count) {
  const RankShape shape;
  GroupOptions options = options_of(shape, count, ExchangeTransport::kCopy);
  Group sound(shape, options);
  sound.route(1, 24);
  const Bits want = sound.run();
  options.time_limit_ms = limit_of(sound, milliseconds(500)).count();
  Group group(shape, options);
  group.route(1, 24);
  for (auto& layer : group.layers) layer->forward(ExchangePart::kBegin);
  group.ranks.wait();
  const std::int32_t last = count - 1;
  auto* control = group.ranks.at<cuda::Control>(0, group.ranks.exchange(0).layout.control);
  must(cudaMemset(&control->flags[cuda::kPhaseRows][last], 0, 4));
  for (std::int32_t r = 0; r < count; ++r) group.ranks.exchange(r).awaits_from = 0;
  for (const ExchangePart part : {ExchangePart::kCompute, ExchangePart::kFinish}) {
    for (auto& layer : group.layers) layer->forward(part);
  }
  const std::string missing = "rank " + std::to_string(last) + " did not send its rows";
  const std::string first = group.fault(0);
  EXPECT_TRUE(contains(first, missing)) << first;
  EXPECT_TRUE(is_nan(group.layers[0]->out()));
  for (std::int32_t r = 1; r < count; ++r) {
    // The other ranks wait for rank 0 meanwhile, and their own limit may end first.
    const std::string sentence = group.fault(r);
    EXPECT_TRUE(contains(sentence, missing) || contains(sentence, "did not send its partial sums"))
        << r << ": " << sentence;
    EXPECT_TRUE(is_nan(group.layers[r]->out())) << r;
  }
  group.ranks.reset();
  for (std::int32_t r = 0; r < count; ++r) {
    group.ranks.exchange(r).awaits_from = Exchange::kNever;
  }
  EXPECT_TRUE(group.run() == want) << "after a reset";
}

TEST(Exchange, TilesWaitForRowsUntilTheTimeLimit) {
  for (const std::int32_t count : {2, 4}) {
    SCOPED_TRACE(count);
    expect_tiles_wait_until_the_limit(count);
  }
}

TEST(Exchange, OverflowIsReportedOnEveryRank) {
  const RankShape shape;
  const std::int64_t rows = 1024;  // fewer rows than rank 0 gets below
  Group group(shape, options_of(shape, 2, ExchangeTransport::kPush), rows);
  group.route(1, 12);
  for (const ExchangePart part : testing::kParts) {
    for (auto& layer : group.layers) layer->forward(part);
    must(cudaDeviceSynchronize());
  }
  EXPECT_THROW(group.layers[0]->forward(ExchangePart::kBegin), Error);
  const std::string own = group.fault(0), other = group.fault(1);
  EXPECT_TRUE(contains(own, "rank 0 got more rows for its experts than its capacity")) << own;
  EXPECT_TRUE(contains(own, " rows came)")) << own;
  EXPECT_TRUE(contains(other, "rank 0 got more rows")) << other;
  EXPECT_TRUE(contains(other, "says rank 0")) << other;
  group.ranks.reset();
  group.route(7, 0);
  group.run();
}

// The caller has not yet read an error of its own. A first step sets the shared memory limits of
// the kernels: CUDA itself clears the error then.
TEST(Exchange, AnErrorOfTheCallerStaysTheCallers) {
  const RankShape shape;
  Group group(shape, options_of(shape, 2, ExchangeTransport::kPush));
  group.route(1, 24);
  group.run();
  EXPECT_NE(cudaSetDevice(-1), cudaSuccess);
  EXPECT_NO_THROW(group.step());
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
  group.ranks.wait();
}

TEST(Exchange, PartsOutOfOrderAreRefused) {
  const RankShape shape;
  Group group(shape, options_of(shape, 1, ExchangeTransport::kPush));
  group.route(1, 24);
  EXPECT_THROW(group.layers[0]->forward(ExchangePart::kCompute), Error);
  group.layers[0]->forward(ExchangePart::kBegin);
  EXPECT_THROW(group.layers[0]->forward(ExchangePart::kBegin), Error);
  EXPECT_THROW(group.layers[0]->backward(ExchangePart::kCompute), Error);
  group.layers[0]->forward(ExchangePart::kCompute);
  group.layers[0]->forward(ExchangePart::kFinish);
  group.ranks.wait();
}

TEST(Exchange, AHandleOfAnotherEngineIsRefused) {
  const RankShape shape;
  const PretendedRanks ranks(options_of(shape, 1, ExchangeTransport::kPush));
  const cuda::Device& own = *ranks.exchange(0).device;
  const char* other = std::string(own.engine->name) == "portable" ? "hopper" : "portable";
  const cuda::Device* device = nullptr;
  try {
    device = cuda::open_device(0, other);
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  Exec exec = ranks.exec(0);
  exec.device = device;
  try {
    exchange_check(ranks.exchange(0), exec);
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), std::string("exec.device is GPU 0 with the engine ") + other +
                            " but the exchange was opened on GPU 0 with the engine " +
                            own.engine->name + ".");
  }
  cuda::close_device(device);
}

/// A fault between the begin of a step's epochs and their announcement.
TEST(Exchange, ARankThatGivesUpAnnouncesNothing) {
  const RankShape shape;
  GroupOptions options = options_of(shape, 2, ExchangeTransport::kCopy);
  options.time_limit_ms = 100;
  const PretendedRanks ranks(options);
  const Exchange& exchange = ranks.exchange(0);
  const cudaStream_t stream = ranks.stream(0);
  const auto flag = [&] {
    std::uint32_t value = 0;
    must(cudaMemcpy(&value, &ranks.at<cuda::Control>(1, 0)->flags[cuda::kPhasePartials][0], 4,
                    cudaMemcpyDeviceToHost));
    return value;
  };
  const std::uint32_t phases =
      cuda::phase_bit(cuda::kPhaseRouting) | cuda::phase_bit(cuda::kPhasePartials);
  cuda::begin_phases(*exchange.device, exchange.peers, phases, stream);
  cuda::announce(exchange, cuda::kPhasePartials, stream);
  ranks.wait_quietly();
  EXPECT_EQ(flag(), 1u);
  cuda::begin_phases(*exchange.device, exchange.peers, phases, stream);
  cuda::wait_for(*exchange.device, exchange.peers, {cuda::kPhaseRouting}, exchange.limits, stream);
  cuda::announce(exchange, cuda::kPhasePartials, stream);
  ranks.wait_quietly();
  EXPECT_EQ(flag(), 1u);
}

/// A rank that does not wait for a flag gives other bits. This shows that the flags are needed.
TEST(Exchange, AFlagOneEpochOffIsSeen) {
  const RankShape shape;
  for (const bool early : {false, true}) {
    Group group(shape, options_of(shape, 2, ExchangeTransport::kPush));
    group.route(1, 24);
    const Bits want = group.run();
    group.poison();
    const cuda::ExchangeLayout layout = cuda::exchange_layout(group.ranks.shape());
    for (auto& layer : group.layers) layer->forward(ExchangePart::kBegin);
    group.layers[0]->forward(ExchangePart::kCompute);
    if (early) {
      const std::int64_t bytes = 2 * shape.tokens * shape.hidden * 2;
      must(cudaMemset(group.ranks.at<std::uint8_t>(0, layout.partials), 0, bytes));
      auto* control = group.ranks.at<cuda::Control>(0, layout.control);
      const std::uint32_t ahead = 3;  // forward, backward, and this forward
      for (const cuda::Phase phase : {cuda::kPhasePartials, cuda::kPhaseMorePartials}) {
        must(cudaMemcpy(&control->flags[phase][1], &ahead, 4, cudaMemcpyHostToDevice));
      }
    }
    group.layers[0]->forward(ExchangePart::kFinish);
    // The early flags let rank 0 sum before rank 1 has sent anything: wait for that sum. Without
    // them rank 0 cannot end before rank 1, so the test can only give it some time.
    if (early) must(cudaStreamSynchronize(group.ranks.stream(0)));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    group.layers[1]->forward(ExchangePart::kCompute);
    group.layers[1]->forward(ExchangePart::kFinish);
    group.ranks.wait();
    EXPECT_EQ(group.layers[0]->out().get() == want[0], !early);
  }
}

}  // namespace
}  // namespace sonicmoe
