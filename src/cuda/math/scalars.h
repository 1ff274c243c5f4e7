// What an activation needs beside its input.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Constants of swiglu_oai; the others ignore them.
struct ActivationScalars {
  float alpha;
  float limit;
  float power;  ///< -alpha / ln 2, computed on the host: the kernel has no register for the product
};

/// Of an activation, with the defaults of swiglu_oai in place of zeros.
ActivationScalars scalars_of(const Activation& activation);

}  // namespace sonicmoe::cuda
