#include "cpu/route_row.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "core/score.h"
#include "cpu/routing_access.h"

namespace sonicmoe::cpu {
namespace {

constexpr double kRenormalizeEpsilon = 1e-20;

double clean(double v) {
  if (std::isnan(v)) return -std::numeric_limits<double>::infinity();
  return std::min(v, std::numeric_limits<double>::max());
}

std::uint64_t order_bits(double v) {
  const auto u = std::bit_cast<std::uint64_t>(v + 0.0);
  return u ^ ((std::uint64_t{0} - (u >> 63)) | (std::uint64_t{1} << 63));
}
std::uint32_t order_bits(float v) { return key::order_bits(v); }

void order_row(const float* v, std::int64_t n, std::uint32_t* keys) {
  route_simd().order(v, n, keys);
}
void order_row(const double* v, std::int64_t n, std::uint64_t* keys) {
  for (std::int64_t i = 0; i < n; ++i) keys[i] = order_bits(v[i]);
}

// The tree sum of core/selection_key.h, for the K chosen scores and for fp64.
template <class Real>
Real tree_sum(const Real* v, std::int64_t n) {
  if (n <= 1) return n == 1 ? v[0] : Real{0};
  const auto left = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)) / 2);
  return tree_sum(v, left) + tree_sum(v + left, n - left);
}

ExpSum<float> softmax_row(const float* x, std::int64_t n, float* p, float* tmp) {
  ExpSum<float> parts{};
  parts.sum = route_simd().softmax(x, n, p, tmp, &parts.top);
  return parts;
}
ExpSum<double> softmax_row(const double* x, std::int64_t n, double* p, double*) {
  const double top = *std::max_element(x, x + n);
  if (!(top > -std::numeric_limits<double>::infinity())) {
    std::fill(p, p + n, 0.0);
    return {top, 0.0};
  }
  for (std::int64_t i = 0; i < n; ++i) p[i] = std::exp(x[i] - top);
  const double sum = tree_sum(p, n);
  for (std::int64_t i = 0; i < n; ++i) p[i] /= sum;
  return {top, sum};
}

void sigmoid_row(const float* x, std::int64_t n, float* s) { route_simd().sigmoid(x, n, s); }
void sigmoid_row(const double* x, std::int64_t n, double* s) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double e = std::exp(-std::abs(x[i]));
    s[i] = (x[i] < 0 ? e : 1.0) / (1.0 + e);
  }
}

// ln(1 + e^-|x|) / e^-|x|.
double log1p_ratio(double x) {
  const double e = std::exp(-std::abs(x));
  return e > 0.0 ? std::log1p(e) / e : 1.0;
}

// As sqrt_softplus_slope32.
float sqrt_softplus_slope(float x) { return key::sqrt_softplus_slope32(x); }
double sqrt_softplus_slope(double x) {
  const double e = std::exp(-std::abs(x));
  const double ratio = log1p_ratio(x);
  return 0.5 / ((1.0 + e) * (x < 0.0 ? ratio : x + e * ratio));
}

void sqrt_softplus_row(const float* x, std::int64_t n, float* s) {
  route_simd().sqrt_softplus(x, n, s);
}
void sqrt_softplus_row(const double* x, std::int64_t n, double* s) {
  for (std::int64_t i = 0; i < n; ++i) {
    s[i] = std::sqrt(std::max(x[i], 0.0) + std::log1p(std::exp(-std::abs(x[i]))));
  }
}

void sqrt_softplus_parts(const float* x, float top, std::int64_t n, float* s, float* slope) {
  route_simd().sqrt_softplus_parts(x, top, n, s, slope);
}
void sqrt_softplus_parts(const double* x, double top, std::int64_t n, double* s, double* slope) {
  if (top > 0.0) sqrt_softplus_row(x, n, s);
  for (std::int64_t i = 0; i < n; ++i) {
    slope[i] = sqrt_softplus_slope(x[i]);
    if (!(top > 0.0)) s[i] = std::exp((x[i] - top) / 2.0) * std::sqrt(log1p_ratio(x[i]));
  }
}

float biased(float logit, float score, float bias) { return key::biased(logit, score, bias); }
double biased(double logit, double score, float bias) {
  return std::isinf(logit) ? logit : clean(score + bias);
}

float group_value(float best, float second) { return key::group_value(best, second); }
double group_value(double best, double second) {
  constexpr double kLowest = std::numeric_limits<double>::lowest();
  return std::max(best, kLowest) + std::max(second, kLowest);
}

}  // namespace

KeyOf<float> probability_bits(float p) { return std::bit_cast<std::uint32_t>(p); }
KeyOf<double> probability_bits(double p) { return std::bit_cast<std::uint64_t>(p); }
float bits_probability(KeyOf<float> bits) { return std::bit_cast<float>(bits); }
double bits_probability(KeyOf<double> bits) { return std::bit_cast<double>(bits); }
std::uint64_t probability_mass(ScoreMode score, float p) { return key::score_mass(score, p); }
std::uint64_t probability_mass(ScoreMode score, double p) {
  if (score != ScoreMode::kSqrtSoftplus) return static_cast<std::uint64_t>(p * 0x1p40);
  return static_cast<std::uint64_t>(std::min<double>(p, key::kLargestMass) * 0x1p24);
}

