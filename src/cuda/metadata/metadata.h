// Routing metadata on the device: which rows an expert has, which token a row is, which rows a
// token has, and the tile list. Deterministic, without host synchronisation.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/metadata/tile_record.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// Pointers into saved memory (or into scratch, at inference). A slot is an entry of the caller's
/// routing: t*K + k for ids, the index in the list for pairs, the row for grouped. A position is an
/// index into the lists by token: the slot for ids, token_offsets[t] + i for the i-th pair of token
/// t in order of (expert, slot), the row for grouped.
struct Metadata {
  std::int32_t* row_token;      ///< (C) token of a row; unset past the last row
  std::int32_t* row_slot;       ///< (C) slot of a row
  std::int32_t* position_row;   ///< (C) row of a position, -1 where the slot is empty
  std::int32_t* position_slot;  ///< (C) kPairs: slot of a position; else null (the position)
  std::int32_t* token_offsets;  ///< (T+1) kPairs: first position of a token; else null (t*K)
  std::int32_t* expert_begin;   ///< (E)
  std::int32_t* expert_rows;    ///< (E)
  TileRecord* records;          ///< (most_records)
  std::int32_t* record_count;   ///< (1)
  std::int32_t most_records;    ///< C / kRecordRows + E
  std::int64_t bytes;           ///< of all of them
};

/// Lays the arrays out from `base` (which may be null, to learn the size).
Metadata metadata_layout(const Problem& problem, void* base);

/// Bytes of scratch that build_metadata needs.
std::int64_t metadata_scratch(const Problem& problem);

/// Dynamic shared memory of the kernel that sorts by expert.
std::size_t sort_shared_bytes(const Problem& problem);

/// Device memory that build_metadata may use beside its result.
struct MetadataWork {
  void* scratch;                   ///< metadata_scratch() bytes
  unsigned* counters = nullptr;    ///< zeroed, for the products that follow
  std::int32_t counter_words = 0;  ///< at most 1024
};

/// Fills `metadata` from the routing. On sm_90 and later its launches overlap, and the launch after
/// them may (programmatic dependent launch): each kernel waits for the one before itself.
void build_metadata(const Device& device, const Problem& problem, const Routing& routing,
                    const Metadata& metadata, const MetadataWork& work, cudaStream_t stream);

}  // namespace sonicmoe::cuda
