#include "verify/oracle_router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "verify/convert.h"
#include "verify/oracle_activation.h"
#include "verify/routing_reference.h"

namespace sonicmoe::oracle {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr double kRenormalizeEpsilon = 1e-20;

// Logits for selection: NaN becomes -inf, +inf the largest finite value.
std::vector<double> cleaned(const double* logits, std::int64_t experts) {
  std::vector<double> out(logits, logits + experts);
  for (double& v : out) {
    if (std::isnan(v)) v = kNever;
    if (v == std::numeric_limits<double>::infinity()) v = std::numeric_limits<float>::max();
  }
  return out;
}

double log_sum_exp(const std::vector<double>& logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  if (top == kNever) return kNever;
  double sum = 0.0;
  for (const double v : logits) sum += std::exp(v - top);
  return top + std::log(sum);
}

// In fp32: the definition of routing fixes the exponential and the order of the sum.
std::vector<float> softmax(const std::vector<float>& logits) { return reference::softmax(logits); }

std::vector<double> softmax(const std::vector<double>& logits) {
  std::vector<double> p(logits.size(), 0.0);
  const double top = *std::max_element(logits.begin(), logits.end());
  if (top == kNever) return p;
  double sum = 0.0;
  for (std::size_t e = 0; e < p.size(); ++e) sum += p[e] = std::exp(logits[e] - top);
  for (double& v : p) v /= sum;
  return p;
}

template <class Real>
std::vector<Real> softmax_backward(const std::vector<Real>& p, const std::vector<Real>& dp) {
  const Real mean = std::inner_product(p.begin(), p.end(), dp.begin(), Real{0});
  std::vector<Real> dlogits(p.size());
  for (std::size_t e = 0; e < p.size(); ++e) dlogits[e] = p[e] * (dp[e] - mean);
  return dlogits;
}

// Indices of the k largest values, ties to the lower index; -inf is never among them.
std::vector<std::int64_t> largest(const std::vector<double>& values, std::int64_t k) {
  std::vector<std::int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return values[a] > values[b]; });
  std::erase_if(order, [&](std::int64_t e) { return values[e] == kNever; });
  order.resize(std::min(order.size(), static_cast<std::size_t>(k)));
  return order;
}

// Sets every value outside of the best groups to -inf.
void keep_best_groups(const RouteOptions& options, std::vector<double>& values) {
  const auto size = static_cast<std::int64_t>(values.size()) / options.n_group;
  std::vector<double> group_values;
  for (std::int64_t g = 0; g < options.n_group; ++g) {
    std::vector<double> group(values.begin() + g * size, values.begin() + (g + 1) * size);
    // An expert at -inf must not give its group a sum of -inf: the others may still be chosen.
    for (double& v : group) v = std::max<double>(v, std::numeric_limits<float>::lowest());
    std::sort(group.rbegin(), group.rend());
    group_values.push_back(size == 1 ? group[0] : group[0] + group[1]);
  }
  const std::vector<std::int64_t> kept = largest(group_values, options.topk_group);
  for (std::int64_t e = 0; e < static_cast<std::int64_t>(values.size()); ++e) {
    if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) values[e] = kNever;
  }
}

std::vector<float> pointwise_scores(ScoreMode score, const std::vector<float>& logits) {
  return reference::pointwise_scores(score, logits);
}

double sqrt_softplus(double x) {
  return std::sqrt(std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
}

std::vector<double> pointwise_scores(ScoreMode score, const std::vector<double>& logits) {
  std::vector<double> p(logits.size());
  std::transform(logits.begin(), logits.end(), p.begin(),
                 score == ScoreMode::kSigmoid ? sigmoid<double> : sqrt_softplus);
  return p;
}

double log_score(ScoreMode score, double x) {
  const double e = std::exp(-std::abs(x));
  if (score == ScoreMode::kSigmoid) return std::min(x, 0.0) - std::log1p(e);
  if (score != ScoreMode::kSqrtSoftplus) return x;
  // Below 0 softplus is e^x times a ratio.
  const double ratio = reference::log1p_ratio(e);
  return 0.5 * (x < 0.0 ? x + std::log(ratio) : std::log(x + e * ratio));
}

// p of the losses: the scores over their sum. It is the softmax of their logarithms, so that very
// small scores do not underflow.
std::vector<double> normalized_scores(const RouteOptions& options, std::vector<double> logits) {
  for (double& v : logits) v = log_score(options.score, v);
  return softmax(logits);
}

// Score of each expert before renormalisation, given the chosen experts.
template <class Real>
std::vector<Real> scores(const RouteOptions& options, const std::vector<Real>& logits,
                         const std::int64_t* ids) {
  if (options.score == ScoreMode::kSoftmaxBeforeTopK) return softmax(logits);
  if (reference::pointwise(options.score)) return pointwise_scores(options.score, logits);
  std::vector<Real> chosen(logits.size(), -std::numeric_limits<Real>::infinity());
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    if (ids[k] >= 0) chosen[ids[k]] = logits[ids[k]];
  }
  return softmax(chosen);
}

