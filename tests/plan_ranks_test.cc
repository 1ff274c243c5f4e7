#include "core/plan_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <random>
#include <set>

namespace sonicmoe {
namespace {

RankPlan plan(const LayerShape& shape, const RankOptions& options, const char* machine = "h200") {
  return plan_ranks(problem_of(shape, DType::kBF16, Activation{}), machine_from_name(machine),
                    options);
}

std::int64_t owner(std::int64_t expert, std::int64_t experts, std::int64_t ranks) {
  std::int64_t rank = 0;
  while ((rank + 1) * experts / ranks <= expert) ++rank;
  return rank;
}

/// The mean number of owners over every set of K of E experts.
double owners_by_enumeration(std::int64_t experts, std::int64_t top_k, std::int64_t ranks) {
  std::int64_t sets = 0, owners = 0;
  for (std::uint32_t set = 0; set < 1u << experts; ++set) {
    if (std::popcount(set) != top_k) continue;
    std::set<std::int64_t> seen;
    for (std::int64_t e = 0; e < experts; ++e) {
      if (set >> e & 1u) seen.insert(owner(e, experts, ranks));
    }
    ++sets;
    owners += static_cast<std::int64_t>(seen.size());
  }
  return static_cast<double>(owners) / static_cast<double>(sets);
}

TEST(PlanRanks, ExpectedRanksAreThoseOfEverySetOfExperts) {
  for (const std::int64_t experts : {8, 12, 13}) {
    for (const std::int64_t top_k : {1, 2, 5, 8}) {
      for (const std::int64_t ranks : {1, 2, 3, 5, 8}) {
        EXPECT_NEAR(expected_ranks(experts, top_k, ranks),
                    owners_by_enumeration(experts, top_k, ranks), 1e-12)
            << experts << " " << top_k << " " << ranks;
      }
    }
  }
  EXPECT_DOUBLE_EQ(expected_ranks(128, 8, 128), 8.0);
  EXPECT_DOUBLE_EQ(expected_ranks(128, 1, 16), 1.0);
}

/// Rows that one rank sends and multiplies, counted over random tokens.
struct Counted {
  double near = 0, far = 0, rows = 0, nodes = 0, received = 0;
};
Counted count_rows(const LayerShape& s, std::int64_t ranks, std::int64_t ranks_per_node) {
  std::mt19937 random(11);
  std::vector<std::int64_t> experts(static_cast<std::size_t>(s.experts));
  std::iota(experts.begin(), experts.end(), 0);
  Counted c;
  const std::int64_t tokens = 40000;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t home = t % ranks;
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      std::uniform_int_distribution<std::int64_t> rest(k, s.experts - 1);
      std::swap(experts[static_cast<std::size_t>(k)],
                experts[static_cast<std::size_t>(rest(random))]);
    }
    std::set<std::int64_t> seen, nodes;
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      const std::int64_t rank = experts[static_cast<std::size_t>(k)] * ranks / s.experts;
      seen.insert(rank);
      nodes.insert(rank / ranks_per_node);
      c.rows += rank == 1;
    }
    for (const std::int64_t rank : seen) {
      if (rank == home) continue;
      (rank / ranks_per_node == home / ranks_per_node ? c.near : c.far) += 1;
      c.received += rank == 1;
    }
    c.nodes += static_cast<double>(nodes.size());
  }
  const double T = static_cast<double>(s.tokens) / static_cast<double>(tokens);
  const auto W = static_cast<double>(ranks);
  return {c.near * T, c.far * T, c.rows * T * W, c.nodes / static_cast<double>(tokens),
          c.received * T * W};
}

