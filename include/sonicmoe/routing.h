// Routing: which tokens go to which expert, and with what weight. Top-k with its scores, token
// rounding, expert choice, and the router's auxiliary losses, each with its gradient.
//
// docs/routing.md has the exact definitions (ties, NaN, groups, modes). Ids, pairs and their order
// are equal on every backend, because one header (src/core/selection_key.h) computes the selection
// values.
//
// The logits (T, E) have any floating-point dtype. CUDA takes bf16, fp16 and fp32, E up to 1024, K
// up to 32 and n_group up to 256; other dtypes and sizes throw Status::kUnsupported. The outputs
// and the scratch of a call must not share memory with another argument. Wrong arguments are
// refused before any work (status.h).
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// How a chosen expert's weight is computed from the logits.
enum class ScoreMode : std::int32_t {
  kSoftmaxAfterTopK = 0,   ///< softmax over the K chosen logits
  kSoftmaxBeforeTopK = 1,  ///< softmax over all E logits
  kSigmoid = 2,            ///< sigmoid of the logit; selects by score + bias
  kSqrtSoftplus = 3,       ///< sqrt(ln(1 + e^logit)); selects by score + bias
};

/// Options of top-k.
struct RouteOptions {
  std::int64_t top_k = 0;  ///< K, 1 <= K <= E
  ScoreMode score = ScoreMode::kSoftmaxAfterTopK;
  std::int32_t renormalize = 0;  ///< 1: divide the K weights by (their sum + 1e-20)
  double scale = 1.0;            ///< multiplies the weights last; finite in fp32
  Tensor bias{};             ///< (E) fp32, optional, for kSigmoid and kSqrtSoftplus: added to the
                             ///< scores to select, not to weigh
  std::int64_t n_group = 0;  ///< 0: no groups; else a divisor of E
  std::int64_t topk_group = 0;  ///< number of groups from which experts are chosen: those whose
                                ///< two largest selection values have the largest sum
};

/// Top-k: logits (T, E) -> ids (T, K) i32 or i64 and weights (T, K) fp32 (fp64 for fp64 logits).
/// The largest selection value comes first. Logits of -inf and NaN are never chosen: a slot without
/// an expert gets id -1 and weight 0.
SONICMOE_API void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                        const Tensor& weights, const Exec& exec = {});

/// Backward of route(): dweights (T, K), of the dtype of weights -> dlogits (T, E) in the logits'
/// dtype. Every element of dlogits is written.
SONICMOE_API void route_backward(const RouteOptions& options, const Tensor& logits,
                                 const Tensor& ids, const Tensor& dweights, const Tensor& dlogits,
                                 const Exec& exec = {});

/// A list of (token, expert, weight), sorted by (expert, token). The entries of expert e are those
/// from offsets[e] up to offsets[e+1]. Entries from offsets[E] on have token -1, expert E and
/// weight 0.
struct Pairs {
  Tensor token{};    ///< (C) i32
  Tensor expert{};   ///< (C) i32
  Tensor weight{};   ///< (C) fp32 (fp64 for fp64 logits)
  Tensor offsets{};  ///< (E+1) i64
};

/// How the number of rows of an expert becomes a multiple of the tile. Top-k gives the expert f
/// rows. It then gets lo = floor(f/tile)*tile or hi = min(lo + tile, T) rows, and f rows if f is a
/// multiple.
enum class RoundingMode : std::int32_t {
  kNearest = 0,     ///< the closer of lo and hi; a tie: the even multiple of the tile
  kUp = 1,          ///< hi
  kDown = 2,        ///< lo
  kScore = 3,       ///< hi if the scores that hi adds sum to less than the scores that lo drops
  kStochastic = 4,  ///< hi with probability (f - lo)/(hi - lo); Philox4x32-10(seed, expert)
  kBalanced = 5,    ///< lo or hi, whichever keeps the running sum of changes nearer to 0
};

/// Options of token rounding.
struct RoundOptions {
  RouteOptions route{};
  std::int64_t tile = 128;  ///< in rows, >= 1
  RoundingMode mode = RoundingMode::kNearest;
  std::uint64_t seed = 0;  ///< for kStochastic
};

/// C, the length of the list that token_round() writes: T*K (kDown), T*K + E*tile/2 (kNearest),
/// else min(T*E, T*K + E*tile). C >= 2^31 throws Status::kOutOfRange.
SONICMOE_API std::int64_t round_capacity(const RoundOptions& options, std::int64_t tokens,
                                         std::int64_t experts);
