// Routing metadata on the device: the rows of each expert, the token of each row, the rows of each
// token, and the tile records. It has the same bits in every run and needs no host synchronisation.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/metadata/tile_record.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// Pointers into saved memory (at inference into scratch). A slot is the index of an entry of the
/// caller's routing, a position an index into the lists by token:
///
///   | routing form | slot              | position                                            |
///   | ids          | t*K + k           | the slot                                            |
///   | pairs        | index in the list | token_offsets[t] + i for pair i of token t, ordered |
///   |              |                   | by (expert, slot)                                   |
///   | grouped      | the row           | the row                                             |
struct Metadata {
  std::int32_t* row_token;      ///< (C) token of a row; unset if the row has no expert
  std::int32_t* row_slot;       ///< (C) slot of a row; unset as row_token
  std::int32_t* position_row;   ///< (C) row of a position, -1 if it has none
  std::int32_t* position_slot;  ///< (C) slot of a position; null: the position itself
  std::int32_t* token_offsets;  ///< (T+1) first position of a token; for pairs only, else null
  std::int32_t* expert_begin;   ///< (E)
  std::int32_t* expert_rows;    ///< (E)
  TileRecord* records;          ///< (most_records)
  std::int32_t* record_count;   ///< (1)
  std::int32_t most_records;    ///< C / kRecordRows + E
  std::int64_t bytes;           ///< of all arrays
};

/// Places the arrays from `base` on. With a null `base` only `bytes` is valid.
Metadata metadata_layout(const Problem& problem, void* base);

/// Bytes of scratch that build_metadata needs.
std::int64_t metadata_scratch(const Problem& problem);

/// Dynamic shared memory of the kernel that sorts by expert.
std::size_t sort_shared_bytes(const Problem& problem);

/// Device memory that build_metadata uses besides its result.
struct MetadataWork {
  void* scratch;                   ///< metadata_scratch() bytes
  unsigned* counters = nullptr;    ///< set to zero for the products that follow
  std::int32_t counter_words = 0;  ///< at most 1024
};

/// Fills `metadata` from the routing. On sm_90 and later its launches overlap (programmatic
/// dependent launch): each kernel itself waits for the previous one. The launch that follows may
/// overlap too.
void build_metadata(const Device& device, const Problem& problem, const Routing& routing,
                    const Metadata& metadata, const MetadataWork& work, cudaStream_t stream);

}  // namespace sonicmoe::cuda