TEST(PlanRanks, BytesAndRowsAreThoseOfRandomRouting) {
  const LayerShape s{4096, 512, 256, 128, 8};
  for (const auto& [ranks, node] : {std::pair<std::int64_t, std::int64_t>{8, 8}, {32, 8}, {4, 1}}) {
    const RankPlan p =
        plan(s, {.ranks = ranks, .ranks_per_node = node, .link_gbytes = 100, .network_gbits = 80});
    const Counted c = count_rows(s, ranks, node);
    const double row = 2.0 * 512;
    EXPECT_NEAR(p.rows / c.rows, 1.0, 0.02);
    EXPECT_NEAR(p.sent_rows * 4096 / (c.near + c.far), 1.0, 0.01);
    // Even routing: a rank receives as many rows as it sends.
    EXPECT_NEAR(p.sent_rows * 4096 / c.received, 1.0, 0.03);
    EXPECT_NEAR(p.distinct_nodes / c.nodes, 1.0, 0.01);
    ASSERT_EQ(p.transfers.size(), 5u);
    for (const RankTransfer& t : p.transfers) {
      EXPECT_NEAR(t.link_bytes, c.near * row, 0.01 * (c.near + c.far) * row) << t.name;
      EXPECT_NEAR(t.network_bytes, c.far * row, 0.01 * (c.near + c.far) * row) << t.name;
      EXPECT_DOUBLE_EQ(t.seconds, std::max(t.link_bytes / 1e11, t.network_bytes / 1e10));
    }
  }
}

// Eight ranks of 8192 tokens, by hand at 600 TFLOP/s and 380 GB/s: 4.1 and 8.2 ms of products, 308
// MB in 0.81 ms a transfer. The estimate let a token choose an expert twice, 8 * (1 - (7/8)^8)
// = 5.25 ranks; without repetition they are 5.34.
TEST(PlanRanks, ReproducesAnEstimateByHand) {
  const RankPlan p =
      plan({8192, 4096, 1536, 128, 8}, {.ranks = 8, .link_gbytes = 380, .tflops = 600});
  EXPECT_NEAR(p.forward.products, 4.12e-3, 0.01e-3);
  EXPECT_NEAR(p.backward.products, 8.25e-3, 0.01e-3);
  const double repeated = 8 * (1 - std::pow(7.0 / 8, 8)) * 7 / 8;
  const RankTransfer& x = p.transfers[0];
  EXPECT_NEAR(x.link_bytes / 1e6, 313.6, 0.1);
  EXPECT_NEAR(x.link_bytes / (repeated * 8192 * 8192), 1.017, 0.001);
  EXPECT_NEAR(x.seconds * 1e3, 0.81, 0.02);
  EXPECT_NEAR((p.forward.transfers + p.backward.transfers) * 1e3, 5 * 0.81, 0.09);
  EXPECT_NEAR(p.over_alone(&RankPass::exposed), 1.33, 0.01);
  EXPECT_NEAR(p.over_alone(&RankPass::hidden), 1.0, 1e-6);
}

/// Of two H200, hot. alone_ms: the layer alone. exposed: the time over two ranks with no transfer
/// hidden, divided by alone_ms.
struct Pair {
  LayerShape shape;
  double alone_ms, exposed;
};
constexpr Pair kPairs[] = {{{24576, 1536, 256, 128, 8}, 2.86, 1.38},
                           {{16384, 4096, 256, 256, 16}, 9.72, 1.21},
                           {{16384, 2048, 768, 128, 8}, 6.51, 1.15},
                           {{16384, 4096, 1536, 128, 8}, 24.7, 1.08}};

TEST(PlanRanks, TimesOfTwoRanksAreThoseMeasured) {
  const double link = link_gbytes(machine_from_name("h200"), transport_from_name("copy"));
  EXPECT_DOUBLE_EQ(link, 361);
  for (const Pair& m : kPairs) {
    const RankPlan p = plan(m.shape, {.ranks = 2, .link_gbytes = link});
    EXPECT_NEAR((p.forward.alone + p.backward.alone) * 1e3 / m.alone_ms, 1.0, 0.08)
        << m.shape.width;
    const double transfers = (p.forward.transfers + p.backward.transfers) * 1e3;
    EXPECT_NEAR(1 + transfers / m.alone_ms, m.exposed, 0.02) << m.shape.width;
  }
}

