// Ranks the tokens of an expert by key. Among equal keys the lower token ranks higher.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "cpu/route_row.h"

namespace sonicmoe::cpu {

/// A token with its key.
template <class Key>
struct Ranked {
  Key key;
  std::int64_t token;

  bool before(const Ranked& other) const {
    return key != other.key ? key > other.key : token < other.token;
  }
};

/// The value for "no token is kept": it ranks above every token.
template <class Key>
constexpr Ranked<Key> keep_nothing() {
  return {std::numeric_limits<Key>::max(), -1};
}

/// Ranks the T tokens of one expert after another. Allocates in the constructor only.
template <class Key>
class ColumnRanking {
 public:
  explicit ColumnRanking(std::int64_t tokens) : tokens_(tokens), kept_(tokens) {
    candidates_.reserve(tokens);
  }
  /// Sets the rank keys (T) that the other functions read.
  void read(const Key* keys) { keys_ = keys; }

  std::int64_t chosen_count() const {
    constexpr int kTopBit = 8 * static_cast<int>(sizeof(Key)) - 1;
    Key count = 0;
    for (std::int64_t t = 0; t < tokens_; ++t) count += keys_[t] >> kTopBit;
    return static_cast<std::int64_t>(count);
  }

  /// The argument of kept() with which an expert keeps c tokens: the token of rank c, or a value
  /// between this token and the next one. `f` is the number of chosen tokens.
  Ranked<Key> last_kept(std::int64_t c, std::int64_t f) {
    candidates_.clear();
    if (c == 0) return keep_nothing<Key>();
    if (c == f) return {kChosenBit<Key>, tokens_};
    return c > f ? best_others(c - f) : best_chosen(c);
  }
  /// The tokens that rank as high as `last` or higher, in ascending order.
  std::span<const std::int32_t> kept(const Ranked<Key>& last) {
    std::int64_t count = 0;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      kept_[count] = static_cast<std::int32_t>(t);
      count += (keys_[t] > last.key) | ((keys_[t] == last.key) & (t <= last.token));
    }
    return {kept_.data(), static_cast<std::size_t>(count)};
  }

  /// The mass of the m highest ranked tokens that are not chosen; their keys are of `score`.
  std::uint64_t mass_of_best_others(std::int64_t m, ScoreMode score) {
    std::uint64_t mass = 0;
    if (m == 0) return mass;
    best_others(m);
    for (const auto& r : candidates_) mass += mass_of(r.key, score);
    return mass;
  }

  /// The mass of the chosen tokens below rank c.
  std::uint64_t mass_of_worst_chosen(std::int64_t c, ScoreMode score) {
    collect_chosen();
    const auto first = candidates_.begin() + c;
    std::nth_element(candidates_.begin(), first, candidates_.end(), order);
    std::uint64_t mass = 0;
    for (auto r = first; r != candidates_.end(); ++r) mass += mass_of(r->key, score);
    return mass;
  }

 private:
  static bool order(const Ranked<Key>& a, const Ranked<Key>& b) { return a.before(b); }
  static std::uint64_t mass_of(Key key, ScoreMode score) {
    return probability_mass(score, bits_probability(static_cast<Key>(key & ~kChosenBit<Key>)));
  }

  void collect_chosen() {
    candidates_.clear();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      if (keys_[t] >= kChosenBit<Key>) candidates_.push_back({keys_[t], t});
    }
  }

  Ranked<Key> best_chosen(std::int64_t c) {
    collect_chosen();
    const auto last = candidates_.begin() + (c - 1);
    std::nth_element(candidates_.begin(), last, candidates_.end(), order);
    return *last;
  }

  // The m-th ranked of the tokens that are not chosen; the first m candidates are then the best m.
  // Whenever `many` candidates are collected, they are cut to the best m, and from then on only
  // keys above the worst of these are collected. Tokens come in ascending order, so a later token
  // with an equal key ranks lower and may be left out.
  Ranked<Key> best_others(std::int64_t m) {
    const auto many = static_cast<std::size_t>(std::max(2 * m, kFewCandidates));
    candidates_.clear();
    Key low = 0;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const Key k = keys_[t];
      // One unsigned comparison skips keys below `low` and keys of chosen tokens.
      if (static_cast<Key>(k - low) >= static_cast<Key>(kChosenBit<Key> - low)) continue;
      candidates_.push_back({k, t});
      if (candidates_.size() == many) low = static_cast<Key>(cut_to(m).key + 1);
    }
    return cut_to(m);
  }

  Ranked<Key> cut_to(std::int64_t m) {
    const auto last = candidates_.begin() + (m - 1);
    std::nth_element(candidates_.begin(), last, candidates_.end(), order);
    const Ranked<Key> result = *last;
    candidates_.resize(m);
    return result;
  }

  static constexpr std::int64_t kFewCandidates = 256;

  const Key* keys_ = nullptr;
  std::int64_t tokens_;
  std::vector<Ranked<Key>> candidates_;  ///< T at most
  std::vector<std::int32_t> kept_;       ///< T
};

}  // namespace sonicmoe::cpu
