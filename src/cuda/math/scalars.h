// An activation as kernels take it.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// The parameters of an activation. What the fields hold depends on its kind; for kinds without a
/// row they are 0. The host computes what kernels have no registers for.
///
/// | kind                        | alpha            | limit            | power         |
/// | swiglu_oai                  | alpha            | limit            | -alpha / ln 2 |
/// | swiglu_clamped, swiglu_step | the largest gate | the largest |up| | 0             |
/// | situ                        | 2 / (c_g ln 2)   | 2 / (c_u ln 2)   | c_g c_u       |
///
/// c_g and c_u are situ's caps: alpha and limit of Activation.
struct ActivationScalars {
  float alpha;
  float limit;
  float power;
};

/// The scalars of an activation, with the defaults of its kind in place of zeros.
ActivationScalars scalars_of(const Activation& activation);

/// The kind whose kernels compute an activation. swiglu_step has none of its own: silu(x) is
/// negative below 0 and ascends above 0, so min(silu(gate), limit) = silu(min(gate, x)) with
/// silu(x) = limit, and the kernels of swiglu_clamped compute it with another largest gate.
constexpr ActivationKind kernel_kind(ActivationKind kind) {
  return kind == ActivationKind::kSwiGLUStep ? ActivationKind::kSwiGLUClamped : kind;
}

}  // namespace sonicmoe::cuda
