#include "plan_ranks.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "core/check_tensor.h"

namespace sonicmoe::cli {
namespace {

std::vector<std::int64_t> counts(const std::string& text) {
  std::vector<std::int64_t> list;
  const char *at = text.data(), *const end = at + text.size();
  for (;;) {
    std::int64_t value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || (next != end && *next != ',')) {
      checks::refuse("ranks is \"" + text + "\", must be integers and commas, as 8 or 2,4,8");
    }
    list.push_back(value);
    if (next == end) return list;
    at = next + 1;
  }
}

/// The rates of a plan, and the source of each rate.
struct Rates {
  Transport transport;
  RankOptions options;  ///< all but the number of ranks
  std::string link;     ///< in words
};

bool measured_link(const Machine& machine) { return machine.name == "h200"; }

Rates rates_of(const RanksOptions& o, const RanksSubject& s, bool needs_link) {
  Rates r;
  r.transport = transport_from_name(o.transport.empty() ? "copy" : o.transport);
  r.options = {.ranks_per_node = o.ranks_per_node,
               .link_gbytes = o.link_gbytes,
               .network_gbits = o.network_gbits,
               .tflops = o.tflops,
               .share = s.engine.share.mean,
               .imbalance = o.imbalance,
               .arena = o.arena,
               .hidden = o.hidden,
               .layers = o.layers};
  if (o.link_gbytes != 0) {
    r.link = "given";
  } else if (needs_link) {
    r.options.link_gbytes = link_gbytes(s.machine, r.transport);
    r.link = measured_link(s.machine) ? "measured between two H200"
                                      : "estimated from its NVLink and what two H200 measured";
  }
  return r;
}

std::string products_text(const RanksOptions& o, const RanksSubject& s) {
  if (o.tflops != 0) return fixed(o.tflops, 0) + " TFLOP/s, given";
  const std::string share = fixed(s.engine.share.mean, 2) + " of the roofline, ";
  if (s.engine.evidence == Evidence::kMeasured) return share + "measured on this device";
  return share + "measured on an H200 with the engine hopper, assumed here";
}

Json to_json(const RankPass& p) {
  return {{"alone_us", p.alone * 1e6},         {"products_us", p.products * 1e6},
          {"transfers_us", p.transfers * 1e6}, {"exposed_us", p.exposed * 1e6},
          {"hidden_us", p.hidden * 1e6},       {"assumed_us", p.assumed * 1e6}};
}

Json to_json(const RankMemory::Sized& s) {
  return {{"exact", s.exact}, {"arena", s.arena}, {"worst", s.worst}};
}

Json to_json(const RankMemory& m) {
  return {
      {"weights", m.weights},     {"gradients", m.gradients},      {"x", m.x},
      {"kept", to_json(m.kept)},  {"buffers", to_json(m.buffers)}, {"scratch", to_json(m.scratch)},
      {"total", to_json(m.total)}};
}

Json to_json(std::int64_t ranks, const RankPlan& p) {
  Json transfers = Json::array();
  for (const RankTransfer& t : p.transfers) {
    transfers.push_back({{"name", t.name},
                         {"pass", t.backward ? "backward" : "forward"},
                         {"link_bytes", t.link_bytes},
                         {"network_bytes", t.network_bytes},
                         {"us", t.seconds * 1e6}});
  }
  return {{"ranks", ranks},
          {"experts", p.experts},
          {"rows", p.rows},
          {"distinct_ranks", p.distinct_ranks},
          {"distinct_nodes", p.distinct_nodes},
          {"sent_rows", p.sent_rows},
          {"transfers", transfers},
          {"forward", to_json(p.forward)},
          {"backward", to_json(p.backward)},
          {"over_alone",
           {{"exposed", p.over_alone(&RankPass::exposed)},
            {"hidden", p.over_alone(&RankPass::hidden)},
            {"assumed", p.over_alone(&RankPass::assumed)}}},
          {"memory_bytes", to_json(p.memory)}};
}

Json document(const RanksOptions& o, const RanksSubject& s, const Rates& r) {
  const auto rate = [](double value) { return value > 0 ? Json(value) : Json(nullptr); };
  return {{"shape", cli::to_json(s.shape)},
          {"dtype", s.layer.dtype},
          {"activation", s.layer.activation},
          {"device", s.machine.name},
          {"engine", s.engine.name},
          {"ranks_per_node", o.ranks_per_node},
          {"layers", o.layers},
          {"imbalance", o.imbalance},
          {"arena", o.arena},
          {"hidden", o.hidden},
          {"link", {{"bytes_per_second", rate(r.options.link_gbytes * 1e9)}, {"source", r.link}}},
          {"network", {{"bytes_per_second", rate(r.options.network_gbits * 1e9 / 8)}}},
          {"products", products_text(o, s)}};
}

double sent(const RankPlan& p) {
  double bytes = 0;
  for (const RankTransfer& t : p.transfers) bytes += t.link_bytes + t.network_bytes;
  return bytes;
}

void print_assumptions(const RanksOptions& o, const RanksSubject& s, const Rates& r) {
  std::printf("%s, %s, %s: T tokens and E/ranks experts on each %s\n", to_text(s.shape).c_str(),
              s.layer.dtype.c_str(), s.layer.activation.c_str(), s.machine.name.c_str());
  std::printf("products: engine %s, %s\n", s.engine.name.c_str(), products_text(o, s).c_str());
  if (!s.engine.note.empty()) std::printf("  %s\n", s.engine.note.c_str());
  if (r.options.link_gbytes > 0) {
    std::printf("inside a node of %lld: %s GB/s per GPU and direction, %s\n",
                static_cast<long long>(o.ranks_per_node), fixed(r.options.link_gbytes, 0).c_str(),
                r.link.c_str());
  }
  if (r.options.network_gbits > 0) {
    std::printf("between nodes: %s GB/s per GPU and direction, given\n",
                fixed(r.options.network_gbits / 8, 1).c_str());
  }
  std::printf("routing: even and random");
  if (o.imbalance > 1) std::printf(", the busiest rank with %g times the mean", o.imbalance);
  std::printf("; a token's row is sent to a rank once\n\n");
}

void print_times(const RanksOptions& o, const std::vector<std::pair<std::int64_t, RankPlan>>& all) {
  std::printf("%5s %9s %9s %17s %17s %19s %15s\n", "", "rows sent", "MB sent", "products, ms",
              "transfers, ms", "both passes, ms", "over one GPU");
  std::printf("%5s %9s %9s %8s %8s %8s %8s %9s %9s %7s %7s", "ranks", "a token", "in all",
              "forward", "backward", "forward", "backward", "exposed", "hidden", "exposed",
              "hidden");
  if (o.hidden > 0) std::printf("  hiding %g", o.hidden);
  std::printf("\n");
  for (const auto& [ranks, p] : all) {
    const RankPass &f = p.forward, &b = p.backward;
    std::printf("%5lld %9.2f %9.0f %8.2f %8.2f %8.2f %8.2f %9.2f %9.2f %7.2f %7.2f",
                static_cast<long long>(ranks), p.sent_rows, sent(p) / 1e6, f.products * 1e3,
                b.products * 1e3, f.transfers * 1e3, b.transfers * 1e3,
                (f.exposed + b.exposed) * 1e3, (f.hidden + b.hidden) * 1e3,
                p.over_alone(&RankPass::exposed), p.over_alone(&RankPass::hidden));
    if (o.hidden > 0) std::printf("  %9.2f", p.over_alone(&RankPass::assumed));
    std::printf("\n");
  }
}

void print_meanings() {
  std::printf(
      "\nexposed: products and transfers one after the other. hidden: the shorter is hidden.\n"
      "over one GPU: time divided by that of one GPU with as many rows and experts.\n"
      "exact, arena, worst case: memory if buffers have room for the rows of even routing, for\n"
      "--arena times as many, or for any routing.\n");
}

void print_memory(const RanksOptions& o, const RanksSubject& s,
                  const std::vector<std::pair<std::int64_t, RankPlan>>& all) {
  std::printf("\nmemory of a GPU, %lld layer%s of experts, without optimizer",
              static_cast<long long>(o.layers), o.layers == 1 ? "" : "s");
  if (s.machine.memory_bytes != 0) {
    std::printf(" (of %s)", bytes_text(static_cast<double>(s.machine.memory_bytes)).c_str());
  }
  std::printf("\n%5s %11s %11s %11s %11s %11s %11s %11s %11s\n", "ranks", "weights", "gradients",
              "X", "kept", "buffers", "exact", "arena", "worst case");
  for (const auto& [ranks, p] : all) {
    const RankMemory& m = p.memory;
    const auto layers = static_cast<double>(o.layers);
    std::printf("%5lld", static_cast<long long>(ranks));
    for (const double bytes :
         {layers * m.weights, layers * m.gradients, layers * m.x, layers * m.kept.exact,
          m.buffers.exact, m.total.exact, m.total.arena, m.total.worst}) {
      std::printf(" %11s", bytes_text(bytes).c_str());
    }
    std::printf("\n");
  }
}

}  // namespace

