// Decides by experiment whether the engine may serve a device.
#pragma once

#include <string>

#include "cuda/device/device.h"

namespace sonicmoe::cuda::blackwell {

/// Computes four small products of integers on `device` and compares them with the host's. Returns
/// what is wrong with the first that differs or does not end in time, as "its product of ... was
/// wrong in ..."; empty if all are right. The answer is remembered for the device. Throws
/// Error(kCuda) if a product fails so that CUDA can no longer be used in this process.
std::string probe(const Device& device);

}  // namespace sonicmoe::cuda::blackwell