template <class Real>
std::vector<Real> row_in(const Matrix<double>& logits, std::int64_t t) {
  const std::vector<double> clean = cleaned(logits.row(t), logits.cols);
  return {clean.begin(), clean.end()};
}

// d(scores)/d(logits) of one token with scores p.
template <class Real>
std::vector<Real> scores_backward(const RouteOptions& options, const std::vector<Real>& logits,
                                  const std::vector<Real>& p, std::vector<Real> dp) {
  if (!reference::pointwise(options.score)) return softmax_backward(p, dp);
  for (std::size_t e = 0; e < p.size(); ++e) {
    dp[e] *= p[e] * (options.score == ScoreMode::kSigmoid
                         ? 1 - p[e]
                         : reference::pointwise_slope(options.score, logits[e]));
  }
  return dp;
}

template <class Real>
std::vector<Real> route_row_backward(const RouteOptions& options, const std::vector<Real>& logits,
                                     const std::int64_t* ids, const std::vector<Real>& dweights) {
  const std::vector<Real> p = scores(options, logits, ids);
  std::vector<Real> dp(p.size(), Real{0});
  Real sum = static_cast<Real>(kRenormalizeEpsilon);
  Real weighted = 0;
  for (std::size_t k = 0; k < dweights.size(); ++k) {
    if (ids[k] < 0) continue;
    dp[ids[k]] = static_cast<Real>(options.scale) * dweights[k];
    sum += p[ids[k]];
    weighted += dp[ids[k]] * p[ids[k]];
  }
  for (std::size_t k = 0; options.renormalize != 0 && k < dweights.size(); ++k) {
    if (ids[k] >= 0) dp[ids[k]] = (dp[ids[k]] - weighted / sum) / sum;
  }
  return scores_backward(options, logits, p, dp);
}

template <class Real>
Matrix<double> route_backward_in(const RouteOptions& options, const Matrix<double>& logits,
                                 const Matrix<std::int64_t>& ids, const Matrix<double>& dweights) {
  Matrix<double> dlogits(logits.rows, logits.cols);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    const std::vector<Real> dw(dweights.row(t), dweights.row(t) + dweights.cols);
    const auto row = route_row_backward(options, row_in<Real>(logits, t), ids.row(t), dw);
    std::copy(row.begin(), row.end(), dlogits.row(t));
  }
  return dlogits;
}

template <class Real>
Matrix<double> round_backward_in(const RouteOptions& options, const Matrix<double>& logits,
                                 const Matrix<std::int64_t>& ids, const Matrix<double>& dweights) {
  Matrix<double> dlogits(logits.rows, logits.cols);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    const std::vector<Real> x = row_in<Real>(logits, t);
    std::vector<Real> added(dweights.row(t), dweights.row(t) + dweights.cols);
    std::vector<Real> chosen(static_cast<std::size_t>(ids.cols), Real{0});
    for (std::int64_t k = 0; k < ids.cols; ++k) {
      if (ids(t, k) >= 0) std::swap(chosen[k], added[ids(t, k)]);
    }
    for (Real& v : added) v *= static_cast<Real>(options.scale);
    const auto p =
        reference::pointwise(options.score) ? pointwise_scores(options.score, x) : softmax(x);
    const auto by_added = scores_backward(options, x, p, added);
    const auto by_chosen = route_row_backward(options, x, ids.row(t), chosen);
    for (std::size_t e = 0; e < x.size(); ++e) {
      dlogits(t, static_cast<std::int64_t>(e)) = by_chosen[e] + by_added[e];
    }
  }
  return dlogits;
}

}  // namespace

