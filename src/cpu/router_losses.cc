// The load-balancing loss and the z loss of a router, and their gradients.
#include <cmath>
#include <vector>

#include "cpu/backend.h"
#include "cpu/route_row.h"
#include "cpu/routing_access.h"
#include "cpu/routing_parallel.h"

namespace sonicmoe::cpu {
namespace {

// 0 for a row whose logits are all -inf: it adds nothing to the z loss.
template <class Real>
double logsumexp(const ExpSum<Real>& parts) {
  return parts.sum > 0 ? parts.top + std::log(static_cast<double>(parts.sum)) : 0.0;
}

/// The sums over the tokens of one block. They are added in the order of the blocks, so the result
/// does not depend on the threads.
struct BlockSums {
  double* probability;  ///< (E)
  double* z;
};

template <class Real>
void sum_block(RouteRow<Real>& row, const Tensor& logits, Range tokens, const BlockSums& sums) {
  const std::int64_t experts = logits.shape[1];
  for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
    row.load(logits, t);
    const ExpSum<Real> parts = row.compute_softmax();
    const double lse = logsumexp(parts);
    row.normalize_scores(parts.top);
    for (std::int64_t e = 0; e < experts; ++e) sums.probability[e] += row.probabilities()[e];
    *sums.z += lse * lse;
  }
}

template <class Real>
void losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
            const RouterLosses& out, const Exec& exec) {
  const std::int64_t tokens = logits.shape[0];
  const std::int64_t experts = logits.shape[1];
  std::vector<std::int64_t> count(experts, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < options.top_k; ++k) {
      const std::int64_t e = index_at(ids, t, k);
      if (e >= 0 && e < experts) ++count[e];
    }
  }
  const std::int64_t blocks = blocks_of(tokens, kTokenBlock);
  std::vector<double> probability(blocks * experts, 0.0);
  std::vector<double> z_sums(blocks, 0.0);
  TokenTeam team(exec, logits);
  PerWorker<RouteRow<Real>> rows(team, options, experts);
  for_ranges(&team, tokens, kTokenBlock, [&](Range range, std::int32_t worker) {
    const std::int64_t block = range.begin / kTokenBlock;
    sum_block(rows[worker], logits, range,
              {probability.data() + block * experts, z_sums.data() + block});
  });
  double balance = 0.0;
  double z = 0.0;
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t e = 0; e < experts; ++e) {
      balance += static_cast<double>(count[e]) * probability[block * experts + e];
    }
    z += z_sums[block];
  }
  const auto t = static_cast<double>(tokens);
  const auto pairs = t * static_cast<double>(options.top_k);
  const bool any = tokens > 0;
  element<Real>(out.values, 0) =
      static_cast<Real>(any ? static_cast<double>(experts) * balance / pairs / t : 0.0);
  element<Real>(out.values, 1) = static_cast<Real>(any ? z / t : 0.0);
  for (std::int64_t e = 0; e < experts; ++e) {
    element<std::int64_t>(out.tokens_per_expert, e) = count[e];
  }
}

template <class Real>
void losses_backward(const RouteOptions& options, const Tensor& logits, const Tensor& counts,
                     const Tensor& dvalues, const Tensor& dlogits, const Exec& exec) {
  const std::int64_t experts = logits.shape[1];
  const auto tokens = static_cast<double>(logits.shape[0]);
  const double dbalance = element<Real>(dvalues, 0);
  const double dz = element<Real>(dvalues, 1);
  std::vector<double> dp(experts);
  for (std::int64_t e = 0; e < experts; ++e) {
    dp[e] = dbalance * static_cast<double>(experts) *
            static_cast<double>(element<std::int64_t>(counts, e)) /
            (tokens * static_cast<double>(options.top_k)) / tokens;
  }
  TokenTeam team(exec, logits);
  PerWorker<RouteRow<Real>> rows(team, options, experts);
  PerWorker<std::vector<double>> gradients(team, experts);
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range range, std::int32_t worker) {
    RouteRow<Real>& row = rows[worker];
    std::vector<double>& gradient = gradients[worker];
    for (std::int64_t t = range.begin; t < range.end; ++t) {
      row.load(logits, t);
      const ExpSum<Real> parts = row.compute_softmax();
      const double through_lse = dz * 2.0 * logsumexp(parts) / tokens;
      for (std::int64_t e = 0; e < experts; ++e) {
        gradient[e] = through_lse * row.probabilities()[e];
      }
      row.normalize_scores(parts.top);
      row.add_loss_gradient(dp.data(), gradient.data());
      store_row(dlogits, t, gradient.data(), experts);
    }
  });
}

}  // namespace

void router_losses(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                   const RouterLosses& out, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    losses<double>(options, logits, ids, out, exec);
  } else {
    losses<float>(options, logits, ids, out, exec);
  }
}

void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                            const Tensor& tokens_per_expert, const Tensor& dvalues,
                            const Tensor& dlogits, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    losses_backward<double>(options, logits, tokens_per_expert, dvalues, dlogits, exec);
  } else {
    losses_backward<float>(options, logits, tokens_per_expert, dvalues, dlogits, exec);
  }
}

}  // namespace sonicmoe::cpu
