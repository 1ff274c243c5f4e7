// Rounds accumulators to 16-bit elements, two in a word. The accumulators of wgmma and of mma.sync
// m16n8 have the same layout, so every engine can call these functions.
//
// A lane holds four accumulators of 16 rows by 8 columns, which become two words:
//
//            columns 2 (lane % 4) and the next one
//   row lane / 4        acc[0]  acc[1]   ->  words[0]
//   row lane / 4 + 8    acc[2]  acc[3]   ->  words[1]
#pragma once

#include <cstdint>

#include "cuda/math/element.cuh"

namespace sonicmoe::cuda {

/// A lane's words of 16 rows by 64 columns of rounded results: words 2i and 2i + 1 are the lane's
/// two words of columns 8i .. 8i + 7.
using Fragment = std::uint32_t[16];

template <class Element>
__device__ __forceinline__ void round_words(std::uint32_t* words, const float* acc) {
  words[0] = Pair<Element>::pack(acc[0], acc[1]);
  words[1] = Pair<Element>::pack(acc[2], acc[3]);
}

/// Adds the bias of the lane's two columns (a packed pair), then rounds.
template <class Element>
__device__ __forceinline__ void round_words(std::uint32_t* words, const float* acc,
                                            std::uint32_t bias) {
  const float low = Pair<Element>::low(bias);
  const float high = Pair<Element>::high(bias);
  words[0] = Pair<Element>::pack(acc[0] + low, acc[1] + high);
  words[1] = Pair<Element>::pack(acc[2] + low, acc[3] + high);
}

/// Adds the bias, multiplies each of the two rows by its scale, then rounds.
template <class Element>
__device__ __forceinline__ void round_words(std::uint32_t* words, const float* acc,
                                            std::uint32_t bias, float first_scale,
                                            float second_scale) {
  const float low = Pair<Element>::low(bias);
  const float high = Pair<Element>::high(bias);
  words[0] = Pair<Element>::pack((acc[0] + low) * first_scale, (acc[1] + high) * first_scale);
  words[1] = Pair<Element>::pack((acc[2] + low) * second_scale, (acc[3] + high) * second_scale);
}

}  // namespace sonicmoe::cuda