Routed route(const RouteOptions& options, const Matrix<double>& logits) {
  Routed out;
  out.ids = Matrix<std::int64_t>(logits.rows, options.top_k);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    std::vector<double> values = cleaned(logits.row(t), logits.cols);
    if (reference::pointwise(options.score)) {
      const std::vector<double> scores = pointwise_scores(options.score, values);
      for (std::int64_t e = 0; e < logits.cols; ++e) {
        if (values[e] == kNever) continue;
        const Tensor& bias = options.bias;
        values[e] = scores[e];
        if (bias.data != nullptr) values[e] += load(bias.data, bias.dtype, element_offset(bias, e));
      }
    }
    if (options.n_group > 0) keep_best_groups(options, values);
    const std::vector<std::int64_t> chosen = largest(values, options.top_k);
    std::fill_n(out.ids.row(t), options.top_k, std::int64_t{-1});
    std::copy(chosen.begin(), chosen.end(), out.ids.row(t));
  }
  out.weights = route_weights(options, logits, out.ids);
  return out;
}

Matrix<double> route_weights(const RouteOptions& options, const Matrix<double>& logits,
                             const Matrix<std::int64_t>& ids) {
  Matrix<double> weights(ids.rows, ids.cols);
  for (std::int64_t t = 0; t < ids.rows; ++t) {
    const std::vector<double> p = scores(options, cleaned(logits.row(t), logits.cols), ids.row(t));
    double sum = kRenormalizeEpsilon;
    for (std::int64_t k = 0; k < ids.cols; ++k) sum += ids(t, k) < 0 ? 0.0 : p[ids(t, k)];
    const double factor = options.renormalize != 0 ? options.scale / sum : options.scale;
    for (std::int64_t k = 0; k < ids.cols; ++k) {
      weights(t, k) = ids(t, k) < 0 ? 0.0 : p[ids(t, k)] * factor;
    }
  }
  return weights;
}

Matrix<double> route_backward(const RouteOptions& options, const Matrix<double>& logits,
                              const Matrix<std::int64_t>& ids, const Matrix<double>& dweights,
                              Precision precision) {
  return precision == Precision::kExact ? route_backward_in<double>(options, logits, ids, dweights)
                                        : route_backward_in<float>(options, logits, ids, dweights);
}

Matrix<double> round_backward(const RouteOptions& options, const Matrix<double>& logits,
                              const Matrix<std::int64_t>& ids, const Matrix<double>& dweights,
                              Precision precision) {
  return precision == Precision::kExact ? round_backward_in<double>(options, logits, ids, dweights)
                                        : round_backward_in<float>(options, logits, ids, dweights);
}

Losses router_losses(const RouteOptions& options, const Matrix<double>& logits,
                     const Matrix<std::int64_t>& ids) {
  Losses out;
  out.tokens_per_expert.assign(static_cast<std::size_t>(logits.cols), 0);
  for (const std::int64_t e : ids.values) {
    if (e >= 0 && e < logits.cols) ++out.tokens_per_expert[e];
  }
  const auto tokens = static_cast<double>(logits.rows);
  const auto experts = static_cast<double>(logits.cols);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    const std::vector<double> clean = cleaned(logits.row(t), logits.cols);
    const std::vector<double> p = normalized_scores(options, clean);
    for (std::int64_t e = 0; e < logits.cols; ++e) {
      const double fraction = static_cast<double>(out.tokens_per_expert[e]) /
                              (tokens * static_cast<double>(options.top_k));
      out.load_balancing += experts * fraction * p[e] / tokens;
    }
    const double lse = log_sum_exp(clean);
    out.z += lse * lse / tokens;
  }
  return out;
}

Matrix<double> router_losses_backward(const RouteOptions& options, const Matrix<double>& logits,
                                      const std::vector<std::int64_t>& tokens_per_expert,
                                      double dload_balancing, double dz) {
  Matrix<double> dlogits(logits.rows, logits.cols);
  const auto tokens = static_cast<double>(logits.rows);
  const auto experts = static_cast<double>(logits.cols);
  for (std::int64_t t = 0; t < logits.rows; ++t) {
    const std::vector<double> clean = cleaned(logits.row(t), logits.cols);
    const std::vector<double> p = normalized_scores(options, clean);
    std::vector<double> dp(p.size());
    for (std::size_t e = 0; e < p.size(); ++e) {
      dp[e] = dload_balancing * experts * static_cast<double>(tokens_per_expert[e]) /
              (tokens * tokens * static_cast<double>(options.top_k));
    }
    const std::vector<double> by_p = softmax_backward(p, dp);
    const std::vector<double> by_lse = softmax(clean);
    const double dlse = dz * 2.0 * log_sum_exp(clean) / tokens;
    for (std::size_t e = 0; e < p.size(); ++e) {
      const double slope = reference::pointwise(options.score)
                               ? reference::pointwise_slope(options.score, clean[e])
                               : 1.0;
      dlogits(t, e) = by_p[e] * slope + dlse * by_lse[e];
    }
  }
  return dlogits;
}

}  // namespace sonicmoe::oracle
