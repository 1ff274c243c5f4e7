// A second, naive implementation of routing: full sorts, one row at a time. Of the library's code
// it uses only Philox and the fp32 exponential and logarithm, whose bits are part of the
// definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "core/philox.h"
#include "core/selection_key.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::reference {

template <class Real>
using Rows = std::vector<std::vector<Real>>;

template <class Real>
Real exponential(Real x) {
  if constexpr (std::is_same_v<Real, float>) return key::exp32(x);
  return std::exp(x);
}

template <class Real>
constexpr Real kNone = -std::numeric_limits<Real>::infinity();

template <class Real>
Real largest_of(DType dtype) {
  if (dtype == DType::kBF16) return static_cast<Real>(0x1.fep127);
  if (dtype == DType::kF16) return 65504;
  return std::numeric_limits<Real>::max();
}

/// A logit for selection: NaN becomes -inf, +inf the largest finite value of its dtype.
template <class Real>
Real cleaned(double v, DType dtype) {
  if (std::isnan(v)) return kNone<Real>;
  return std::isinf(v) && v > 0 ? largest_of<Real>(dtype) : static_cast<Real>(v);
}

// Sum by the padded binary tree of docs/routing.md.
template <class Real>
Real padded_tree(const std::vector<Real>& v, std::size_t first, std::size_t size) {
  if (size == 1) return first < v.size() ? v[first] : Real{0};
  return padded_tree(v, first, size / 2) + padded_tree(v, first + size / 2, size / 2);
}
template <class Real>
Real padded_tree(const std::vector<Real>& v) {
  std::size_t size = 1;
  while (size < v.size()) size *= 2;
  return padded_tree(v, 0, size);
}

template <class Real>
std::vector<Real> softmax(const std::vector<Real>& x) {
  const Real top = *std::max_element(x.begin(), x.end());
  std::vector<Real> p(x.size(), Real{0});
  if (top == kNone<Real>) return p;
  for (std::size_t i = 0; i < x.size(); ++i) p[i] = exponential<Real>(x[i] - top);
  const Real sum = padded_tree(p);
  for (Real& v : p) v = std::is_same_v<Real, float> ? v * (Real{1} / sum) : v / sum;
  return p;
}

template <class Real>
std::vector<Real> sigmoid(const std::vector<Real>& x) {
  std::vector<Real> s;
  for (const Real v : x) {
    const Real e = exponential<Real>(-std::abs(v));
    s.push_back((v < 0 ? e : Real{1}) / (Real{1} + e));
  }
  return s;
}

/// ln(1 + e)/e, for e from 0 to 1.
template <class Real>
Real log1p_ratio(Real e) {
  if constexpr (std::is_same_v<Real, float>) return key::log1p_ratio32(e);
  return e > 0 ? std::log1p(e) / e : Real{1};
}

template <class Real>
std::vector<Real> sqrt_softplus(const std::vector<Real>& x) {
  std::vector<Real> s;
  for (const Real v : x) {
    const Real e = exponential<Real>(-std::abs(v));
    s.push_back(std::sqrt(std::fma(e, log1p_ratio(e), std::max(v, Real{0}))));
  }
  return s;
}

/// Whether a score depends on the expert's own logit alone.
inline bool pointwise(ScoreMode score) {
  return score == ScoreMode::kSigmoid || score == ScoreMode::kSqrtSoftplus;
}

template <class Real>
std::vector<Real> pointwise_scores(ScoreMode score, const std::vector<Real>& x) {
  return score == ScoreMode::kSigmoid ? sigmoid(x) : sqrt_softplus(x);
}

/// d ln(score) / d logit of a pointwise score.
template <class Real>
Real pointwise_slope(ScoreMode score, Real x) {
  const Real e = exponential<Real>(-std::abs(x));
  if (score == ScoreMode::kSigmoid) return (x < 0 ? Real{1} : e) / (Real{1} + e);
  const Real softplus = x < 0 ? log1p_ratio(e) : x + e * log1p_ratio(e);  // over e^x for x < 0
  return Real{0.5} / ((Real{1} + e) * softplus);
}

template <class Real>
std::vector<Real> probabilities(const RouteOptions& options, const std::vector<Real>& x) {
  return pointwise(options.score) ? pointwise_scores(options.score, x) : softmax(x);
}

template <class Real>
struct Choice {
  std::vector<int> ids;
  std::vector<Real> weights;
};

