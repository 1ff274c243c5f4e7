// The engine of Hopper (H100, H200): wgmma, TMA, clusters, programmatic dependent launch.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

extern const Engine kHopperEngine;

}  // namespace sonicmoe::cuda
