#include "core/plan_ranks.h"

#include <algorithm>
#include <cmath>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
namespace {

constexpr Transport kTransports[] = {{"copy", 361, 386}, {"kernels", 333, 348}, {"nccl", 178, 280}};
constexpr double kMeasuredLink = 450e9;  // NVLink of the H200 on which the rates were measured

// Upper bounds on the bytes of a layer's metadata.
constexpr double kBytesARow = 20, kBytesAToken = 16, kBytesAnExpert = 1024;

void within(const char* name, double value, bool good, const char* range) {
  if (good && std::isfinite(value)) return;
  checks::refuse(std::string(name) + " is " + checks::number_text(value) + ", must be " + range);
}

void above_zero(const char* name, double value) { within(name, value, value > 0, "above 0"); }

void check(const Problem& p, const RankOptions& o) {
  checks::at_least("tokens", p.tokens, 1);
  const std::string ranks = "ranks is " + std::to_string(o.ranks);
  if (o.ranks < 1 || o.ranks > p.experts) {
    checks::refuse(ranks + ", must be from 1 to E = " + std::to_string(p.experts));
  }
  checks::at_least("ranks-per-node", o.ranks_per_node, 1);
  checks::at_least("layers", o.layers, 1);
  if (o.ranks > 1 && o.ranks_per_node > 1) above_zero("link", o.link_gbytes);
  if (o.ranks > o.ranks_per_node) {
    const std::string node = std::to_string(o.ranks_per_node);
    if (o.ranks % o.ranks_per_node != 0) {
      checks::refuse(ranks + ", must be a multiple of ranks-per-node = " + node);
    }
    if (o.network_gbits == 0) {
      checks::refuse("network is missing, must be --network GBIT/S: " + std::to_string(o.ranks) +
                     " ranks are more than the " + node + " of a node");
    }
    above_zero("network", o.network_gbits);
  }
  if (o.tflops != 0) above_zero("tflops", o.tflops);
  within("imbalance", o.imbalance, o.imbalance >= 1, "at least 1");
  within("arena", o.arena, o.arena >= 1, "at least 1");
  within("hidden", o.hidden, o.hidden >= 0 && o.hidden <= 1, "from 0 to 1");
}

/// The load of the busiest rank.
struct Busiest {
  double tokens = 0.0;  ///< T, its own
  double experts = 0.0;
  double rows = 0.0;     ///< rows that it multiplies
  double reached = 0.0;  ///< distinct tokens, its own among them
  double remote = 0.0;   ///< distinct tokens of other ranks
};

Busiest busiest_rank(const Problem& p, const RankOptions& o) {
  const auto T = static_cast<double>(p.tokens), W = static_cast<double>(o.ranks);
  const auto E = static_cast<double>(p.experts), K = static_cast<double>(p.top_k);
  const std::int64_t owned = (p.experts + o.ranks - 1) / o.ranks;
  const double reach = reach_probability(p.experts, p.top_k, owned);
  Busiest b;
  b.tokens = T;
  b.experts = static_cast<double>(owned);
  const double most_rows = W * T * std::min(K, b.experts);
  b.rows = std::min(most_rows, o.imbalance * W * T * K * b.experts / E);
  const double arriving = std::min(1.0, o.imbalance * reach);
  b.reached = W * T * arriving;
  b.remote = (W - 1) * T * arriving;
  return b;
}

RankTransfer transfer(const char* name, bool backward, double bytes, const RankOptions& o) {
  RankTransfer t{name, backward};
  if (o.ranks == 1) return t;
  const auto peers = static_cast<double>(o.ranks - 1);
  const auto near = static_cast<double>(std::min(o.ranks, o.ranks_per_node) - 1);
  t.link_bytes = bytes * near / peers;
  t.network_bytes = bytes - t.link_bytes;
  const double link = near > 0 ? t.link_bytes / (o.link_gbytes * 1e9) : 0;
  const double network =
      o.ranks > o.ranks_per_node ? t.network_bytes / (o.network_gbits * 1e9 / 8) : 0;
  t.seconds = std::max(link, network);
  return t;
}

/// Roofline seconds and flops of a pass.
struct Work {
  double seconds = 0.0, flops = 0.0;
};
Work work_of(const std::vector<KernelCost>& kernels, bool backward) {
  Work w;
  for (const KernelCost& k : kernels) {
    if (k.backward != backward) continue;
    w.seconds += k.seconds;
    w.flops += k.flops;
  }
  return w;
}

RankMemory memory_of(const Problem& p, const Busiest& b, const RankOptions& o) {
  const auto n = static_cast<double>(p.width), d = static_cast<double>(p.hidden);
  const auto element = static_cast<double>(dtype_bytes(p.dtype));
  const auto G = static_cast<double>(gate_factor(p.activation.kind));
  const auto W = static_cast<double>(o.ranks), layers = static_cast<double>(o.layers);
  const double worst_rows = W * b.tokens * std::min(static_cast<double>(p.top_k), b.experts);
  const auto kept = [&](double rows, double tokens) {
    return rows * (G * n * element + kBytesARow) + tokens * kBytesAToken +
           b.experts * kBytesAnExpert;
  };
  const auto sized = [&](double exact, double worst) {
    return RankMemory::Sized{exact, std::min(worst, exact * o.arena), worst};
  };
  RankMemory m;
  m.weights = (G + 1) * b.experts * n * d * element;
  m.gradients = m.weights;
  m.x = b.tokens * d * element;
  m.kept = sized(kept(b.rows, b.reached), kept(worst_rows, W * b.tokens));
  // Backward holds X and dO of other ranks at the same time; partial sums of the rank's own tokens
  // arrive from the other ranks.
  m.buffers = sized(3 * b.remote * d * element, 3 * (W - 1) * b.tokens * d * element);
  const double scratch_row = ((G + 1) * n + d) * element;  // dH, A' and dX~
  m.scratch = sized(b.rows * scratch_row, worst_rows * scratch_row);
  const auto total = [&](double RankMemory::Sized::* size) {
    return layers * (m.weights + m.gradients + m.x + m.kept.*size) + m.buffers.*size +
           m.scratch.*size;
  };
  m.total = {total(&RankMemory::Sized::exact), total(&RankMemory::Sized::arena),
             total(&RankMemory::Sized::worst)};
  return m;
}

}  // namespace

