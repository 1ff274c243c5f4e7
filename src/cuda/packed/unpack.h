// Unpacking of packed weights on the GPU: all experts, or those of a range.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "cuda/metadata/metadata.h"
#include "sonicmoe/packed.h"

namespace sonicmoe::cuda {

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec);

struct ExpertRange {
  std::int64_t first;
  std::int64_t count;
};

/// Memory for the unpacked weights of the experts of a range, at a multiple of 16 bytes.
struct UnpackedExperts {
  void* data;
  DType dtype;
};
void unpack_experts(const Device& device, const PackedWeights& packed, const ExpertRange& range,
                    const UnpackedExperts& out, cudaStream_t stream);

/// The tile records of the experts of a range, whose numbers count from its first one.
struct RangeLists {
  TileRecord* records;  ///< room for Metadata::most_records
  std::int32_t* record_count;
};
/// Fills `out` from the records of all experts, and sets `counter` to zero unless it is null.
void take_records(const Metadata& all, const ExpertRange& range, const RangeLists& out,
                  unsigned* counter, cudaStream_t stream);

}  // namespace sonicmoe::cuda