template <class Real>
RouteRow<Real>::RouteRow(const RouteOptions& options, std::int64_t experts)
    : options_(options),
      experts_(experts),
      x_(experts),
      p_(experts),
      v_(experts),
      tmp_(2 * experts),
      keys_(experts + kTopBlock),
      block_max_(experts / kTopBlock + 1),
      chosen_x_(options.top_k),
      score_(options.top_k),
      dscore_(options.top_k),
      group_order_(options.n_group) {}

template <class Real>
void RouteRow<Real>::load(const Tensor& logits, std::int64_t t) {
  if constexpr (std::is_same_v<Real, double>) {
    for (std::int64_t e = 0; e < experts_; ++e) x_[e] = clean(element<double>(logits, t, e));
  } else {
    const std::int64_t bytes = dtype_bytes(logits.dtype);
    const auto* row = static_cast<const char*>(logits.data) + t * logits.stride[0] * bytes;
    if (logits.stride[1] == 1 || experts_ == 1) {
      route_simd().load(row, logits.dtype, experts_, x_.data());
      return;
    }
    for (std::int64_t e = 0; e < experts_; ++e) {
      route_simd().load(row + e * logits.stride[1] * bytes, logits.dtype, 1, &x_[e]);
    }
  }
}

template <class Real>
ExpSum<Real> RouteRow<Real>::compute_softmax() {
  return softmax_row(x_.data(), experts_, p_.data(), tmp_.data());
}

template <class Real>
bool RouteRow<Real>::pointwise() const {
  return key::pointwise(options_.score);
}

template <class Real>
void RouteRow<Real>::compute_probabilities() {
  if (options_.score == ScoreMode::kSigmoid) {
    sigmoid_row(x_.data(), experts_, p_.data());
  } else if (options_.score == ScoreMode::kSqrtSoftplus) {
    sqrt_softplus_row(x_.data(), experts_, p_.data());
  } else {
    compute_softmax();
  }
}

template <class Real>
void RouteRow<Real>::normalize_scores(Real top) {
  if (!pointwise()) return;
  Real* slope = v_.data();
  if (options_.score == ScoreMode::kSqrtSoftplus) {
    const Real finite = std::max(top, std::numeric_limits<Real>::lowest());
    sqrt_softplus_parts(x_.data(), finite, experts_, p_.data(), slope);
  } else {
    // The sigmoid is e^x sigmoid(-x). Where all logits are negative, e^x is the softmax times a
    // factor that the division cancels: so small scores do not underflow.
    for (std::int64_t e = 0; e < experts_; ++e) tmp_[e] = -x_[e];
    sigmoid_row(tmp_.data(), experts_, slope);
    if (top > 0) {
      sigmoid_row(x_.data(), experts_, p_.data());
    } else {
      for (std::int64_t e = 0; e < experts_; ++e) p_[e] *= slope[e];
    }
  }
  double sum = 0.0;
  for (std::int64_t e = 0; e < experts_; ++e) sum += p_[e];
  const double factor = sum > 0.0 ? 1.0 / sum : 0.0;
  for (std::int64_t e = 0; e < experts_; ++e) p_[e] = static_cast<Real>(p_[e] * factor);
}

template <class Real>
void RouteRow<Real>::selection_values() {
  if (!pointwise()) {
    order_row(x_.data(), experts_, keys_.data());
    return;
  }
  for (std::int64_t e = 0; e < experts_; ++e) {
    const float bias = options_.bias.data != nullptr ? element<float>(options_.bias, e) : 0.0f;
    v_[e] = biased(x_[e], p_[e], bias);
  }
  order_row(v_.data(), experts_, keys_.data());
}

template <class Real>
void RouteRow<Real>::keep_best_groups() {
  const std::int64_t groups = options_.n_group;
  const std::int64_t size = experts_ / groups;
  const Real* values = pointwise() ? v_.data() : x_.data();
  constexpr Real kNone = -std::numeric_limits<Real>::infinity();
  auto& order = group_order_;
  for (std::int64_t g = 0; g < groups; ++g) {
    Real best = kNone;
    Real second = kNone;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (values[e] > best) {
        second = std::exchange(best, values[e]);
      } else if (values[e] > second) {
        second = values[e];
      }
    }
    order[g] = {order_bits(size == 1 ? best : group_value(best, second)), g};
  }
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  for (std::int64_t i = options_.topk_group; i < groups; ++i) {
    const auto first = keys_.begin() + order[i].second * size;
    std::fill(first, first + size, order_bits(kNone));
  }
}

