// Top-k routing and its gradient.
#include <vector>

#include "cpu/backend.h"
#include "cpu/route_row.h"
#include "cpu/routing_access.h"
#include "cpu/routing_parallel.h"

namespace sonicmoe::cpu {
namespace {

/// A worker's memory: a row and its K chosen experts with their weights.
template <class Real>
struct RouteMemory {
  RouteMemory(const RouteOptions& options, std::int64_t experts)
      : row(options, experts), chosen(options.top_k), weight(options.top_k) {}
  RouteRow<Real> row;
  std::vector<std::int32_t> chosen;
  std::vector<Real> weight;
};

template <class Real>
void route_tokens(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                  const Tensor& weights, const Exec& exec) {
  TokenTeam team(exec, logits);
  PerWorker<RouteMemory<Real>> memory(team, options, logits.shape[1]);
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range tokens, std::int32_t worker) {
    auto& [row, chosen, weight] = memory[worker];
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      row.load(logits, t);
      if (row.needs_probabilities()) row.compute_probabilities();
      row.select(chosen.data());
      row.weigh(chosen.data(), weight.data());
      for (std::int64_t k = 0; k < options.top_k; ++k) {
        set_index(ids, t, k, chosen[k]);
        element<Real>(weights, t, k) = weight[k];
      }
    }
  });
}

/// A worker's memory: a row, its K chosen experts, and the gradients of K weights and E logits.
template <class Real>
struct RouteBackwardMemory {
  RouteBackwardMemory(const RouteOptions& options, std::int64_t experts)
      : row(options, experts), chosen(options.top_k), dweight(options.top_k), gradient(experts) {}
  RouteRow<Real> row;
  std::vector<std::int32_t> chosen;
  std::vector<double> dweight;
  std::vector<double> gradient;
};

template <class Real>
void route_tokens_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                           const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  const std::int64_t experts = logits.shape[1];
  TokenTeam team(exec, logits);
  PerWorker<RouteBackwardMemory<Real>> memory(team, options, experts);
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range tokens, std::int32_t worker) {
    auto& [row, chosen, dweight, gradient] = memory[worker];
    for (std::int64_t t = tokens.begin; t < tokens.end; ++t) {
      row.load(logits, t);
      if (row.needs_probabilities()) row.compute_probabilities();
      for (std::int64_t k = 0; k < options.top_k; ++k) {
        const std::int64_t id = index_at(ids, t, k);
        chosen[k] = id >= 0 && id < experts ? static_cast<std::int32_t>(id) : -1;
        dweight[k] = chosen[k] < 0 ? 0.0 : element<Real>(dweights, t, k);
      }
      std::fill(gradient.begin(), gradient.end(), 0.0);
      row.add_weight_gradient(chosen.data(), dweight.data(), gradient.data());
      store_row(dlogits, t, gradient.data(), experts);
    }
  });
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    route_tokens<double>(options, logits, ids, weights, exec);
  } else {
    route_tokens<float>(options, logits, ids, weights, exec);
  }
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  if (logits.dtype == DType::kF64) {
    route_tokens_backward<double>(options, logits, ids, dweights, dlogits, exec);
  } else {
    route_tokens_backward<float>(options, logits, ids, dweights, dlogits, exec);
  }
}

}  // namespace sonicmoe::cpu
