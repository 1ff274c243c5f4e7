// Scores that depend on the expert's own logit alone, by mode. Host and device compile the same
// source.
#pragma once

#include "core/selection_key.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::key {

/// Whether a score depends on the expert's own logit alone. Only such a score takes a selection
/// bias.
SONICMOE_HD bool pointwise(ScoreMode score) {
  return score == ScoreMode::kSigmoid || score == ScoreMode::kSqrtSoftplus;
}

/// The score of a logit, for a pointwise mode.
SONICMOE_HD float pointwise_score(ScoreMode score, float x) {
  return score == ScoreMode::kSigmoid ? sigmoid32(x) : sqrt_softplus32(x);
}

/// The mass of a score in the sums of RoundingMode::kScore.
SONICMOE_HD std::uint64_t score_mass(ScoreMode score, float p) {
  return score == ScoreMode::kSqrtSoftplus ? sqrt_softplus_mass(p) : mass(p);
}

/// The value by which token rounding on CUDA ranks a score: at most 1, so that 30 bits hold it. A
/// sqrt_softplus score is 0 or from 2^-58 to 2^64, so its product with 2^-64 is exact.
SONICMOE_HD float rank_of(ScoreMode score, float p) {
  return score == ScoreMode::kSqrtSoftplus ? mul32(p, 0x1p-64f) : p;
}
SONICMOE_HD float score_of_rank(ScoreMode score, float rank) {
  return score == ScoreMode::kSqrtSoftplus ? mul32(rank, 0x1p64f) : rank;
}

}  // namespace sonicmoe::key
