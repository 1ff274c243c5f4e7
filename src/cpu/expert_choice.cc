// Expert choice: every expert takes the `capacity` tokens that give it the highest probability
// (softmax over E).
#include <vector>

#include "cpu/backend.h"
#include "cpu/pair_lists.h"
#include "cpu/round_select.h"
#include "cpu/route_row.h"
#include "cpu/routing_access.h"
#include "cpu/routing_parallel.h"

namespace sonicmoe::cpu {
namespace {

// Rows compute the softmax over E only; top_k is not used.
RouteOptions softmax_only() {
  RouteOptions options;
  options.top_k = 1;
  options.score = ScoreMode::kSoftmaxBeforeTopK;
  return options;
}

template <class Real>
void choose(const Tensor& logits, std::int64_t capacity, const Pairs& pairs, const Exec& exec) {
  using Key = KeyOf<Real>;
  const std::int64_t tokens = logits.shape[0];
  const std::int64_t experts = logits.shape[1];
  const std::int64_t count = std::min(capacity, tokens);
  std::vector<Key> keys(experts * tokens);
  TokenExpertTeam team(exec, logits);
  PerWorker<RouteRow<Real>> rows(team, softmax_only(), experts);
  PerWorker<ColumnRanking<Key>> rankings(team, tokens);
  for_ranges(&team, tokens, kTokenBlock, [&](Range range, std::int32_t worker) {
    RouteRow<Real>& row = rows[worker];
    for (std::int64_t t = range.begin; t < range.end; ++t) {
      row.load(logits, t);
      row.compute_softmax();
      for (std::int64_t e = 0; e < experts; ++e) {
        keys[e * tokens + t] = probability_bits(row.probabilities()[e]);
      }
    }
  });
  for_ranges(&team, experts, kExpertBlock, [&](Range range, std::int32_t worker) {
    ColumnRanking<Key>& ranking = rankings[worker];
    for (std::int64_t e = range.begin; e < range.end; ++e) {
      const Key* column = keys.data() + e * tokens;
      ranking.read(column);
      std::int64_t at = e * count;
      for (const std::int32_t t : ranking.kept(ranking.last_kept(count, 0))) {
        element<std::int32_t>(pairs.token, at) = t;
        element<std::int32_t>(pairs.expert, at) = static_cast<std::int32_t>(e);
        element<Real>(pairs.weight, at) = bits_probability(column[t]);
        ++at;
      }
    }
  });
  for (std::int64_t e = 0; e <= experts; ++e) element<std::int64_t>(pairs.offsets, e) = e * count;
  close_pairs<Real>(pairs, experts * count, experts);
}

/// A worker's memory: a row and the gradients of its E probabilities and E logits.
template <class Real>
struct ChoiceBackwardMemory {
  explicit ChoiceBackwardMemory(std::int64_t experts)
      : row(softmax_only(), experts), dp(experts), gradient(experts) {}
  RouteRow<Real> row;
  std::vector<double> dp;
  std::vector<double> gradient;
};

template <class Real>
void choose_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                     const Tensor& dlogits, const Exec& exec) {
  const std::int64_t experts = logits.shape[1];
  const PairsByToken by_token(pairs, logits.shape[0], experts);
  TokenTeam team(exec, logits);
  PerWorker<ChoiceBackwardMemory<Real>> memory(team, experts);
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range range, std::int32_t worker) {
    auto& [row, dp, gradient] = memory[worker];
    for (std::int64_t t = range.begin; t < range.end; ++t) {
      row.load(logits, t);
      row.compute_softmax();
      std::fill(dp.begin(), dp.end(), 0.0);
      std::fill(gradient.begin(), gradient.end(), 0.0);
      for (const std::int64_t* i = by_token.begin(t); i != by_token.end(t); ++i) {
        dp[element<std::int32_t>(pairs.expert, *i)] += element<Real>(dweight, *i);
      }
      row.add_softmax_gradient(dp.data(), gradient.data());
      store_row(dlogits, t, gradient.data(), experts);
    }
  });
}

}  // namespace

void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                   const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    choose<double>(logits, capacity, pairs, exec);
  } else {
    choose<float>(logits, capacity, pairs, exec);
  }
}

void expert_choice_backward(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                            const Tensor& dlogits, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    choose_backward<double>(logits, pairs, dweight, dlogits, exec);
  } else {
    choose_backward<float>(logits, pairs, dweight, dlogits, exec);
  }
}

}  // namespace sonicmoe::cpu
