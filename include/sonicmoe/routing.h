// Routing decides which tokens go to which expert, and with what weight: top-k with its scores,
// token rounding, expert choice, and the router's auxiliary losses, each with its gradient. The
// outputs and the scratch of a call must not share memory with another argument.
//
// docs/routing.md has the exact definitions (ties, NaN, ranks, modes). Ids, pairs and their order
// are equal on every backend, because one header (src/core/selection_key.h) computes the selection
// values.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// How logits become scores.
enum class ScoreMode : std::int32_t {
  kSoftmaxAfterTopK = 0,   ///< softmax over the K chosen logits
  kSoftmaxBeforeTopK = 1,  ///< softmax over all E, then choose
  kSigmoid = 2,            ///< sigmoid; bias, if any, only selects
};

struct RouteOptions {
  std::int64_t top_k = 0;  ///< K, 1 <= K <= E
  ScoreMode score = ScoreMode::kSoftmaxAfterTopK;
  std::int32_t renormalize = 0;  ///< 1: weights / (sum over the K chosen + 1e-20)
  double scale = 1.0;            ///< finite in fp32; multiplies the weights last
  Tensor bias{};                 ///< (E) fp32, sigmoid only, optional: added for selection only
  std::int64_t n_group = 0;      ///< 0: no groups; else a divisor of E
  std::int64_t topk_group = 0;   ///< experts are chosen from this many groups: those with the
                                 ///< largest sum of their two largest selection values
};

/// Top-k. logits (T, E) of any float dtype -> ids (T, K) i32 or i64, weights (T, K) fp32 (fp64 for
/// fp64 logits), best first. If only -inf or NaN remain, a slot gets id -1 and weight 0.
SONICMOE_API void route(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                        const Tensor& weights, const Exec& exec = {});

/// Backward of route(): dweights (T, K) -> dlogits (T, E) in the logits' dtype, all written.
SONICMOE_API void route_backward(const RouteOptions& options, const Tensor& logits,
                                 const Tensor& ids, const Tensor& dweights, const Tensor& dlogits,
                                 const Exec& exec = {});

/// (token, expert, weight) lists sorted by (expert, token). Entries at or past offsets[E] hold
/// token -1, expert E, weight 0.
struct Pairs {
  Tensor token{};    ///< (C) i32
  Tensor expert{};   ///< (C) i32
  Tensor weight{};   ///< (C) fp32 (fp64 for fp64 logits)
  Tensor offsets{};  ///< (E+1) i64
};

/// How an expert's top-K count f becomes a multiple of the tile: lo = floor(f/tile)*tile and
/// hi = min(lo + tile, T) (f itself when f is a multiple).
enum class RoundingMode : std::int32_t {
  kNearest = 0,     ///< the closer of lo and hi, a tie to the even multiple
  kUp = 1,          ///< hi
  kDown = 2,        ///< lo
  kScore = 3,       ///< hi if the scores that hi adds sum to less than the scores that lo drops
  kStochastic = 4,  ///< hi with probability (f - lo)/(hi - lo), Philox4x32-10(seed, expert)
  kBalanced = 5,    ///< lo or hi, whichever keeps the running sum of changes nearer to zero
};

struct RoundOptions {
  RouteOptions route{};
  std::int64_t tile = 128;
  RoundingMode mode = RoundingMode::kNearest;
  std::uint64_t seed = 0;
};

/// C of token_round: T*K (down), T*K + E*tile/2 (nearest), else min(T*E, T*K + E*tile).
SONICMOE_API std::int64_t round_capacity(const RoundOptions& options, std::int64_t tokens,
                                         std::int64_t experts);
/// Bytes of scratch that token_round and its backward need.
SONICMOE_API std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                              std::int64_t experts, const Exec& exec = {});

/// Top-k, then every expert's rows rounded to a multiple of the tile. Pairs have C =
/// round_capacity.
SONICMOE_API void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                              Buffer scratch, const Exec& exec = {});
/// Backward of token_round(): dweight (C), in the order of the pairs that it wrote -> dlogits (T,
/// E), all written. No pair may be in the list twice; this is not checked.
SONICMOE_API void token_round_backward(const RoundOptions& options, const Tensor& logits,
                                       const Pairs& pairs, const Tensor& dweight,
                                       const Tensor& dlogits, Buffer scratch,
                                       const Exec& exec = {});

/// Bytes of scratch that expert_choice and its backward need; 0 on the CPU.
SONICMOE_API std::int64_t expert_choice_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                                      const Exec& exec = {});

/// Expert choice: every expert takes its `capacity` best tokens by softmax over E; the weight is
/// the token's softmax probability. Pairs have C = E*min(capacity, T).
SONICMOE_API void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                                Buffer scratch, const Exec& exec);
/// As token_round_backward(), for the pairs of expert_choice().
SONICMOE_API void expert_choice_backward(const Tensor& logits, const Pairs& pairs,
                                         const Tensor& dweight, const Tensor& dlogits,
                                         Buffer scratch, const Exec& exec);
/// The functions above without scratch, for the CPU.
SONICMOE_API void expert_choice(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                                const Exec& exec = {});
SONICMOE_API void expert_choice_backward(const Tensor& logits, const Pairs& pairs,
                                         const Tensor& dweight, const Tensor& dlogits,
                                         const Exec& exec = {});

/// Auxiliary losses of a routing, p = softmax over E (sigmoid routing: the sigmoid):
/// load_balancing = E * sum_e count_e/(T*K) * mean_t p[t,e]; z = mean_t logsumexp(logits_t)^2.
/// Both are 0 at T = 0.
struct RouterLosses {
  Tensor values{};             ///< (2) fp32 (fp64 for fp64 logits): load_balancing, z
  Tensor tokens_per_expert{};  ///< (E) i64: top-K counts before rounding
};
/// Bytes of scratch that router_losses needs; 0 on the CPU. Its backward needs none.
SONICMOE_API std::int64_t router_losses_scratch_bytes(std::int64_t tokens, std::int64_t experts,
                                                      const Exec& exec = {});
SONICMOE_API void router_losses(const RouteOptions& options, const Tensor& logits,
                                const Tensor& ids, const RouterLosses& out, Buffer scratch,
                                const Exec& exec);
/// The function above without scratch, for the CPU.
SONICMOE_API void router_losses(const RouteOptions& options, const Tensor& logits,
                                const Tensor& ids, const RouterLosses& out, const Exec& exec = {});
/// dvalues (2) -> dlogits (T, E), all written; counts are constants.
SONICMOE_API void router_losses_backward(const RouteOptions& options, const Tensor& logits,
                                         const Tensor& tokens_per_expert, const Tensor& dvalues,
                                         const Tensor& dlogits, const Exec& exec = {});

/// Converts to public names ("softmax_after_topk", "nearest") and back; unknown names throw Error.
SONICMOE_API const char* score_mode_name(ScoreMode mode);
SONICMOE_API ScoreMode score_mode_from_name(const char* name);
SONICMOE_API const char* rounding_mode_name(RoundingMode mode);
SONICMOE_API RoundingMode rounding_mode_from_name(const char* name);

}  // namespace sonicmoe