template <class Real>
Choice<Real> choose(const RouteOptions& options, const std::vector<Real>& x) {
  const int experts = static_cast<int>(x.size());
  std::vector<Real> value = x;
  if (pointwise(options.score)) {
    const std::vector<Real> s = pointwise_scores(options.score, x);
    for (int e = 0; e < experts; ++e) {
      Real v = s[e];
      if (options.bias.data != nullptr) v += static_cast<const float*>(options.bias.data)[e];
      if (std::isnan(v) || x[e] == kNone<Real>) v = kNone<Real>;
      value[e] = std::min(v, std::numeric_limits<Real>::max());
    }
  }
  if (options.n_group > 0) {
    const int groups = static_cast<int>(options.n_group);
    const int size = experts / groups;
    std::vector<std::pair<Real, int>> rank;
    for (int g = 0; g < groups; ++g) {
      std::vector<Real> members(value.begin() + g * size, value.begin() + (g + 1) * size);
      std::sort(members.rbegin(), members.rend());
      constexpr Real kLowest = std::numeric_limits<Real>::lowest();
      Real sum = members[0];
      if (size > 1) sum = std::max(members[0], kLowest) + std::max(members[1], kLowest);
      rank.push_back({sum, g});
    }
    std::stable_sort(rank.begin(), rank.end(),
                     [](const auto& a, const auto& b) { return a.first > b.first; });
    for (int i = static_cast<int>(options.topk_group); i < groups; ++i) {
      for (int j = 0; j < size; ++j) value[rank[i].second * size + j] = kNone<Real>;
    }
  }
  std::vector<int> order(experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return value[a] > value[b]; });

  Choice<Real> choice;
  std::vector<Real> raw;
  const std::vector<Real> p = probabilities(options, x);
  for (int k = 0; k < options.top_k; ++k) {
    choice.ids.push_back(value[order[k]] == kNone<Real> ? -1 : order[k]);
    const int e = choice.ids.back();
    if (options.score == ScoreMode::kSoftmaxAfterTopK) {
      raw.push_back(e < 0 ? kNone<Real> : x[e]);
    } else {
      raw.push_back(e < 0 ? Real{0} : p[e]);
    }
  }
  if (options.score == ScoreMode::kSoftmaxAfterTopK) raw = softmax(raw);
  const Real sum = padded_tree(raw) + static_cast<Real>(1e-20);
  for (const Real r : raw) {
    const Real w = options.renormalize != 0 ? r / sum : r;
    choice.weights.push_back(w * static_cast<Real>(options.scale));
  }
  return choice;
}

template <class Real>
struct PairList {
  std::vector<int> token, expert;
  std::vector<Real> weight;
  std::vector<std::int64_t> offsets;
};

/// A token that an expert may keep. Chosen tokens rank first, then a larger p, then a lower token.
template <class Real>
struct Candidate {
  bool chosen;
  Real p;
  int token;
  Real weight;
};

/// In fixed point: 40 fraction bits, for sqrt_softplus 24 of at most 512.
template <class Real>
std::uint64_t mass(ScoreMode score, const std::vector<Candidate<Real>>& ranked, std::int64_t from,
                   std::int64_t to) {
  std::uint64_t sum = 0;
  for (std::int64_t i = from; i < to; ++i) {
    const auto p = static_cast<double>(ranked[i].p);
    sum += static_cast<std::uint64_t>(
        score == ScoreMode::kSqrtSoftplus ? std::ldexp(std::min(p, 512.0), 24) : std::ldexp(p, 40));
  }
  return sum;
}

template <class Real>
std::int64_t rounded_count(const RoundOptions& o, const std::vector<Candidate<Real>>& ranked,
                           std::int64_t f, int expert, std::int64_t running) {
  const auto tokens = static_cast<std::int64_t>(ranked.size());
  if (f % o.tile == 0) return f;
  const std::int64_t multiple = f / o.tile;
  const std::int64_t lo = multiple * o.tile;
  const std::int64_t hi = std::min(lo + o.tile, tokens);
  const std::int64_t nearest = f - lo < hi - f     ? lo
                               : f - lo > hi - f   ? hi
                               : multiple % 2 == 0 ? lo
                                                   : hi;
  switch (o.mode) {
    case RoundingMode::kNearest:
      return nearest;
    case RoundingMode::kUp:
      return hi;
    case RoundingMode::kDown:
      return lo;
    case RoundingMode::kScore:
      return mass(o.route.score, ranked, f, hi) < mass(o.route.score, ranked, lo, f) ? hi : lo;
    case RoundingMode::kStochastic: {
      const double u =
          philox4x32_10({{static_cast<std::uint32_t>(expert), 0, 0, 0}}, o.seed).word[0];
      return u * static_cast<double>(hi - lo) < std::ldexp(static_cast<double>(f - lo), 32) ? hi
                                                                                            : lo;
    }
    case RoundingMode::kBalanced: {
      const std::int64_t with_lo = std::abs(running + lo - f);
      const std::int64_t with_hi = std::abs(running + hi - f);
      return with_lo < with_hi ? lo : with_hi < with_lo ? hi : nearest;
    }
  }
  return -1;
}

template <class Real>
PairList<Real> round_tokens(const RoundOptions& o, const Rows<Real>& x, int experts) {
  PairList<Real> list;
  const int tokens = static_cast<int>(x.size());
  std::vector<std::vector<Candidate<Real>>> columns(experts);
  for (int t = 0; t < tokens; ++t) {
    const Choice<Real> choice = choose(o.route, x[t]);
    const std::vector<Real> p = probabilities(o.route, x[t]);
    for (int e = 0; e < experts; ++e) {
      columns[e].push_back({false, p[e], t, p[e] * static_cast<Real>(o.route.scale)});
    }
    for (std::size_t k = 0; k < choice.ids.size(); ++k) {
      if (choice.ids[k] < 0) continue;
      columns[choice.ids[k]][t].chosen = true;
      columns[choice.ids[k]][t].weight = choice.weights[k];
    }
  }
  list.offsets.push_back(0);
  std::int64_t running = 0;
  for (int e = 0; e < experts; ++e) {
    auto ranked = columns[e];
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
      return a.chosen != b.chosen ? a.chosen : a.p > b.p;
    });
    const auto f = std::count_if(ranked.begin(), ranked.end(), [](auto& c) { return c.chosen; });
    const std::int64_t count = rounded_count(o, ranked, f, e, running);
    running += count - f;
    ranked.resize(count);
    std::sort(ranked.begin(), ranked.end(),
              [](const auto& a, const auto& b) { return a.token < b.token; });
    for (const auto& c : ranked) {
      list.token.push_back(c.token);
      list.expert.push_back(e);
      list.weight.push_back(c.weight);
    }
    list.offsets.push_back(list.offsets.back() + count);
  }
  return list;
}

}  // namespace sonicmoe::reference
