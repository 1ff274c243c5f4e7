// How operands lie in memory and how gradients are stored: the words that the passes and all
// engines share. Plain C++.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Layout of gate and up in H and dH.
enum class GateLayout : std::int32_t {
  kNone,          ///< no gate
  kConcatenated,  ///< (C, 2, n): the gate's n columns, then up's
  kInterleaved,   ///< (C, 2n): gate and up alternate
};

/// The contiguous dimension of an operand of a product: the summed one (K) or the other one.
enum class Major : int { kK = 0, kMN = 1 };

/// Of matrices (E, rows, depth), as the operand of a product over `depth`.
constexpr Major major_of(const Tensor& matrices) {
  return matrices.stride[2] == 1 ? Major::kK : Major::kMN;
}

/// How a weight gradient is stored: as 16-bit elements, as fp32, or added to fp32.
enum class GradStore : std::int32_t { kElement = 0, kFloat = 1, kAccumulate = 2 };

}  // namespace sonicmoe::cuda
