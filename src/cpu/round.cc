// Token rounding: rounds the number of rows of each expert to a multiple of the tile.
#include <vector>

#include "core/round_rule.h"
#include "cpu/backend.h"
#include "cpu/pair_lists.h"
#include "cpu/round_select.h"
#include "cpu/route_row.h"
#include "cpu/routing_access.h"
#include "cpu/routing_parallel.h"

namespace sonicmoe::cpu {
namespace {

// Tokens whose keys are transposed together: a cache line of fp32 keys.
constexpr std::int64_t kTransposeBlock = 16;
constexpr std::int64_t kAlignment = 256;

constexpr std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// The caller's scratch: the rank keys of each expert, and the top-K of each token before rounding.
template <class Real>
struct RoundScratch {
  KeyOf<Real>* keys;   // (E, T)
  Real* weights;       // (T, K)
  std::int32_t* ids;   // (T, K)
  std::int64_t bytes;  // of all three

  RoundScratch(void* base, std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
    auto* at = static_cast<char*>(base);
    const auto key_bytes = aligned(experts * tokens * std::int64_t{sizeof(KeyOf<Real>)});
    const auto weight_bytes = aligned(tokens * top_k * std::int64_t{sizeof(Real)});
    bytes = key_bytes + weight_bytes + aligned(tokens * top_k * std::int64_t{sizeof(std::int32_t)});
    keys = reinterpret_cast<KeyOf<Real>*>(at);
    weights = base == nullptr ? nullptr : reinterpret_cast<Real*>(at + key_bytes);
    ids =
        base == nullptr ? nullptr : reinterpret_cast<std::int32_t*>(at + key_bytes + weight_bytes);
  }
};

/// A worker's memory: a row, the keys of kTransposeBlock rows, and the ranking of an expert's
/// tokens.
template <class Real>
struct RoundMemory {
  RoundMemory(const RouteOptions& options, const Tensor& logits)
      : row(options, logits.shape[1]),
        keys(kTransposeBlock * logits.shape[1]),
        ranking(logits.shape[0]) {}
  RouteRow<Real> row;
  std::vector<KeyOf<Real>> keys;
  ColumnRanking<KeyOf<Real>> ranking;
};

template <class Real>
class TokenRounding {
 public:
  using Key = KeyOf<Real>;

  TokenRounding(const RoundOptions& options, const Tensor& logits, Buffer scratch, const Exec& exec)
      : options_(options),
        logits_(logits),
        team_(exec, logits),
        scratch_(scratch.data, tokens_, experts_, options.route.top_k),
        kept_(experts_),
        bounds_(experts_) {}

  void run(const Pairs& pairs) {
    for_ranges(&team_, tokens_, kTokenBlock,
               [&](Range tokens, std::int32_t worker) { rank_tokens(tokens, worker); });
    for_ranges(&team_, experts_, kExpertBlock,
               [&](Range experts, std::int32_t worker) { count_experts(experts, worker); });
    if (options_.mode == RoundingMode::kBalanced) balance();
    auto* offsets = &element<std::int64_t>(pairs.offsets, 0);
    const std::int64_t step = pairs.offsets.stride[0];
    offsets[0] = 0;
    for (std::int64_t e = 0; e < experts_; ++e) {
      offsets[(e + 1) * step] = offsets[e * step] + kept_[e];
    }
    for_ranges(&team_, experts_, kExpertBlock, [&](Range experts, std::int32_t worker) {
      for (std::int64_t e = experts.begin; e < experts.end; ++e) {
        write_expert(pairs, e, offsets[e * step], memory_[worker].ranking);
      }
    });
    close_pairs<Real>(pairs, offsets[experts_ * step], experts_);
  }

 private:
  const Key* column(std::int64_t e) const { return scratch_.keys + e * tokens_; }

  // Computes the top-K of each token, and the rank keys of all its experts, transposed to (E, T).
  void rank_tokens(Range tokens, std::int32_t worker) {
    RouteRow<Real>& row = memory_[worker].row;
    const std::int64_t top_k = options_.route.top_k;
    std::vector<Key>& keys = memory_[worker].keys;
    for (std::int64_t t0 = tokens.begin; t0 < tokens.end; t0 += kTransposeBlock) {
      const std::int64_t count = std::min(kTransposeBlock, tokens.end - t0);
      for (std::int64_t i = 0; i < count; ++i) {
        std::int32_t* ids = scratch_.ids + (t0 + i) * top_k;
        row.load(logits_, t0 + i);
        row.compute_probabilities();
        row.select(ids);
        row.weigh(ids, scratch_.weights + (t0 + i) * top_k);
        Key* mine = keys.data() + i * experts_;
        for (std::int64_t e = 0; e < experts_; ++e) {
          mine[e] = probability_bits(row.probabilities()[e]);
        }
        for (std::int64_t k = 0; k < top_k; ++k) {
          if (ids[k] >= 0) mine[ids[k]] |= kChosenBit<Key>;
        }
      }
      for (std::int64_t e = 0; e < experts_; ++e) {
        Key* to = scratch_.keys + e * tokens_ + t0;
        for (std::int64_t i = 0; i < count; ++i) to[i] = keys[i * experts_ + e];
      }
    }
  }

  void count_experts(Range experts, std::int32_t worker) {
    ColumnRanking<Key>& ranking = memory_[worker].ranking;
    for (std::int64_t e = experts.begin; e < experts.end; ++e) {
      ranking.read(column(e));
      bounds_[e] = round_bounds(ranking.chosen_count(), options_.tile, tokens_);
      kept_[e] = count_of(bounds_[e], e, ranking);
    }
  }

