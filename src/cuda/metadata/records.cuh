// Writes the tile records, which products read, from the row range of every expert.
#pragma once

#include "cuda/metadata/block.cuh"
#include "cuda/metadata/metadata.h"
#include "cuda/ptx/dependent.cuh"

namespace sonicmoe::cuda {

/// Threads of a block that writes records; each expert needs one.
inline constexpr int kMetadataThreads = 1024;
inline constexpr int kMaxMetadataExperts = kMetadataThreads;

/// Counters of the products that follow; they must be zero before these are launched.
struct Counters {
  unsigned* words;
  std::int32_t count;

  /// Called by all blocks; block 0 sets the counters to zero.
  __device__ void clear() const {
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < count) words[threadIdx.x] = 0;
  }
};

__device__ inline int records_of(int rows) { return (rows + kRecordRows - 1) / kRecordRows; }

/// The rows of one expert.
struct RowRange {
  int begin;
  int rows;
};

/// Shared memory with an entry for every expert.
struct ExpertArrays {
  std::int32_t* first_record;
  std::int32_t* rows;
  std::int32_t* begin;
};

/// The index of an expert's first record, and the number of records of all experts.
struct RecordIndex {
  int first;
  int total;
};

/// The usual list: each expert has one range of rows.
struct ByExpert {
  static constexpr bool kHasRanges = true;
  __device__ int operator()(int e) const { return e; }
};
/// A list of several lists, one after the other: entry s * experts + e is expert e of list s. It
/// has only records.
struct ByList {
  static constexpr bool kHasRanges = false;
  int experts;
  __device__ int operator()(int entry) const { return entry % experts; }
};

/// Writes row ranges and tile records. All threads of all blocks call it; thread e passes the rows
/// and the record index of expert e (with ByList: of an entry).
template <class ExpertOf = ByExpert>
__device__ void write_records(const Metadata& out, int experts, RowRange own, RecordIndex index,
                              const ExpertArrays& all, const ExpertOf& expert_of = {}) {
  const int e = threadIdx.x;
  if (e < experts) {
    all.first_record[e] = index.first;
    all.rows[e] = own.rows;
    all.begin[e] = own.begin;
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    if (e == 0) *out.record_count = min(index.total, out.most_records);
    if (ExpertOf::kHasRanges && e < experts) {
      out.expert_begin[e] = own.begin;
      out.expert_rows[e] = own.rows;
    }
  }
  // Groups that overlap can need more records than there is memory for.
  const int last = min(index.total, out.most_records);
  for (int i = blockIdx.x * kMetadataThreads + threadIdx.x; i < last;
       i += gridDim.x * kMetadataThreads) {
    int low = 0;  // binary search: the last expert whose first record is at or before i
    for (int high = experts; high - low > 1;) {
      const int middle = (low + high) / 2;
      (all.first_record[middle] <= i ? low : high) = middle;
    }
    out.records[i] = {expert_of(low), all.begin[low], all.rows[low], all.first_record[low]};
  }
}

/// Computes the record indices by a prefix sum and calls write_records.
template <class ExpertOf>
__device__ void write_experts(const Metadata& out, int experts, RowRange own,
                              const ExpertArrays& all, const ExpertOf& expert_of) {
  RecordIndex index{};
  index.first = block_prefix<kMetadataThreads>(records_of(own.rows), &index.total);
  write_records(out, experts, own, index, all, expert_of);
}

/// The body of a kernel whose rows need no sort: waits for the previous kernel, clears the
/// counters, and writes row ranges and records; expert e has the rows range(e).
template <class Range, class ExpertOf = ByExpert>
__device__ void take_ranges(const Metadata& out, int experts, const Counters& counters,
                            const Range& range, const ExpertOf& expert_of = {}) {
  __shared__ std::int32_t first_record[kMaxMetadataExperts];
  __shared__ std::int32_t rows[kMaxMetadataExperts];
  __shared__ std::int32_t begin[kMaxMetadataExperts];
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  counters.clear();
  const int e = threadIdx.x;
  write_experts(out, experts, e < experts ? range(e) : RowRange{0, 0}, {first_record, rows, begin},
                expert_of);
}

}  // namespace sonicmoe::cuda