void RanksOptions::add_to(Command& command) {
  command.option(
      "--ranks", ranks,
      "Plan expert parallelism over this many GPUs, with T tokens on each: 8, or several: "
      "2,4,8. The options below need --ranks");
  command.option("--ranks-per-node", ranks_per_node, "GPUs of a node, connected by NVLink");
  command.option(
      "--transport", transport,
      "What moves rows inside a node: copy (copy engines, the default), kernels or nccl");
  command.option("--link", link_gbytes,
                 "GB/s per GPU and direction inside a node (0: the measured or estimated rate)");
  command.option("--network", network_gbits, "Gbit/s per GPU and direction between nodes");
  command.option("--tflops", tflops, "TFLOP/s of the products (0: computed from the roofline)");
  command.option("--imbalance", imbalance, "Rows of the busiest rank divided by the mean");
  command.option("--hidden", hidden,
                 "Overlap of products and transfers: 0 none, 1 the shorter of them is hidden");
  command.option("--arena", arena,
                 "Rows that buffers of a fixed size (arena) hold, divided by the expected rows");
  command.option("--layers", layers, "MoE layers of the model, to compute the memory");
}

void RanksOptions::refuse_alone() const {
  const RanksOptions usual;
  const char* given = !transport.empty()                       ? "transport"
                      : link_gbytes != 0                       ? "link"
                      : network_gbits != 0                     ? "network"
                      : tflops != 0                            ? "tflops"
                      : imbalance != usual.imbalance           ? "imbalance"
                      : hidden != usual.hidden                 ? "hidden"
                      : arena != usual.arena                   ? "arena"
                      : layers != usual.layers                 ? "layers"
                      : ranks_per_node != usual.ranks_per_node ? "ranks-per-node"
                                                               : nullptr;
  if (given != nullptr) {
    checks::refuse(std::string(given) + " is given, must come with --ranks");
  }
}

ExitCode print_rank_plans(const RanksOptions& o, const RanksSubject& s, bool json) {
  const std::vector<std::int64_t> list = counts(o.ranks);
  const bool many = std::any_of(list.begin(), list.end(), [](std::int64_t w) { return w > 1; });
  Rates r = rates_of(o, s, many && o.ranks_per_node > 1);
  std::vector<std::pair<std::int64_t, RankPlan>> all;
  for (const std::int64_t ranks : list) {
    r.options.ranks = ranks;
    all.emplace_back(ranks, plan_ranks(s.problem, s.machine, r.options));
  }
  if (json) {
    Json whole = document(o, s, r);
    for (const auto& [ranks, p] : all) whole["ranks"].push_back(to_json(ranks, p));
    print_json(whole);
    return kGood;
  }
  print_assumptions(o, s, r);
  print_times(o, all);
  print_memory(o, s, all);
  print_meanings();
  return kGood;
}

}  // namespace sonicmoe::cli
