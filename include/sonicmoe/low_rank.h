// Low-rank factors on expert weights (LoRA): a projection uses W + scale * B A in place of W, and
// the sum is never formed. Problem::up_rank and down_rank say which projections have factors.
//
// Letters: r the rank of a projection, e the expert of row p, t its token, s[p] its routing weight,
// a_u and a_d the scales of the two projections; G n columns of H, gate and up. round() is the
// rounding to Problem::dtype. Factors in fp32 are rounded before they are multiplied. Everything in
// one round() is one sum in fp32 (fp64 for fp64 tensors). A projection without factors loses its
// terms.
//
//   forward    P[p]   = round(a_u * X[t] A_u^T)                      (C, r)    kept for backward
//              H[p]   = round(X[t] W1^T + P[p] B_u^T + b1)           (C, G n)  kept for backward
//              A[p]   = round(act(H[p]))                             (C, n)
//              U[p]   = round(a_d * A[p] A_d^T)                      (C, r)
//              Y[p]   = round(A[p] W2^T + U[p] B_d^T + b2)           (C, d)    kGrouped: times s[p]
//   backward   Q[p]   = round(a_d * dO[t] B_d)                       (C, r)
//              dA'[p] = dO[t] W2 + Q[p] A_d                          (C, n)    not rounded
//              dH[p]  = round(s[p] * dA'[p] * act'(H[p]))            (C, G n)
//              A'[p]  = round(s[p] * act(H[p]))                      (C, n)
//              dS[p]  = <dA'[p], round(act(H[p]))> + <dO[t], b2>
//              U'[p]  = round(a_d * A'[p] A_d^T)                     (C, r)
//              V[p]   = round(a_u * dH[p] B_u)                       (C, r)
//              dX~[p] = round(dH[p] W1 + V[p] A_u)                   (C, d)
//              dA_d   = sum over rows of Q[p]^T A'[p]                (E, r, n)
//              dB_d   = sum over rows of dO[t]^T U'[p]               (E, d, r)
//              dA_u   = sum over rows of V[p]^T X[t]                 (E, r, d)
//              dB_u   = sum over rows of dH[p]^T P[p]                (E, G n, r)
//
// O, dX and the gradients of W and of the biases follow from these rows as without factors
// (moe.h). With kFp8 the operands of the products with W are quantised as without factors; the
// products with factors take X, A, dO and dH in bf16, before they are quantised.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// The factors of a projection as strided views, or their gradients. Both factors are given, or
/// neither. Experts may share a factor: its stride of experts is then 0. The dtype is
/// Problem::dtype, or fp32 with Problem::f32_factors. For CUDA, gate_b and b of the up-projection
/// must alternate along n if gate and up of the weights do (h_views()).
struct LowRank {
  Tensor a{};          ///< up: A_u (E, r, d); down: A_d (E, r, n)
  Tensor b{};          ///< up: the rows of B_u for up, (E, n, r); down: B_d (E, d, r)
  Tensor gate_b{};     ///< up, gated activations: the rows of B_u for the gate, (E, n, r)
  double scale = 1.0;  ///< finite in fp32; gradients ignore it
};

/// The factors of both projections.
struct Lora {
  LowRank up{};
  LowRank down{};
};

}  // namespace sonicmoe
