// sonicmoe route: how tokens spread over experts, and the cost of padding, for top-K and for every
// rounding mode, on random logits.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "command.h"
#include "core/check_tensor.h"
#include "core/plan.h"
#include "inputs.h"
#include "sonicmoe/routing.h"
#include "target.h"

namespace sonicmoe::cli {
namespace {

constexpr std::int32_t kModes = 6;

struct Options {
  ShapeOptions shape;
  std::string score = "softmax_after_topk";
  std::int64_t tile = 128;
  double skew = 0.0;
  std::uint64_t seed = 0;
  std::int32_t threads = 0;
  bool json = false;
};

using Counts = std::vector<std::int64_t>;

struct Spread {
  std::string method;
  std::int64_t rows = 0, smallest = 0, largest = 0, padded = 0, empty = 0;
  std::int64_t moved = 0;  ///< pairs added or dropped against top-K, summed over experts
  double padding() const {
    return rows == 0 ? 0.0 : static_cast<double>(padded - rows) / static_cast<double>(rows);
  }
};

Spread spread_of(const std::string& method, const Counts& counts, const Counts& chosen,
                 std::int64_t tile) {
  Spread s;
  s.method = method;
  s.smallest = *std::min_element(counts.begin(), counts.end());
  s.largest = *std::max_element(counts.begin(), counts.end());
  for (std::size_t e = 0; e < counts.size(); ++e) {
    s.rows += counts[e];
    s.padded += (counts[e] + tile - 1) / tile * tile;
    s.empty += counts[e] == 0 ? 1 : 0;
    s.moved += std::abs(counts[e] - chosen[e]);
  }
  return s;
}

Counts top_k_counts(const LayerShape& shape, const RouteOptions& route_options,
                    const Tensor& logits, const Target& target) {
  const OwnedTensor ids(target.memory, DType::kI32, {shape.tokens, shape.top_k});
  const OwnedTensor weights(target.memory, DType::kF32, {shape.tokens, shape.top_k});
  route(route_options, logits, ids.view(), weights.view(), target.exec);
  Counts counts(static_cast<std::size_t>(shape.experts));
  for (const std::int32_t e : ids.read<std::int32_t>()) {
    if (e >= 0) ++counts[static_cast<std::size_t>(e)];
  }
  return counts;
}

Counts rounded_counts(const LayerShape& shape, const RoundOptions& options, const Tensor& logits,
                      const Target& target) {
  const verify::Memory& memory = target.memory;
  const std::int64_t rows = round_capacity(options, shape.tokens, shape.experts);
  const OwnedTensor token(memory, DType::kI32, {rows}), expert(memory, DType::kI32, {rows});
  const OwnedTensor weight(memory, DType::kF32, {rows}),
      offsets(memory, DType::kI64, {shape.experts + 1});
  const Block scratch(memory,
                      round_scratch_bytes(options, shape.tokens, shape.experts, target.exec));
  token_round(options, logits, {token.view(), expert.view(), weight.view(), offsets.view()},
              scratch.buffer(), target.exec);
  Counts counts;
  const std::vector<std::int64_t> begin = offsets.read<std::int64_t>();
  for (std::int64_t e = 0; e < shape.experts; ++e) counts.push_back(begin[e + 1] - begin[e]);
  return counts;
}

std::vector<Spread> spreads(const Options& o, const LayerShape& shape) {
  const Target target = target_from_options({.backend = "cpu", .threads = o.threads});
  RoundOptions options;
  options.route.top_k = shape.top_k;
  options.route.score = score_mode_from_name(o.score.c_str());
  options.tile = o.tile;
  options.seed = o.seed;
  checks::below_2_31("tile", o.tile);
  round_capacity(options, shape.tokens, shape.experts);  // refuses before the work begins
  checks::finite("skew", o.skew);
  // Of the logits: the values drawn, in fp64, and the tensor.
  const double logits_bytes = 10.0 * static_cast<double>(shape.tokens * shape.experts);
  refuse_above_memory(logits_bytes + 8.0 * static_cast<double>(shape.tokens * shape.top_k), target);

  ProgressLine progress(!o.json);
  progress.show("generating logits");
  const OwnedTensor logits = random_logits(target.memory, shape, DType::kBF16, o.skew, o.seed);
  progress.show("top-k");
  const Counts chosen = top_k_counts(shape, options.route, logits.view(), target);
  std::vector<Spread> result = {spread_of("topk", chosen, chosen, o.tile)};
  for (std::int32_t mode = 0; mode < kModes; ++mode) {
    options.mode = static_cast<RoundingMode>(mode);
    const char* name = rounding_mode_name(options.mode);
    progress.show(std::string("rounding: ") + name, (1.0 + mode) / (1 + kModes));
    const Counts rounded = rounded_counts(shape, options, logits.view(), target);
    result.push_back(spread_of(name, rounded, chosen, o.tile));
  }
  return result;
}

double mean_rows(const Spread& s, const LayerShape& shape) {
  return static_cast<double>(s.rows) / static_cast<double>(shape.experts);
}

Json document(const Options& o, const LayerShape& shape, const std::vector<Spread>& all) {
  Json methods = Json::array();
  for (const Spread& s : all) {
    methods.push_back({{"method", s.method},
                       {"rows", s.rows},
                       {"tokens_per_expert",
                        {{"min", s.smallest}, {"mean", mean_rows(s, shape)}, {"max", s.largest}}},
                       {"empty_experts", s.empty},
                       {"padded_rows", s.padded},
                       {"padding", s.padding()},
                       {"moved_pairs", s.moved}});
  }
  return {{"shape", to_json(shape)}, {"score", o.score}, {"tile", o.tile},
          {"skew", o.skew},          {"seed", o.seed},   {"methods", methods}};
}

void print_text(const Options& o, const LayerShape& shape, const std::vector<Spread>& all) {
  std::printf("%s, %s, tiles of %lld rows, skew %g, seed %llu\n\n", to_text(shape).c_str(),
              o.score.c_str(), static_cast<long long>(o.tile), o.skew,
              static_cast<unsigned long long>(o.seed));
  std::printf("%-12s %10s %8s %10s %8s %8s %10s %10s\n", "method", "rows", "min", "mean", "max",
              "empty", "padding", "moved");
  for (const Spread& s : all) {
    std::printf("%-12s %10lld %8lld %10.1f %8lld %8lld %9.2f%% %10lld\n", s.method.c_str(),
                static_cast<long long>(s.rows), static_cast<long long>(s.smallest),
                mean_rows(s, shape), static_cast<long long>(s.largest),
                static_cast<long long>(s.empty), 100 * s.padding(),
                static_cast<long long>(s.moved));
  }
  std::printf(
      "\nrows: (token, expert) pairs. min, mean, max: rows of an expert.\n"
      "empty: experts without rows. padding: rows added to fill tiles, as a share of the rows.\n"
      "moved: pairs that rounding adds or drops.\n");
}

}  // namespace

Command add_route(CLI::App& app) {
  Command command(app, "route",
                  "Compare top-k with each rounding mode: rows by expert, and padding");
  auto o = std::make_shared<Options>();
  o->shape.add_to(command);
  command.option("--score", o->score,
                 "Scores: softmax_after_topk, softmax_before_topk, sigmoid or\nsqrt_softplus");
  command.option("--tile", o->tile, "Rows of a tile");
  command.option(
      "--skew", o->skew,
      "Standard deviation of a random shift of each expert's logits: 0 makes experts equally "
      "popular");
  command.option("--seed", o->seed, "Seed of the logits and of stochastic rounding");
  command.option("--threads", o->threads, "CPU threads (0: one per core)");
  command.flag("--json", o->json, "Print one JSON document to stdout");
  command.run = [o] {
    if (o->shape.list) return print_configs(o->json);
    const LayerShape shape = o->shape.resolve();
    const std::vector<Spread> all = spreads(*o, shape);
    o->json ? print_json(document(*o, shape, all)) : print_text(*o, shape, all);
    return kGood;
  };
  return command;
}

}  // namespace sonicmoe::cli
