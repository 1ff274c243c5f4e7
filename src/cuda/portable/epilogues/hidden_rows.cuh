// Reads H and writes H or dH in memory, for eight columns of A at a time, in the layouts of Gates.
#pragma once

#include "cuda/portable/epilogues/activation_words.cuh"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// `row` points to the beginning of the row; `column` is a column of A.
__device__ __forceinline__ HiddenWords read_hidden(const Activating& act, const std::uint8_t* row,
                                                   int column) {
  HiddenWords h{};
  if (act.gates == Gates::kInterleaved) {
    const auto* from = reinterpret_cast<const uint4*>(row + column * 2 * kElementBytes);
    h.set_quad(0, from[0]);
    h.set_quad(1, from[1]);
    return h;
  }
  h.set_gates(*reinterpret_cast<const uint4*>(row + column * kElementBytes));
  if (act.gates == Gates::kSplit) {
    h.set_ups(*reinterpret_cast<const uint4*>(row + (act.width + column) * kElementBytes));
  }
  return h;
}

__device__ __forceinline__ void store_hidden(const Activating& act, const HiddenWords& h,
                                             std::uint8_t* row, int column) {
  if (act.gates == Gates::kInterleaved) {
    auto* to = reinterpret_cast<uint4*>(row + column * 2 * kElementBytes);
    to[0] = h.quad(0);
    to[1] = h.quad(1);
    return;
  }
  *reinterpret_cast<uint4*>(row + column * kElementBytes) = quad_of(h.gate);
  if (act.gates == Gates::kSplit) {
    *reinterpret_cast<uint4*>(row + (act.width + column) * kElementBytes) = quad_of(h.up);
  }
}

}  // namespace sonicmoe::cuda::portable
