// Row products in FP8 on Hopper, for the engine's table.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

extern const Fp8Engine kHopperFp8;

}  // namespace sonicmoe::cuda