/// Bytes of scratch that token_round() and token_round_backward() need.
SONICMOE_API std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                              std::int64_t experts, const Exec& exec = {});

/// Top-k, then rounds every expert's number of rows to a multiple of the tile: logits (T, E) ->
/// pairs with C = round_capacity().
SONICMOE_API void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                              Buffer scratch, const Exec& exec = {});
/// Backward of token_round(): dweight (C), in the order of the pairs that token_round() wrote ->
/// dlogits (T, E) in the logits' dtype. Every element of dlogits is written. The list must not
/// contain a pair twice; this is not checked.
SONICMOE_API void token_round_backward(const RoundOptions& options, const Tensor& logits,
                                       const Pairs& pairs, const Tensor& dweight,
                                       const Tensor& dlogits, Buffer scratch,
                                       const Exec& exec = {});

/// Bytes of scratch that expert_choice() and expert_choice_backward() need; 0 on the CPU.
SONICMOE_API std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                                      const Exec& exec = {});

/// Expert choice: logits (T, E) -> pairs with C = E*min(capacity, T). Every expert takes the
/// `capacity` tokens (at least 1, at most all T) that give it the largest probability.
/// Probabilities are the softmax over E. The weight of a pair is its probability.
SONICMOE_API void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                                Buffer scratch, const Exec& exec);
/// Backward of expert_choice(), with the arguments of token_round_backward().
SONICMOE_API void expert_choice_backward(const Tensor& logits, const Pairs& pairs,
                                         const Tensor& dweight, const Tensor& dlogits,
                                         Buffer scratch, const Exec& exec);
/// The two functions above without scratch, for the CPU; CUDA needs scratch.
SONICMOE_API void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                                const Exec& exec = {});
SONICMOE_API void expert_choice_backward(const Tensor& logits, const Pairs& pairs,
                                         const Tensor& dweight, const Tensor& dlogits,
                                         const Exec& exec = {});

/// The auxiliary losses of a routing. p is the softmax over E (kSigmoid and kSqrtSoftplus: the
/// score over its sum over E), count_e the number of tokens that top-k gives to expert e. Both
/// losses are 0 if T = 0.
/// - load_balancing = E * sum_e count_e/(T*K) * mean_t p[t,e]
/// - z = mean_t logsumexp(logits_t)^2
///
/// With values (S, 2) and tokens_per_expert (S, E) they are the losses of each of S sequences of
/// T/S consecutive tokens, where T and the means are the sequence's. The mean of the first column
/// is the sequence-wise balance loss of DeepSeek-V3. On CUDA a sequence takes two kernels.
struct RouterLosses {
  Tensor values{};             ///< (2) fp32 (fp64 for fp64 logits): load_balancing, z
  Tensor tokens_per_expert{};  ///< (E) i64: count_e, before token rounding
};
/// Bytes of scratch that router_losses() needs; 0 on the CPU. router_losses_backward() needs none.
SONICMOE_API std::int64_t router_losses_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                                      const Exec& exec = {});
/// Computes the losses from logits (T, E), and from the ids (T, K) that route() wrote with the same
/// options.
SONICMOE_API void router_losses(const RouteOptions& options, const Tensor& logits,
                                const Tensor& ids, const RouterLosses& out, Buffer scratch,
                                const Exec& exec);
/// The function above without scratch, for the CPU; CUDA needs scratch.
SONICMOE_API void router_losses(const RouteOptions& options, const Tensor& logits,
                                const Tensor& ids, const RouterLosses& out, const Exec& exec = {});
/// Backward of router_losses(): dvalues (2) or (S, 2), of the dtype of values -> dlogits (T, E) in
/// the logits' dtype. The counts are constants. Every element of dlogits is written.
SONICMOE_API void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                                         const Tensor& tokens_per_expert, const Tensor& dvalues,
                                         const Tensor& dlogits, const Exec& exec = {});

/// Converts a mode to its public name ("softmax_after_topk", "nearest") and back. An unknown value
/// has the name "unknown"; an unknown name throws Status::kInvalidArgument.
SONICMOE_API const char* score_mode_name(ScoreMode mode);
SONICMOE_API ScoreMode score_mode_from_name(const char* name);
SONICMOE_API const char* rounding_mode_name(RoundingMode mode);
SONICMOE_API RoundingMode rounding_mode_from_name(const char* name);

}  // namespace sonicmoe
