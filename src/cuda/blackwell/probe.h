// Decides by experiment whether the engine may serve a device.
#pragma once

#include <string>
#include <string_view>

#include "cuda/device/device.h"

namespace sonicmoe::cuda::blackwell {

/// Computes small products of integers on `device` with every kernel, and compares them with the
/// host's. Returns what is wrong with the first that differs or does not end in time, as "its
/// product of ... was wrong in ..."; empty if all are right. The answer is remembered for the
/// device. If `only` is not empty, it computes the products whose names contain it. Throws
/// Error(kCuda) if a product fails so that CUDA can no longer be used in this process.
std::string probe(const Device& device, std::string_view only);

}  // namespace sonicmoe::cuda::blackwell
