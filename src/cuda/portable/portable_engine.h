#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// mma.sync and cp.async: every device from 8.0 on.
extern const Engine kPortableEngine;

}  // namespace sonicmoe::cuda
