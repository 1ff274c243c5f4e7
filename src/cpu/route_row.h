// One token's routing: values, selection, weights, gradient. Real is float for fp32, bf16 and fp16
// logits (keys of core/selection_key.h) and double for fp64 logits, which only the CPU takes and
// which are compared as doubles.
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

/// A row's exponentials: sum of e^(x - top); top is -inf and sum 0 when nothing is available.
template <class Real>
struct ExpSum {
  Real top;
  Real sum;
};

/// Scratch and arithmetic for rows of E logits. One per thread.
template <class Real>
class RouteRow {
 public:
  RouteRow(const RouteOptions& options, std::int64_t experts);

  /// Reads row t: NaN becomes -inf, +inf the dtype's largest finite value.
  void load(const Tensor& logits, std::int64_t t);
  const Real* logits() const { return x_.data(); }
  const Real* probabilities() const { return p_.data(); }

  /// p over all E: softmax, or the sigmoid without bias for sigmoid routing.
  void compute_probabilities();
  /// p = softmax over E whatever the score mode.
  ExpSum<Real> compute_softmax();

  /// Chooses K experts, best first; -1 where nothing is left. Needs probabilities for kSigmoid.
  void select(std::int32_t* ids);
  /// Weights of the chosen; needs probabilities unless kSoftmaxAfterTopK. Empty slots get 0.
  void weigh(const std::int32_t* ids, Real* weights);

  /// Adds the gradient through weigh() to dlogits (E); p must be as weigh() needs it. Entries of
  /// empty slots are not read.
  void add_weight_gradient(const std::int32_t* ids, const double* dweights, double* dlogits);
  /// Adds the gradient through probabilities (softmax or sigmoid, as compute_probabilities).
  void add_probability_gradient(const double* dp, double* dlogits) const;
  /// The same for softmax.
  void add_softmax_gradient(const double* dp, double* dlogits) const;

  bool needs_probabilities() const { return options_.score != ScoreMode::kSoftmaxAfterTopK; }

 private:
  void selection_values();
  void keep_best_groups();
  void raw_scores(const std::int32_t* ids);

  RouteOptions options_;
  std::int64_t experts_;
  std::vector<Real> x_, p_, v_, tmp_;
  std::vector<KeyOf<Real>> keys_, block_max_;
  std::vector<Real> slot_, raw_;                                   // K values each
  std::vector<double> draw_;                                       // K
  std::vector<std::pair<KeyOf<Real>, std::int64_t>> group_order_;  // n_group
};

/// Values of rank keys and masses for token rounding.
KeyOf<float> probability_bits(float p);
KeyOf<double> probability_bits(double p);
float bits_probability(KeyOf<float> bits);
double bits_probability(KeyOf<double> bits);
template <class Key>
inline constexpr Key kChosenBit = Key{1} << (8 * sizeof(Key) - 1);
/// 40 fraction bits, cut off.
std::uint64_t probability_mass(float p);
std::uint64_t probability_mass(double p);

}  // namespace sonicmoe::cpu
