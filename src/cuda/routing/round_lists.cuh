// From a column of rank keys and its threshold to the sorted list of an expert's tokens.
#pragma once

#include "cuda/routing/launch.cuh"
#include "cuda/routing/round_select.cuh"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

/// The caller's lists.
struct PairsView {
  std::int32_t* token;
  std::int32_t* expert;
  float* weight;
  std::int64_t* offsets;
  std::int64_t token_stride;
  std::int64_t expert_stride;
  std::int64_t weight_stride;
  std::int64_t offsets_stride;
  std::int64_t capacity;

  __device__ void set(std::int64_t i, int t, int e, float w) const {
    token[i * token_stride] = t;
    expert[i * expert_stride] = e;
    weight[i * weight_stride] = w;
  }
};

inline PairsView view_of(const Pairs& pairs) {
  return {static_cast<std::int32_t*>(pairs.token.data),
          static_cast<std::int32_t*>(pairs.expert.data),
          static_cast<float*>(pairs.weight.data),
          static_cast<std::int64_t*>(pairs.offsets.data),
          pairs.token.stride[0],
          pairs.expert.stride[0],
          pairs.weight.stride[0],
          pairs.offsets.stride[0],
          pairs.token.shape[0]};
}

/// Counts of a thread's chunks, a byte each, at most 4 for the threads and 128 for a warp.
struct ChunkCounts {
  unsigned word[Column::kStretchChunks / 4];

  __device__ int of(int chunk) const { return word[chunk / 4] >> 8 * (chunk % 4) & 0xff; }
  __device__ void add(int chunk, bool one) { word[chunk / 4] += one ? 1u << 8 * (chunk % 4) : 0u; }
};

/// Puts the counted tokens of a stretch of the column in order. Afterwards place() is how many come
/// before this thread's first in a chunk.
class StretchOrder {
 public:
  static constexpr int kEntries = Column::kStretchChunks * kSelectThreads / 32;

  /// `warps` is shared memory, kEntries ints, that stays in use. *total receives the sum.
  __device__ StretchOrder(const ChunkCounts& own, int* warps, int* total) : warps_(warps) {
    const int lane = threadIdx.x % 32;
    __syncthreads();  // the last user of `warps` is done
#pragma unroll
    for (int w = 0; w < Column::kStretchChunks / 4; w++) {
      unsigned sum = own.word[w];
      for (int d = 1; d < 32; d *= 2) {
        const unsigned below = __shfl_up_sync(kAllLanes, sum, d);
        if (lane >= d) sum += below;
      }
      before_.word[w] = sum - own.word[w];
      if (lane == 31) {
#pragma unroll
        for (int i = 0; i < 4; i++) warps[entry(4 * w + i)] = static_cast<int>(sum >> 8 * i & 0xff);
      }
    }
    __syncthreads();
    const int mine = threadIdx.x < kEntries ? warps[threadIdx.x] : 0;
    const int before = block_prefix<kSelectThreads>(mine, total);
    if (threadIdx.x < kEntries) warps[threadIdx.x] = before;
    __syncthreads();
  }
  __device__ int place(int chunk) const { return warps_[entry(chunk)] + before_.of(chunk); }

 private:
  static __device__ int entry(int chunk) {
    return chunk * (kSelectThreads / 32) + static_cast<int>(threadIdx.x / 32);
  }

  int* warps_;
  ChunkCounts before_{};
};

/// Lists the kept tokens of a stretch in order; `get(c)` gives this thread's keys of chunk c.
/// Returns how many; *equal counts the ties met so far.
template <class Get>
__device__ int list_kept(const Threshold& last, const Get& get, int* equal, std::uint16_t* list) {
  __shared__ int tie_warps[StretchOrder::kEntries];
  __shared__ int kept_warps[StretchOrder::kEntries];
  const auto each_key = [&](const auto& body) {
#pragma unroll
    for (int c = 0; c < Column::kStretchChunks; c++) {
      const uint4 four = get(c);
      body(c, 0, four.x);
      body(c, 1, four.y);
      body(c, 2, four.z);
      body(c, 3, four.w);
    }
  };
  unsigned kept = 0;  // a bit for each of the 32 keys
  ChunkCounts count{};
  const auto keep = [&](int c, int i) {
    kept |= 1u << (4 * c + i);
    count.add(c, true);
  };
  if (last.ties == 0) {  // the same for the whole block
    const std::uint32_t bound = last.take > 0 ? last.key : last.key + 1;
    each_key([&](int c, int i, std::uint32_t k) {
      if (k >= bound && k != Column::kNone) keep(c, i);
    });
  } else {
    ChunkCounts ties{};
    each_key([&](int c, int, std::uint32_t k) { ties.add(c, k == last.key); });
    int met = 0;
    const StretchOrder order(ties, tie_warps, &met);
    ChunkCounts seen{};
    each_key([&](int c, int i, std::uint32_t k) {
      const bool tie = k == last.key && *equal + order.place(c) + seen.of(c) < last.take;
      if ((k > last.key && k != Column::kNone) || tie) keep(c, i);
      seen.add(c, k == last.key);
    });
    *equal += met;
  }
  int total = 0;
  const StretchOrder order(count, kept_warps, &total);
#pragma unroll
  for (int c = 0; c < Column::kStretchChunks; c++) {
    int place = order.place(c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if ((kept >> (4 * c + i) & 1) == 0) continue;
      list[place++] = static_cast<std::uint16_t>(c * Column::kChunk + threadIdx.x * 4 + i);
    }
  }
  __syncthreads();
  return total;
}

/// Shared memory of a block that stages a column and lists it.
inline std::size_t list_shared_bytes(std::int64_t tokens) {
  return Column::staged_bytes(tokens) + Column::kStretch * sizeof(std::uint16_t);
}

}  // namespace sonicmoe::cuda