  std::int64_t count_of(const RoundBounds& b, std::int64_t e, ColumnRanking<Key>& ranking) {
    if (b.lo == b.hi) return b.f;
    switch (options_.mode) {
      case RoundingMode::kUp:
        return b.hi;
      case RoundingMode::kDown:
        return b.lo;
      case RoundingMode::kScore:
        return score_count(b, ranking.mass_of_best_others(b.hi - b.f, options_.route.score),
                           ranking.mass_of_worst_chosen(b.lo, options_.route.score));
      case RoundingMode::kStochastic:
        return stochastic_count(b, expert_draw(options_.seed, static_cast<std::uint32_t>(e)));
      default:
        return nearest_count(b, options_.tile);
    }
  }

  void balance() {
    std::int64_t running = 0;
    for (std::int64_t e = 0; e < experts_; ++e) {
      kept_[e] = balanced_count(bounds_[e], options_.tile, running);
      running += kept_[e] - bounds_[e].f;
    }
  }

  void write_expert(const Pairs& pairs, std::int64_t e, std::int64_t at,
                    ColumnRanking<Key>& ranking) {
    const Key* keys = column(e);
    ranking.read(keys);
    for (const std::int32_t t : ranking.kept(ranking.last_kept(kept_[e], bounds_[e].f))) {
      element<std::int32_t>(pairs.token, at) = t;
      element<std::int32_t>(pairs.expert, at) = static_cast<std::int32_t>(e);
      element<Real>(pairs.weight, at) = weight_of(keys[t], t, e);
      ++at;
    }
  }

  // The weight of a pair: that of route() if top-k chose the pair, p * scale if rounding added it.
  Real weight_of(Key key, std::int64_t t, std::int64_t e) const {
    if (key < kChosenBit<Key>) {
      return bits_probability(key) * static_cast<Real>(options_.route.scale);
    }
    const std::int64_t top_k = options_.route.top_k;
    const std::int32_t* ids = scratch_.ids + t * top_k;
    std::int64_t k = 0;
    while (ids[k] != e) ++k;
    return scratch_.weights[t * top_k + k];
  }

  const RoundOptions& options_;
  const Tensor& logits_;
  TokenExpertTeam team_;
  const std::int64_t tokens_ = logits_.shape[0];
  const std::int64_t experts_ = logits_.shape[1];
  RoundScratch<Real> scratch_;
  std::vector<std::int64_t> kept_;
  std::vector<RoundBounds> bounds_;
  PerWorker<RoundMemory<Real>> memory_{team_, options_.route, logits_};
};

/// A worker's memory: a row, its K chosen experts, and gradients of weights, probabilities, logits.
template <class Real>
struct RoundBackwardMemory {
  RoundBackwardMemory(const RouteOptions& options, std::int64_t experts)
      : row(options, experts),
        ids(options.top_k),
        dchosen(options.top_k),
        dp(experts),
        gradient(experts) {}
  RouteRow<Real> row;
  std::vector<std::int32_t> ids;
  std::vector<double> dchosen;
  std::vector<double> dp;
  std::vector<double> gradient;
};

template <class Real>
void round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                    const Tensor& dweight, const Tensor& dlogits, const Exec& exec) {
  const std::int64_t experts = logits.shape[1];
  const std::int64_t top_k = options.route.top_k;
  const PairsByToken by_token(pairs, logits.shape[0], experts);
  TokenTeam team(exec, logits);
  PerWorker<RoundBackwardMemory<Real>> memory(team, options.route, experts);
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range tokens, std::int32_t worker) {
    auto& [row, ids, dchosen, dp, gradient] = memory[worker];
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      row.load(logits, t);
      row.compute_probabilities();
      row.select(ids.data());
      std::fill(dchosen.begin(), dchosen.end(), 0.0);
      std::fill(dp.begin(), dp.end(), 0.0);
      std::fill(gradient.begin(), gradient.end(), 0.0);
      for (const std::int64_t* i = by_token.begin(t); i != by_token.end(t); ++i) {
        const std::int32_t e = element<std::int32_t>(pairs.expert, *i);
        const double g = element<Real>(dweight, *i);
        const auto k = std::find(ids.begin(), ids.end(), e) - ids.begin();
        if (k < top_k) {
          dchosen[k] += g;
        } else {
          dp[e] += g * options.route.scale;
        }
      }
      row.add_weight_gradient(ids.data(), dchosen.data(), gradient.data());
      row.add_probability_gradient(dp.data(), gradient.data());
      store_row(dlogits, t, gradient.data(), experts);
    }
  });
}

}  // namespace

std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                 std::int64_t experts, const Exec&) {
  // The dtype is not known here. fp64 logits need the most.
  return RoundScratch<double>(nullptr, tokens, experts, options.route.top_k).bytes;
}

void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    TokenRounding<double>(options, logits, scratch, exec).run(pairs);
  } else {
    TokenRounding<float>(options, logits, scratch, exec).run(pairs);
  }
}

void token_round_backward(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                          const Tensor& dweight, const Tensor& dlogits, Buffer, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    round_backward<double>(options, logits, pairs, dweight, dlogits, exec);
  } else {
    round_backward<float>(options, logits, pairs, dweight, dlogits, exec);
  }
}

}  // namespace sonicmoe::cpu
