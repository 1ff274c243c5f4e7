#include "cuda/portable/choices.h"

namespace sonicmoe::cuda::portable {
namespace {

/// The largest depth that fulfils two conditions: the code has kernels of this depth and of
/// `width`, and `ctas` of their CTAs fit into `shared` bytes of shared memory, where each CTA takes
/// `reserved` bytes more.
std::optional<Depth> largest_depth(int capability, Width width, int ctas, int shared,
                                   int reserved) {
  for (const Depth depth : {Depth::k64, Depth::k32}) {
    const TileShape shape{depth, width};
    const int needed = ctas * (shared_bytes(shape) + reserved);
    if (is_compiled(shape, capability) && needed <= shared) return depth;
  }
  return {};
}

}  // namespace

std::optional<Depth> depth_for(int capability, int shared) {
  return largest_depth(capability, Width::k256, 1, shared, 0);
}

std::optional<Depth> narrow_depth_for(int capability, int shared, int reserved) {
  return largest_depth(capability, Width::k128, ctas_each({Depth::k64, Width::k128}), shared,
                       reserved);
}

}  // namespace sonicmoe::cuda::portable
