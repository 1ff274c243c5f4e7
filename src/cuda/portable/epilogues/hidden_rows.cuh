// Reads H and writes H or dH in memory, for eight columns of A at a time, in the layouts of
// GateLayout.
#pragma once

#include "cuda/portable/epilogues/activation_words.cuh"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// Eight columns of H as 32 bytes in the order of memory: gates and ups, or both alternating.
struct HiddenQuads {
  uint4 first;
  uint4 second;  ///< zeros without a gate
};

/// Reads H for eight columns of A. `row` points to the beginning of the row; `column` is the first
/// column of A. Both loads use the same registers in all layouts. Otherwise ptxas would copy the
/// words, and the copies would wait for the loads.
__device__ __forceinline__ HiddenQuads read_hidden(const Activating& act, const std::uint8_t* row,
                                                   int column) {
  const bool interleaved = act.layout == GateLayout::kInterleaved;
  const std::uint8_t* first = row + column * (interleaved ? 2 : 1) * kElementBytes;
  HiddenQuads quads{};
  quads.first = *reinterpret_cast<const uint4*>(first);
  if (act.layout != GateLayout::kNone) {
    const int apart = interleaved ? 16 : act.width * kElementBytes;
    quads.second = *reinterpret_cast<const uint4*>(first + apart);
  }
  return quads;
}

__device__ __forceinline__ HiddenWords words_of(const Activating& act, const HiddenQuads& quads) {
  HiddenWords h;
  if (act.layout == GateLayout::kInterleaved) {
    h.set_quad(0, quads.first);
    h.set_quad(1, quads.second);
  } else {
    h.set_gates(quads.first);
    h.set_ups(quads.second);
  }
  return h;
}

__device__ __forceinline__ void store_hidden(const Activating& act, const HiddenWords& h,
                                             std::uint8_t* row, int column) {
  if (act.layout == GateLayout::kInterleaved) {
    auto* to = reinterpret_cast<uint4*>(row + column * 2 * kElementBytes);
    to[0] = h.quad(0);
    to[1] = h.quad(1);
    return;
  }
  *reinterpret_cast<uint4*>(row + column * kElementBytes) = quad_of(h.gate);
  if (act.layout == GateLayout::kConcatenated) {
    *reinterpret_cast<uint4*>(row + (act.width + column) * kElementBytes) = quad_of(h.up);
  }
}

}  // namespace sonicmoe::cuda::portable
