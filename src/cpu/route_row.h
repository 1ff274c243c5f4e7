// The routing of one token: values, selection, weights, gradient. Real is float for fp32, bf16 and
// fp16 logits, which are compared by the keys of core/selection_key.h. Real is double for fp64
// logits, which only the CPU serves and which are compared as doubles.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/route_simd.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::cpu {

template <class Real>
using KeyOf = std::conditional_t<std::is_same_v<Real, float>, std::uint32_t, std::uint64_t>;

/// The largest logit of a row and the sum of e^(x - top). If every logit is -inf, top is -inf and
/// the sum is 0.
template <class Real>
struct ExpSum {
  Real top;
  Real sum;
};

/// Memory and arithmetic for a row of E logits. Each worker has one.
template <class Real>
class RouteRow {
 public:
  RouteRow(const RouteOptions& options, std::int64_t experts);

  /// Reads row t: NaN becomes -inf, +inf the dtype's largest finite value.
  void load(const Tensor& logits, std::int64_t t);
  const Real* logits() const { return x_.data(); }
  const Real* probabilities() const { return p_.data(); }

  /// p over all E: softmax, or the score without bias where each expert has its own
  /// (key::pointwise).
  void compute_probabilities();
  /// p = softmax over E whatever the score mode.
  ExpSum<Real> compute_softmax();

  /// p of the losses, from compute_softmax() and its result `top`: the scores over their sum.
  /// Leaves the softmax as it is for softmax routing. For other scores it also computes the slopes
  /// that add_loss_gradient() needs.
  void normalize_scores(Real top);

  /// Chooses K experts, best first; -1 for an empty slot. A pointwise score needs probabilities.
  void select(std::int32_t* ids);
  /// The weights of the K chosen experts; 0 for an empty slot. Needs probabilities unless
  /// kSoftmaxAfterTopK.
  void weigh(const std::int32_t* ids, Real* weights);

  /// Adds the gradient through weigh() to dlogits (E). Needs the same probabilities as weigh().
  /// Does not read the entries of empty slots.
  void add_weight_gradient(const std::int32_t* ids, const double* dweights, double* dlogits);
  /// Adds the gradient through compute_probabilities() to dlogits (E).
  void add_probability_gradient(const double* dp, double* dlogits) const;
  /// Adds the gradient through normalize_scores() to dlogits (E).
  void add_loss_gradient(const double* dp, double* dlogits) const;
  /// Adds the gradient through compute_softmax() to dlogits (E).
  void add_softmax_gradient(const double* dp, double* dlogits) const;

  bool needs_probabilities() const { return options_.score != ScoreMode::kSoftmaxAfterTopK; }

 private:
  bool pointwise() const;
  void selection_values();
  void keep_best_groups();
  void compute_scores(const std::int32_t* ids);

  RouteOptions options_;
  std::int64_t experts_;
  std::vector<Real> x_, p_, v_, tmp_;
  std::vector<KeyOf<Real>> keys_, block_max_;
  std::vector<Real> chosen_x_, score_;                             // K values each
  std::vector<double> dscore_;                                     // K
  std::vector<std::pair<KeyOf<Real>, std::int64_t>> group_order_;  // n_group
};

/// For token rounding: the bits of a probability are its rank key, without the chosen bit.
KeyOf<float> probability_bits(float p);
KeyOf<double> probability_bits(double p);
float bits_probability(KeyOf<float> bits);
double bits_probability(KeyOf<double> bits);
template <class Key>
inline constexpr Key kChosenBit = Key{1} << (8 * sizeof(Key) - 1);
/// A probability in fixed point, truncated: core/selection_key.h.
std::uint64_t probability_mass(ScoreMode score, float p);
std::uint64_t probability_mass(ScoreMode score, double p);

}  // namespace sonicmoe::cpu
