// Top-k routing and its gradient.
#include <vector>

#include "cpu/backend.h"
#include "cpu/route_row.h"
#include "cpu/routing_access.h"
#include "cpu/routing_parallel.h"

namespace sonicmoe::cpu {
namespace {

template <class Real>
void route_tokens(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                  const Tensor& weights, Range tokens) {
  RouteRow<Real> row(options, logits.shape[1]);
  std::vector<std::int32_t> chosen(options.top_k);
  std::vector<Real> weight(options.top_k);
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
}

template <class Real>
void route_tokens_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                           const Tensor& dweights, const Tensor& dlogits, Range tokens) {
  const std::int64_t experts = logits.shape[1];
  RouteRow<Real> row(options, experts);
  std::vector<std::int32_t> chosen(options.top_k);
  std::vector<double> dweight(options.top_k);
  std::vector<double> gradient(experts);
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
}

}  // namespace

void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
           const Tensor& weights, const Exec& exec) {
  Team team(routing_threads(exec, logits));
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range tokens) {
    if (logits.dtype == DType::kF64) {
      route_tokens<double>(options, logits, ids, weights, tokens);
    } else {
      route_tokens<float>(options, logits, ids, weights, tokens);
    }
  });
}

void route_backward(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                    const Tensor& dweights, const Tensor& dlogits, const Exec& exec) {
  Team team(routing_threads(exec, logits));
  for_ranges(&team, logits.shape[0], kTokenBlock, [&](Range tokens) {
    if (logits.dtype == DType::kF64) {
      route_tokens_backward<double>(options, logits, ids, dweights, dlogits, tokens);
    } else {
      route_tokens_backward<float>(options, logits, ids, dweights, dlogits, tokens);
    }
  });
}

}  // namespace sonicmoe::cpu
