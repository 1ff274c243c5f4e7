// Every choice of the engine and its thresholds, with the reasons. shape.h has the tiles.
// `sonicmoe info --json` shows the thresholds (kChoices).
#pragma once

#include <optional>

#include "core/backend_table.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

inline constexpr EngineChoice kChoices[] = {
    {"narrow columns", static_cast<int>(Width::k128),
     "dH of at most so many columns takes the tile 128 x 128 where two of its CTAs fit: half of a "
     "wide tile would be computed in vain"},
    {"wide shared bytes", shared_bytes({Depth::k64, Width::k256}),
     "a CTA with so much shared memory has stages of depth 64, else of 32"},
    {"narrow shared bytes", 2 * shared_bytes({Depth::k64, Width::k128}),
     "a multiprocessor with so much shared memory, and two reserved parts, has narrow tiles of "
     "depth 64"},
};

/// The largest depth for which the code for a compute capability has kernels and whose shared
/// memory fits into `shared` bytes; none if there is no such depth.
std::optional<Depth> depth_for(int capability, int shared);
/// The same for narrow tiles, two of whose CTAs must fit into the `shared` bytes of a
/// multiprocessor; a CTA also takes `reserved` bytes.
std::optional<Depth> narrow_depth_for(int capability, int shared, int reserved);

/// Whether dH with so many columns takes the narrow tile if the device has it. Plain products with
/// long rows would be 10 % slower in it (H200, hot).
constexpr bool is_narrow(std::int64_t columns) { return columns <= static_cast<int>(Width::k128); }

}  // namespace sonicmoe::cuda::portable
