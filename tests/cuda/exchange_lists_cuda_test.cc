// The lists of pairs of every rank, compared with a sort on the host: ranks with other numbers of
// tokens, other K or a list of pairs, empty slots, repeated experts, more pairs than the capacity,
// and faults.
#include <algorithm>
#include <random>
#include <tuple>

#include "cuda/metadata/position_pairs.h"
#include "cuda/rank_group.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::GroupOptions;
using testing::must;
using testing::PretendedRanks;

/// The routing of one rank.
struct Routed {
  std::int64_t tokens;
  std::int64_t top_k;      ///< of ids; 0: a list of pairs
  std::int64_t pairs = 0;  ///< length of this list
  std::int64_t slots() const { return top_k != 0 ? tokens * top_k : pairs; }
};

struct Case {
  const char* name;
  std::vector<Routed> ranks;
  std::int64_t max_tokens;
  std::int64_t experts;  ///< E
  std::int64_t chosen;   ///< the experts that slots may name; a part of the slots is empty
};

struct Pair {
  std::int64_t token, expert, slot;
  float weight;
};

/// The lists of one rank in host memory.
struct Lists {
  std::vector<std::int32_t> token, expert, slot, offsets;
  std::vector<float> weight;
};

/// The lists of one rank in device memory.
struct DeviceLists {
  DeviceLists(std::int64_t count, std::int64_t tokens)
      : token(count * 4),
        expert(count * 4),
        weight(count * 4),
        slot(count * 4),
        offsets((tokens + 1) * 4),
        list{static_cast<std::int32_t*>(token.data()), static_cast<std::int32_t*>(expert.data()),
             static_cast<float*>(weight.data()), static_cast<std::int32_t*>(slot.data()), count} {}
  std::int32_t* token_offsets() const { return static_cast<std::int32_t*>(offsets.data()); }
  Lists get() const {
    return {token.get<std::int32_t>(), expert.get<std::int32_t>(), slot.get<std::int32_t>(),
            offsets.get<std::int32_t>(), weight.get<float>()};
  }

  DeviceArray token, expert, weight, slot, offsets;
  cuda::PairList list;
};

/// Ranks that have sent their slots to each other.
class SentRouting {
 public:
  explicit SentRouting(const Case& c) : case_(c), ranks_(options(c)) {
    std::mt19937 random(7);
    for (std::int32_t r = 0; r < ranks_.size(); ++r) send(r, random);
    for (std::int32_t r = 0; r < ranks_.size(); ++r) {
      const Exchange& e = ranks_.exchange(r);
      cuda::wait_for(*e.device, e.peers, {cuda::kPhaseRouting}, e.limits, ranks_.stream(r));
    }
    ranks_.wait();
  }

  const PretendedRanks& ranks() const { return ranks_; }
  std::int64_t own_experts() const { return case_.experts / ranks_.size(); }
  std::int64_t layer_tokens() const { return ranks_.size() * case_.max_tokens; }
  cuda::PairWork work(std::int32_t r) const {
    const Exchange& e = ranks_.exchange(r);
    return {e.device, e.peers, ranks_.shape(), own_experts(), e.limits};
  }

  /// The pairs of rank r, by position.
  std::vector<Pair> pairs(std::int32_t r) const {
    std::vector<Pair> out;
    for (std::int32_t place = 0; place < ranks_.size(); ++place) {
      for (Pair p : sent_[(r + place) % ranks_.size()]) {
        p.expert -= r * own_experts();
        if (p.expert < 0 || p.expert >= own_experts()) continue;
        p.token += place * case_.max_tokens;
        out.push_back(p);
      }
    }
    std::sort(out.begin(), out.end(), [](const Pair& a, const Pair& b) {
      return std::tie(a.token, a.expert, a.slot) < std::tie(b.token, b.expert, b.slot);
    });
    return out;
  }
  /// The lists of rank r, of `rows` rows.
  Lists expected(std::int32_t r, std::int64_t rows) const {
    std::vector<Pair> pairs = this->pairs(r);
    Lists x;
    const auto most = static_cast<std::int32_t>(rows);
    x.offsets.assign(layer_tokens() + 1, 0);
    for (const Pair& p : pairs) ++x.offsets[p.token + 1];
    for (std::int64_t t = 0; t < layer_tokens(); ++t) x.offsets[t + 1] += x.offsets[t];
    for (std::int32_t& offset : x.offsets) offset = std::min(offset, most);
    pairs.resize(rows, {-1, -1, -1, 0.0f});
    for (const Pair& p : pairs) {
      x.token.push_back(static_cast<std::int32_t>(p.token));
      x.expert.push_back(static_cast<std::int32_t>(p.expert));
      x.slot.push_back(static_cast<std::int32_t>(p.slot));
      x.weight.push_back(p.weight);
    }
    return x;
  }