TEST(PlanRanks, OneRankIsTheLayerAlone) {
  const LayerShape s = config_from_name("olmoe");
  const Problem problem = problem_of(s, DType::kBF16, Activation{});
  const RankPlan p = plan(s, {});
  double forward = 0, backward = 0;
  for (const KernelCost& k : kernel_costs(problem, machine_from_name("h200"))) {
    (k.backward ? backward : forward) += k.seconds;
  }
  EXPECT_DOUBLE_EQ(p.forward.exposed, forward / ShareOfRoofline{}.mean);
  EXPECT_DOUBLE_EQ(p.backward.hidden, backward / ShareOfRoofline{}.mean);
  EXPECT_DOUBLE_EQ(p.over_alone(&RankPass::exposed), 1.0);
  EXPECT_DOUBLE_EQ(p.distinct_ranks, 1.0);
  EXPECT_EQ(p.sent_rows, 0.0);
  const MemoryCost cost = memory_cost(problem);
  const RankMemory& m = p.memory;
  EXPECT_GE(m.kept.exact, static_cast<double>(cost.ours()));
  EXPECT_NEAR(m.kept.exact / static_cast<double>(cost.ours()), 1.0, 0.02);
  EXPECT_EQ(m.kept.arena, m.kept.exact);  // one rank cannot get more rows than T*K
  EXPECT_EQ(m.x, static_cast<double>(cost.x));
  EXPECT_EQ(m.buffers.worst, 0.0);
}

// All products of this shape are bound by flops, which do not change with the ranks. The rest is
// bytes: O and dX write a row for each token that arrived, rows are packed once for each transfer
// that sends them out, and partial sums are added.
TEST(PlanRanks, WhatIsBesideTheProductsIsBytes) {
  const RankPlan p = plan({8192, 4096, 1536, 128, 8}, {.ranks = 8, .link_gbytes = 361});
  const double T = 8192, remote = p.sent_rows * T, reached = p.distinct_ranks * T;
  const double a_row = 2.0 * 4096 / 4.8e12 / ShareOfRoofline{}.mean;
  const double written = reached - T, packed = T + remote, added = 2 * T + remote;
  EXPECT_NEAR((p.forward.products - p.forward.alone) / a_row, written + packed + added, 1);
  EXPECT_NEAR((p.backward.products - p.backward.alone) / a_row, written + 2 * packed + added, 1);
}

TEST(PlanRanks, MemoryOfEightRanks) {
  const double T = 8192, d = 4096, n = 1536, W = 8;
  const RankPlan p =
      plan({8192, 4096, 1536, 128, 8}, {.ranks = 8, .link_gbytes = 100, .layers = 3});
  const RankMemory& m = p.memory;
  EXPECT_DOUBLE_EQ(p.rows, T * 8);
  EXPECT_DOUBLE_EQ(m.weights, 3 * 16 * n * d * 2);
  EXPECT_NEAR(m.kept.exact / (T * 8 * 2 * n * 2), 1.0, 0.01);
  EXPECT_DOUBLE_EQ(m.kept.arena, 1.3 * m.kept.exact);
  EXPECT_NEAR(m.kept.worst / (W * T * 8 * 2 * n * 2), 1.0, 0.01);
  EXPECT_DOUBLE_EQ(m.buffers.exact, 3 * p.sent_rows * T * d * 2);
  EXPECT_DOUBLE_EQ(m.buffers.worst, 3 * 7 * T * d * 2);
  EXPECT_DOUBLE_EQ(m.scratch.exact, T * 8 * (3 * n + d) * 2);
  EXPECT_DOUBLE_EQ(m.scratch.worst, 8 * m.scratch.exact);
  EXPECT_DOUBLE_EQ(m.total.arena, 3 * (m.weights + m.gradients + m.x + m.kept.arena) +
                                      m.buffers.arena + m.scratch.arena);
}

