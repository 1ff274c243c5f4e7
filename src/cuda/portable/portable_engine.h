#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// The engine for mma.sync and cp.async: serves every device from compute capability 8.0 on.
extern const Engine kPortableEngine;

}  // namespace sonicmoe::cuda