 private:
  static GroupOptions options(const Case& c) {
    GroupOptions o;
    o.shape = {static_cast<std::int32_t>(c.ranks.size()), c.max_tokens, 1, 8, DType::kBF16};
    for (const Routed& r : c.ranks) o.shape.max_slots = std::max(o.shape.max_slots, r.slots());
    return o;
  }
  DeviceArray* array(std::int64_t bytes) {
    return arrays_.emplace_back(std::make_unique<DeviceArray>(bytes)).get();
  }
  /// An expert out of [0, E) in every eighth slot.
  std::int32_t draw_expert(std::mt19937& random) const {
    const auto any = static_cast<std::int64_t>(random() % case_.chosen);
    return static_cast<std::int32_t>(random() % 8 != 0 ? any : any % 2 != 0 ? -1 : case_.experts);
  }
  void send(std::int32_t r, std::mt19937& random) {
    const Routed& routed = case_.ranks[r];
    const std::int64_t count = routed.slots();
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    std::vector<std::int32_t> expert, token;
    std::vector<float> weight;
    std::vector<Pair>& sent = sent_.emplace_back();
    for (std::int64_t i = 0; i < count; ++i) {
      expert.push_back(draw_expert(random));
      weight.push_back(uniform(random));
      token.push_back(routed.top_k != 0
                          ? static_cast<std::int32_t>(i / routed.top_k)
                          : static_cast<std::int32_t>(random() % (routed.tokens + 2)) - 1);
      if (token[i] < 0 || token[i] >= routed.tokens) continue;
      sent.push_back({token[i], expert[i], i, weight[i]});
    }
    DeviceArray *experts = array(count * 4), *tokens = array(count * 4), *w = array(count * 4);
    experts->set(expert);
    tokens->set(token);
    w->set(weight);
    const Exchange& e = ranks_.exchange(r);
    cuda::OwnSlots slots{};
    if (routed.top_k != 0) {
      slots.expert = tensor2(experts->data(), DType::kI32, routed.tokens, routed.top_k);
      slots.weight = tensor2(w->data(), DType::kF32, routed.tokens, routed.top_k);
    } else {
      slots.expert = tensor1(experts->data(), DType::kI32, count);
      slots.token = tensor1(tokens->data(), DType::kI32, count);
      slots.weight = tensor1(w->data(), DType::kF32, count);
    }
    slots.top_k = routed.top_k;
    slots.count = count;
    slots.tokens = routed.tokens;
    slots.experts = case_.experts;
    slots.experts_per_rank = own_experts();
    cuda::begin_phases(*e.device, e.peers, cuda::phase_bit(cuda::kPhaseRouting), ranks_.stream(r));
    cuda::send_slots(*e.device, e.peers, ranks_.shape(), slots, ranks_.stream(r));
  }

  Case case_;
  PretendedRanks ranks_;
  std::vector<std::vector<Pair>> sent_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
};

void expect_lists(const Lists& got, const Lists& want) {
  EXPECT_EQ(got.offsets, want.offsets);
  EXPECT_EQ(got.token, want.token);
  EXPECT_EQ(got.expert, want.expert);
  EXPECT_EQ(got.slot, want.slot);
  EXPECT_EQ(got.weight, want.weight);
}

