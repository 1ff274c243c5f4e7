// Unpacks weights by tables and definitions of its own, in fp64 with the roundings that packed.h
// states.
#pragma once

#include <vector>

#include "sonicmoe/packed.h"

namespace sonicmoe::oracle {

/// The unpacked tensor (E, rows, columns) in row-major order, rounded to `dtype`. The buffers are
/// in host memory.
std::vector<double> unpack_weights(const PackedWeights& packed, DType dtype);

}  // namespace sonicmoe::oracle
