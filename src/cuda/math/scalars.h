// The parameters of an activation (alpha, limit), as kernels take them.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// alpha and limit of an activation; 0 if its kind has no such parameter.
struct ActivationScalars {
  float alpha;
  float limit;
  float power;  ///< -alpha / ln 2, computed on the host: the kernel has no register for the product
};

/// The scalars of an activation, with the defaults of its kind in place of zeros.
ActivationScalars scalars_of(const Activation& activation);

}  // namespace sonicmoe::cuda