/// K that does not divide the 1024 slots of a chunk; fewer slots than max_tokens * K; ranks without
/// tokens; few experts, which tokens then have several times; one rank with all pairs; ranks whose
/// K differ, and ranks with lists of pairs among others.
const Case kCases[] = {
    {"one rank", {{500, 3}}, 500, 4, 4},
    {"two ranks", {{400, 7}, {393, 7}}, 400, 24, 24},
    {"no tokens", {{0, 5}, {333, 5}, {0, 5}}, 600, 9, 9},
    {"all to rank 0", {{300, 8}, {290, 8}, {280, 8}, {270, 8}}, 300, 12, 3},
    {"one expert", {{200, 6}, {1, 6}}, 201, 2, 1},
    {"no pairs", {{20, 4}, {10, 4}}, 20, 4, 1},
    {"eight ranks",
     {{250, 5}, {243, 5}, {0, 5}, {229, 5}, {222, 5}, {215, 5}, {208, 5}, {201, 5}},
     260,
     16,
     16},
    {"other K", {{700, 1}, {100, 11}, {275, 4}}, 700, 6, 6},
    {"other forms", {{300, 4}, {90, 0, 1100}, {0, 0, 0}}, 300, 6, 6},
    {"lists of pairs", {{90, 0, 600}, {120, 0, 30}}, 120, 4, 4},
};

