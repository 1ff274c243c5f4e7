#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// The engine that uses tcgen05. It serves compute capabilities 10.0 to 10.3. No GPU has run it: it
/// is tested with the emulator only.
extern const Engine kBlackwellEngine;

}  // namespace sonicmoe::cuda
