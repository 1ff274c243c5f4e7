// What an activation needs beside its input.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// The parameters of an activation, 0 where its kind has none.
struct ActivationScalars {
  float alpha;
  float limit;
  float power;  ///< -alpha / ln 2, computed on the host: the kernel has no register for the product
};

/// Of an activation, with its kind's defaults in place of zeros.
ActivationScalars scalars_of(const Activation& activation);

}  // namespace sonicmoe::cuda