TEST(ExchangeLists, PositionsEqualASort) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const SentRouting routing(c);
    for (std::int32_t r = 0; r < routing.ranks().size(); ++r) {
      const auto count = static_cast<std::int64_t>(routing.pairs(r).size());
      for (const std::int64_t rows : {count, count + 1500}) {
        const DeviceLists lists(rows, routing.layer_tokens());
        cuda::list_positions(routing.work(r), lists.list, lists.token_offsets(),
                             routing.ranks().stream(r));
        routing.ranks().wait();
        expect_lists(lists.get(), routing.expected(r, rows));
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

/// What the layer reads of the metadata, with the slots of the sending ranks.
struct Rows {
  std::vector<std::int32_t> token, slot, position_row, begin, count, records;
};

Rows rows_of(const cuda::Metadata& m, const Problem& p, const std::vector<std::int32_t>& slots) {
  const auto get = [](const void* from, std::int64_t count) {
    std::vector<std::int32_t> words(count);
    must(cudaMemcpy(words.data(), from, count * 4, cudaMemcpyDeviceToHost));
    return words;
  };
  Rows rows;
  rows.begin = get(m.expert_begin, p.experts);
  rows.count = get(m.expert_rows, p.experts);
  const std::int64_t used = rows.begin.back() + rows.count.back();
  rows.token = get(m.row_token, used);
  for (const std::int32_t slot : get(m.row_slot, used)) rows.slot.push_back(slots[slot]);
  rows.position_row = get(m.position_row, p.capacity);
  rows.records = get(m.records, get(m.record_count, 1)[0] * 4);
  return rows;
}

/// sort_pairs() behind list_positions() gives the rows of build_metadata() behind list_pairs().
TEST(ExchangeLists, RowsAreThoseOfPairsInAnyOrder) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.name);
    const SentRouting routing(c);
    const PretendedRanks& ranks = routing.ranks();
    for (std::int32_t r = 0; r < ranks.size(); ++r) {
      Problem p;
      p.form = RoutingForm::kPairs;
      p.tokens = routing.layer_tokens();
      p.experts = routing.own_experts();
      p.hidden = p.width = 8;
      p.capacity = static_cast<std::int64_t>(routing.pairs(r).size()) + 100;
      Rows rows[2];
      for (const bool by_position : {false, true}) {
        const DeviceLists lists(p.capacity, p.tokens);
        const DeviceArray saved(cuda::metadata_layout(p, nullptr).bytes);
        const DeviceArray scratch(cuda::metadata_scratch(p));
        const cuda::MetadataWork work{scratch.data()};
        cuda::Metadata m = cuda::metadata_layout(p, saved.data());
        const cuda::Device& device = *ranks.exchange(r).device;
        const cudaStream_t stream = ranks.stream(r);
        if (by_position) {
          m.position_slot = nullptr;
          cuda::list_positions(routing.work(r), lists.list, m.token_offsets, stream);
          cuda::sort_pairs(device, p, {lists.list.expert, lists.list.token}, m, work, stream);
        } else {
          cuda::list_pairs(routing.work(r), lists.list, stream);
          Routing pairs;
          pairs.token = tensor1(lists.list.token, DType::kI32, p.capacity);
          pairs.expert = tensor1(lists.list.expert, DType::kI32, p.capacity);
          cuda::build_metadata(device, p, pairs, m, work, stream);
        }
        ranks.wait();
        rows[by_position ? 1 : 0] = rows_of(m, p, lists.slot.get<std::int32_t>());
      }
      EXPECT_EQ(rows[0].begin, rows[1].begin);
      EXPECT_EQ(rows[0].count, rows[1].count);
      EXPECT_EQ(rows[0].token, rows[1].token);
      EXPECT_EQ(rows[0].slot, rows[1].slot);
      EXPECT_EQ(rows[0].position_row, rows[1].position_row);
      EXPECT_EQ(rows[0].records, rows[1].records);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

/// Of more pairs than the capacity those of the first positions are listed, and nothing is written
/// beside the arrays (DeviceArray looks at it).
TEST(ExchangeLists, MorePairsThanRowsAreAFault) {
  for (const Case& c : {kCases[1], kCases[8]}) {
    const SentRouting routing(c);
    const auto count = static_cast<std::int64_t>(routing.pairs(0).size());
    for (const std::int64_t rows : {count - 1, count / 3, std::int64_t{0}}) {
      const DeviceLists lists(rows, routing.layer_tokens());
      cuda::list_positions(routing.work(0), lists.list, lists.token_offsets(),
                           routing.ranks().stream(0));
      routing.ranks().wait_quietly();
      expect_lists(lists.get(), routing.expected(0, rows));
      try {
        exchange_check(routing.ranks().exchange(0), routing.ranks().exec(0));
        ADD_FAILURE() << "no fault";
      } catch (const Error& e) {
        EXPECT_NE(std::string(e.what()).find("rank 0 got more rows"), std::string::npos)
            << e.what();
      }
    }
  }
}

void set_fault(const PretendedRanks& ranks, std::int32_t r) {
  const std::uint32_t fault = cuda::FaultCode::pack(cuda::kFaultMissing, cuda::kPhaseFree, 1);
  must(cudaMemcpy(&ranks.at<cuda::Control>(r, 0)->fault, &fault, 4, cudaMemcpyHostToDevice));
}

/// A fault that another stream finds after the routing has come leaves the list complete, whichever
/// blocks could see it.
TEST(ExchangeLists, AFaultAfterTheRoutingLeavesTheListComplete) {
  for (const Case& c : {kCases[3], kCases[8]}) {
    const SentRouting routing(c);
    const std::int64_t rows = static_cast<std::int64_t>(routing.pairs(0).size()) + 10;
    set_fault(routing.ranks(), 0);
    const DeviceLists lists(rows, routing.layer_tokens());
    cuda::list_positions(routing.work(0), lists.list, lists.token_offsets(),
                         routing.ranks().stream(0));
    routing.ranks().wait_quietly();
    expect_lists(lists.get(), routing.expected(0, rows));
  }
}

/// If the routing has not come, slots, their number and K may be anything.
TEST(ExchangeLists, LostRoutingMakesEmptyLists) {
  const SentRouting routing(kCases[1]);
  const PretendedRanks& ranks = routing.ranks();
  const Exchange& e = ranks.exchange(0);
  constexpr std::int64_t kRows = 3'000;
  set_fault(ranks, 0);
  auto* control = ranks.at<cuda::Control>(0, 0);
  for (const int byte : {0x00, 0x01, 0x7f, 0xff}) {
    must(
        cudaMemset(ranks.at<void>(0, e.layout.slot_token), byte, e.layout.x - e.layout.slot_token));
    must(cudaMemset(ranks.at<void>(0, e.layout.pair_counts), byte,
                    e.layout.rank_masks - e.layout.pair_counts));
    must(cudaMemset(control->slots, byte, sizeof(control->slots)));
    must(cudaMemset(control->top_k, byte, sizeof(control->top_k)));
    DeviceArray::wait();
    const DeviceLists lists(kRows, routing.layer_tokens());
    cuda::wait_for(*e.device, e.peers, {cuda::kPhaseRouting}, e.limits, ranks.stream(0));
    cuda::list_positions(routing.work(0), lists.list, lists.token_offsets(), ranks.stream(0));
    ranks.wait_quietly();
    const Lists got = lists.get();
    EXPECT_EQ(got.token, std::vector<std::int32_t>(kRows, -1));
    EXPECT_EQ(got.expert, std::vector<std::int32_t>(kRows, -1));
    EXPECT_EQ(got.offsets, std::vector<std::int32_t>(routing.layer_tokens() + 1, 0));
  }
}

}  // namespace
}  // namespace sonicmoe