Transport transport_from_name(const std::string& name) {
  std::string known;
  for (const Transport& t : kTransports) {
    if (name == t.name) return t;
    known += (known.empty() ? "" : ", ") + std::string(t.name);
  }
  checks::refuse("transport is \"" + name + "\", must be one of: " + known);
}

double link_gbytes(const Machine& machine, const Transport& transport) {
  if (machine.link_bytes_per_second == 0) {
    checks::refuse("link is missing, must be --link GB/S: no NVLink rate of " + machine.name +
                   " is known");
  }
  return transport.least * (machine.link_bytes_per_second / kMeasuredLink);
}

double reach_probability(std::int64_t experts, std::int64_t top_k, std::int64_t owned) {
  // C(E-owned, K) / C(E, K), factor by factor: choice i misses all owned experts.
  double missed = 1.0;
  for (std::int64_t i = 0; i < top_k && missed > 0; ++i) {
    missed *= static_cast<double>(std::max<std::int64_t>(0, experts - owned - i)) /
              static_cast<double>(experts - i);
  }
  return 1.0 - missed;
}

double expected_ranks(std::int64_t experts, std::int64_t top_k, std::int64_t ranks) {
  const std::int64_t least = experts / ranks, larger = experts % ranks;
  return static_cast<double>(larger) * reach_probability(experts, top_k, least + 1) +
         static_cast<double>(ranks - larger) * reach_probability(experts, top_k, least);
}

RankPlan plan_ranks(const Problem& p, const Machine& machine, const RankOptions& o) {
  check(p, o);
  const Busiest b = busiest_rank(p, o);
  const double row = static_cast<double>(p.hidden * dtype_bytes(p.dtype));
  RankPlan plan;
  plan.experts = b.experts;
  plan.rows = b.rows;
  plan.distinct_ranks = expected_ranks(p.experts, p.top_k, o.ranks);
  plan.distinct_nodes =
      expected_ranks(p.experts, p.top_k, std::max<std::int64_t>(1, o.ranks / o.ranks_per_node));
  plan.sent_rows = b.remote / b.tokens;
  // The last three belong to backward. X is sent again, because no rank keeps other ranks' rows.
  for (const char* name : {"X", "O", "X again", "dO", "dX"}) {
    plan.transfers.push_back(transfer(name, plan.transfers.size() >= 2, b.remote * row, o));
  }
  // Rows are read once and written once for each destination before they leave. Partial sums that
  // come back are read and added.
  const double pack = o.ranks == 1 ? 0 : (b.tokens + b.remote) * row / machine.bytes_per_second;
  const double add = o.ranks == 1 ? 0 : (2 * b.tokens + b.remote) * row / machine.bytes_per_second;
  const auto kernels = load_costs(p, {b.reached, b.rows, b.experts}, machine);
  const auto alone = load_costs(p, {b.tokens, b.rows, b.experts}, machine);
  for (const bool backward : {false, true}) {
    RankPass& pass = backward ? plan.backward : plan.forward;
    const auto seconds = [&](const std::vector<KernelCost>& list, double passes) {
      const Work w = work_of(list, backward);
      return o.tflops > 0 ? w.flops / (o.tflops * 1e12) : (w.seconds + passes) / o.share;
    };
    pass.alone = seconds(alone, 0);
    pass.products = seconds(kernels, (backward ? 2 : 1) * pack + add);
    for (const RankTransfer& t : plan.transfers) {
      if (t.backward == backward) pass.transfers += t.seconds;
    }
    pass.exposed = pass.products + pass.transfers;
    pass.hidden = std::max(pass.products, pass.transfers);
    pass.assumed = pass.exposed - o.hidden * std::min(pass.products, pass.transfers);
  }
  plan.memory = memory_of(p, b, o);
  return plan;
}

}  // namespace sonicmoe