template <class Real>
void RouteRow<Real>::select(std::int32_t* ids) {
  selection_values();
  if (options_.n_group > 0) keep_best_groups();
  const std::int64_t k = options_.top_k;
  const auto none = order_bits(-std::numeric_limits<Real>::infinity());
  if constexpr (std::is_same_v<Real, float>) {
    route_simd().top32(keys_.data(), experts_, k, none, block_max_.data(), ids);
  } else {
    route_simd().top64(keys_.data(), experts_, k, none, block_max_.data(), ids);
  }
}

template <class Real>
void RouteRow<Real>::compute_scores(const std::int32_t* ids) {
  const std::int64_t k = options_.top_k;
  if (needs_probabilities()) {
    for (std::int64_t j = 0; j < k; ++j) score_[j] = ids[j] < 0 ? Real{0} : p_[ids[j]];
    return;
  }
  for (std::int64_t j = 0; j < k; ++j) {
    chosen_x_[j] = ids[j] < 0 ? -std::numeric_limits<Real>::infinity() : x_[ids[j]];
  }
  softmax_row(chosen_x_.data(), k, score_.data(), tmp_.data());
}

template <class Real>
void RouteRow<Real>::weigh(const std::int32_t* ids, Real* weights) {
  const std::int64_t k = options_.top_k;
  compute_scores(ids);
  const Real scale = static_cast<Real>(options_.scale);
  const Real sum = options_.renormalize != 0
                       ? tree_sum(score_.data(), k) + static_cast<Real>(kRenormalizeEpsilon)
                       : Real{1};
  for (std::int64_t j = 0; j < k; ++j) {
    const Real score = options_.renormalize != 0 ? score_[j] / sum : score_[j];
    weights[j] = ids[j] < 0 ? Real{0} : score * scale;
  }
}

template <class Real>
void RouteRow<Real>::add_weight_gradient(const std::int32_t* ids, const double* dweights,
                                         double* dlogits) {
  const std::int64_t k = options_.top_k;
  compute_scores(ids);
  double sum = 1.0;
  double through_sum = 0.0;
  if (options_.renormalize != 0) {
    sum = kRenormalizeEpsilon;
    for (std::int64_t j = 0; j < k; ++j) sum += score_[j];
    for (std::int64_t j = 0; j < k; ++j) {
      if (ids[j] >= 0) through_sum += dweights[j] * options_.scale * score_[j] / sum;
    }
  }
  double mean = 0.0;  // sum of dscore * score
  for (std::int64_t j = 0; j < k; ++j) {
    dscore_[j] = ids[j] < 0 ? 0.0 : (dweights[j] * options_.scale - through_sum) / sum;
    mean += dscore_[j] * score_[j];
  }
  if (options_.score == ScoreMode::kSoftmaxBeforeTopK) {
    for (std::int64_t e = 0; e < experts_; ++e) dlogits[e] -= mean * p_[e];
    mean = 0.0;
  } else if (options_.score == ScoreMode::kSigmoid) {
    for (std::int64_t j = 0; j < k; ++j) dscore_[j] *= 1.0 - score_[j];
    mean = 0.0;
  } else if (options_.score == ScoreMode::kSqrtSoftplus) {
    for (std::int64_t j = 0; j < k; ++j) {
      if (ids[j] >= 0) dscore_[j] *= sqrt_softplus_slope(x_[ids[j]]);
    }
    mean = 0.0;
  }
  for (std::int64_t j = 0; j < k; ++j) {
    if (ids[j] >= 0) dlogits[ids[j]] += score_[j] * (dscore_[j] - mean);
  }
}

template <class Real>
void RouteRow<Real>::add_softmax_gradient(const double* dp, double* dlogits) const {
  double mean = 0.0;
  for (std::int64_t e = 0; e < experts_; ++e) mean += dp[e] * p_[e];
  for (std::int64_t e = 0; e < experts_; ++e) dlogits[e] += p_[e] * (dp[e] - mean);
}

template <class Real>
void RouteRow<Real>::add_probability_gradient(const double* dp, double* dlogits) const {
  if (!pointwise()) {
    add_softmax_gradient(dp, dlogits);
    return;
  }
  if (options_.score == ScoreMode::kSigmoid) {
    for (std::int64_t e = 0; e < experts_; ++e) dlogits[e] += dp[e] * p_[e] * (1.0 - p_[e]);
    return;
  }
  for (std::int64_t e = 0; e < experts_; ++e) {
    if (dp[e] == 0.0) continue;  // most experts have no added pair
    dlogits[e] += dp[e] * p_[e] * sqrt_softplus_slope(x_[e]);
  }
}

template <class Real>
void RouteRow<Real>::add_loss_gradient(const double* dp, double* dlogits) const {
  const bool slopes = pointwise();
  double mean = 0.0;
  for (std::int64_t e = 0; e < experts_; ++e) mean += dp[e] * p_[e];
  for (std::int64_t e = 0; e < experts_; ++e) {
    dlogits[e] += p_[e] * (dp[e] - mean) * (slopes ? v_[e] : Real{1});
  }
}

template class RouteRow<float>;
template class RouteRow<double>;

}  // namespace sonicmoe::cpu
