// How many rows an expert keeps under each rounding mode. Integers only; host and device compile
// the same source, so that both round alike.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "core/selection_key.h"
#include "sonicmoe/routing.h"

namespace sonicmoe {

/// An expert's top-K count f and the two counts it may be rounded to.
struct RoundBounds {
  std::int64_t f = 0;
  std::int64_t lo = 0;
  std::int64_t hi = 0;
};

SONICMOE_HD RoundBounds round_bounds(std::int64_t f, std::int64_t tile, std::int64_t tokens) {
  const std::int64_t lo = f / tile * tile;
  if (lo == f) return {f, f, f};
  // min(lo + tile, tokens), without an overflow for a huge tile.
  return {f, lo, tile < tokens - lo ? lo + tile : tokens};
}

/// The closer of lo and hi; a tie goes to the even multiple of the tile.
SONICMOE_HD std::int64_t nearest_count(const RoundBounds& b, std::int64_t tile) {
  const std::int64_t down = b.f - b.lo;
  const std::int64_t up = b.hi - b.f;
  if (down != up) return down < up ? b.lo : b.hi;
  return b.lo / tile % 2 == 0 ? b.lo : b.hi;
}

/// hi with probability (f - lo)/(hi - lo), decided by 32 random bits.
SONICMOE_HD std::int64_t stochastic_count(const RoundBounds& b, std::uint32_t draw) {
  const auto gap = static_cast<std::uint64_t>(b.hi - b.lo);
  const auto part = static_cast<std::uint64_t>(b.f - b.lo);
  return draw * gap < part << 32 ? b.hi : b.lo;
}

/// hi iff the mass it gains is less than the mass that lo loses.
SONICMOE_HD std::int64_t score_count(const RoundBounds& b, std::uint64_t gained,
                                     std::uint64_t lost) {
  return gained < lost ? b.hi : b.lo;
}

/// Balanced rounding changes an expert's count by -down (to lo) or by up (to hi). `running` is the
/// sum of the changes of the experts before this one. Returns the change for which |running +
/// change| is smaller; on a tie `nearest`, the change to nearest_count().
template <class Int>
SONICMOE_HD Int balanced_change(Int down, Int up, Int nearest, Int running) {
  const Int middle = 2 * running + up - down;  // negative: |running + up| < |running - down|
  const Int closer = middle < 0 ? up : -down;
  return middle == 0 ? nearest : closer;
}

SONICMOE_HD std::int64_t balanced_count(const RoundBounds& b, std::int64_t tile,
                                        std::int64_t running) {
  return b.f + balanced_change(b.f - b.lo, b.hi - b.f, nearest_count(b, tile) - b.f, running);
}

}  // namespace sonicmoe
