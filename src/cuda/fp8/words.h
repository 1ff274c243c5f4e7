// How the engines of TMA see codes.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Codes (..., columns) as 16-bit words (..., columns / 2) of two codes each, because tensor maps
/// and k tiles count elements of 16 bits. The number of columns and all strides are even.
inline Tensor words_of(const Tensor& codes) {
  Tensor words = codes;
  words.dtype = DType::kBF16;
  words.shape[words.rank - 1] /= 2;
  for (int i = 0; i < words.rank - 1; ++i) words.stride[i] /= 2;
  return words;
}

}  // namespace sonicmoe::cuda
