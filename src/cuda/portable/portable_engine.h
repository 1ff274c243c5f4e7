#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// The engine that uses mma.sync and cp.async. It serves compute capabilities 8.0 to 12.9.
extern const Engine kPortableEngine;

}  // namespace sonicmoe::cuda