TEST(PlanRanks, HiddenAndUneven) {
  const LayerShape s{8192, 1536, 256, 256, 16};
  const RankOptions even{.ranks = 8, .link_gbytes = 361};
  const RankPlan p = plan(s, even);
  EXPECT_GT(p.forward.transfers, p.forward.products);  // communication alone is longer
  EXPECT_DOUBLE_EQ(p.forward.hidden, p.forward.transfers);
  RankOptions half = even;
  half.hidden = 0.5;
  EXPECT_DOUBLE_EQ(plan(s, half).forward.assumed, p.forward.exposed - 0.5 * p.forward.products);
  half.hidden = 1;
  EXPECT_NEAR(plan(s, half).forward.assumed, p.forward.hidden, 1e-12);
  RankOptions uneven = even;
  uneven.imbalance = 1.5;
  EXPECT_DOUBLE_EQ(plan(s, uneven).rows, 1.5 * p.rows);
  uneven.imbalance = 1e6;  // all tokens choose this rank, each of its K experts there
  EXPECT_DOUBLE_EQ(plan(s, uneven).rows, 8.0 * 8192 * 16);
  EXPECT_DOUBLE_EQ(plan(s, uneven).sent_rows, 7.0);
  // 13 experts on 5 ranks: the busiest owns 3.
  EXPECT_DOUBLE_EQ(plan({100, 8, 8, 13, 2}, {.ranks = 5, .link_gbytes = 1}).rows,
                   500.0 * 2 * 3 / 13);
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

TEST(PlanRanks, Refusals) {
  const LayerShape s{64, 8, 8, 32, 2};
  const auto refused = [&](const RankOptions& o) { return refusal([&] { plan(s, o); }); };
  EXPECT_EQ(refused({.ranks = 33, .link_gbytes = 1}), "ranks is 33, must be from 1 to E = 32");
  EXPECT_EQ(refused({.ranks = 0}), "ranks is 0, must be from 1 to E = 32");
  EXPECT_EQ(refused({.ranks = 2}), "link is 0, must be above 0");
  EXPECT_EQ(refused({.ranks = 12, .link_gbytes = 1, .network_gbits = 1}),
            "ranks is 12, must be a multiple of ranks-per-node = 8");
  EXPECT_EQ(refused({.ranks = 16, .link_gbytes = 1}),
            "network is missing, must be --network GBIT/S: 16 ranks are more than the 8 of a node");
  EXPECT_EQ(refused({.ranks = 16, .link_gbytes = 1, .network_gbits = -1}),
            "network is -1, must be above 0");
  EXPECT_EQ(refused({.tflops = -2}), "tflops is -2, must be above 0");
  EXPECT_EQ(refused({.imbalance = 0.5}), "imbalance is 0.5, must be at least 1");
  EXPECT_EQ(refused({.arena = std::nan("")}), "arena is nan, must be at least 1");
  EXPECT_EQ(refused({.hidden = 1.5}), "hidden is 1.5, must be from 0 to 1");
  EXPECT_EQ(refused({.ranks_per_node = 0}), "ranks-per-node is 0, must be at least 1");
  EXPECT_EQ(refused({.layers = 0}), "layers is 0, must be at least 1");
  EXPECT_EQ(refusal([] { plan({0, 8, 8, 4, 2}, {}); }), "tokens is 0, must be at least 1");
  EXPECT_EQ(refusal([] { transport_from_name("tcp"); }),
            "transport is \"tcp\", must be one of: copy, kernels, nccl");
  EXPECT_EQ(refusal([] { link_gbytes(machine_from_name("l40s"), transport_from_name("copy")); }),
            "link is missing, must be --link GB/S: no NVLink rate of l40s is known");
  // Two thirds of an H200's NVLink.
  EXPECT_NEAR(link_gbytes(machine_from_name("a100"), transport_from_name("copy")) / 361, 2.0 / 3,
              1e-12);
}

}  // namespace
}  // namespace sonicmoe
