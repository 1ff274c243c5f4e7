// The ranks of one layer in one process, each with its tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/pretended_ranks.h"
#include "cuda/rank_layer.h"

namespace sonicmoe::testing {

inline GroupOptions options_of(const RankShape& s, std::int32_t ranks,
                               ExchangeTransport transport) {
  GroupOptions o;
  o.shape = {ranks, s.tokens, s.tokens * s.top_k, s.hidden, DType::kBF16};
  o.transport = transport;
  return o;
}

/// All ranks of a layer. Parts are enqueued for the ranks in `order`.
struct Group {
  Group(const RankShape& s, const GroupOptions& o, std::int64_t rows = 0)
      : ranks(o), shape(s), order(o.shape.ranks) {
    for (std::int32_t r = 0; r < ranks.size(); ++r) {
      order[r] = r;
      layers.push_back(std::make_unique<RankLayer>(
          ranks.handle(r), s, rows != 0 ? rows : o.shape.ranks * s.tokens * s.top_k));
    }
  }
  void route(unsigned seed, int experts) {
    for (auto& layer : layers) layer->route(seed, experts);
  }
  void forward() {
    for (const ExchangePart part : testing::kParts) {
      for (const std::int32_t r : order) layers[r]->forward(part);
    }
  }
  void backward() {
    for (const ExchangePart part : testing::kParts) {
      for (const std::int32_t r : order) layers[r]->backward(part);
    }
  }
  void step() {
    forward();
    backward();
  }
  void keep(std::size_t index) {
    for (auto& layer : layers) layer->keep(index);
  }
  Bits kept(std::size_t index) const {
    Bits all;
    for (auto& layer : layers) layer->append_kept(index, all);
    return all;
  }
  void poison() {
    for (auto& layer : layers) layer->poison();
  }
  Bits bits() {
    ranks.wait();
    Bits all;
    for (auto& layer : layers) layer->append(all);
    return all;
  }
  Bits run() {
    poison();
    step();
    return bits();
  }
  /// The sentence of a rank's fault; empty if it has none.
  std::string fault(std::int32_t r) {
    ranks.wait_quietly();
    try {
      exchange_check(ranks.exchange(r), ranks.exec(r));
    } catch (const Error& e) {
      return e.what();
    }
    return {};
  }

  PretendedRanks ranks;
  RankShape shape;
  std::vector<std::int32_t> order;
  std::vector<std::unique_ptr<RankLayer>> layers;
};

}  // namespace sonicmoe::testing
