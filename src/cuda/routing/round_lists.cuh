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

  __device__ void set(std::int64_t i, int t, int e) const {
    token[i * token_stride] = t;
    expert[i * expert_stride] = e;
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

/// How many of a thread's keys are set in each chunk, a byte each: at most 4, and 128 for a warp.
__device__ inline std::uint64_t chunk_counts(unsigned bits) {
  static_assert(Column::kStretchChunks == 8);
  std::uint64_t counts = 0;
#pragma unroll
  for (int c = 0; c < Column::kStretchChunks; c++) {
    counts |= static_cast<std::uint64_t>(__popc(bits >> 4 * c & 0xfu)) << 8 * c;
  }
  return counts;
}

/// Puts the tokens of a stretch whose bit is set in order.
class StretchOrder {
 public:
  static constexpr int kEntries = Column::kStretchChunks * kSelectThreads / 32;

  /// `bits` has 4 for each chunk of this thread. `warps` is shared memory, kEntries ints, that
  /// stays in use.
  __device__ StretchOrder(unsigned bits, int* warps) : bits_(bits), warps_(warps) {
    const int lane = threadIdx.x % 32;
    const std::uint64_t own = chunk_counts(bits);
    __syncthreads();  // the last user of `warps` is done
    std::uint64_t sum = own;
    for (int d = 1; d < 32; d *= 2) {
      const std::uint64_t below = __shfl_up_sync(kAllLanes, sum, d);
      if (lane >= d) sum += below;
    }
    before_ = sum - own;
    if (lane == 31) {
#pragma unroll
      for (int c = 0; c < Column::kStretchChunks; c++) warps[entry(c)] = byte_of(sum, c);
    }
    __syncthreads();
    const int mine = threadIdx.x < kEntries ? warps[threadIdx.x] : 0;
    const int before = block_prefix<kSelectThreads>(mine, &total_);
    if (threadIdx.x < kEntries) warps[threadIdx.x] = before;
    __syncthreads();
  }

  __device__ int total() const { return total_; }
  /// Calls body(i, place) for this thread's tokens: bit i, and how many come before it.
  template <class Body>
  __device__ void each(const Body& body) const {
    for (unsigned left = bits_; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int chunk = i / 4;
      const unsigned earlier = bits_ & ((1u << i) - 1) & 0xfu << 4 * chunk;
      body(i, warps_[entry(chunk)] + byte_of(before_, chunk) + __popc(earlier));
    }
  }

 private:
  static __device__ int byte_of(std::uint64_t counts, int chunk) {
    return static_cast<int>(counts >> 8 * chunk & 0xff);
  }
  static __device__ int entry(int chunk) {
    return chunk * (kSelectThreads / 32) + static_cast<int>(threadIdx.x / 32);
  }

  unsigned bits_;
  int* warps_;
  int total_ = 0;
  std::uint64_t before_ = 0;
};

/// Lists the kept tokens of the stretch that begins at `first`, in order. Returns how many; *equal
/// counts the ties met so far.
__device__ inline int list_kept(const Ranking& r, const Threshold& last, int first, int* equal,
                                std::uint16_t* list) {
  __shared__ int warps[StretchOrder::kEntries];
  const bool coarse = last.is_coarse();
  const auto token_of = [](int i) { return i / 4 * Column::kChunk + threadIdx.x * 4 + i % 4; };
  unsigned kept = 0;  // a bit for each of the 32 keys
  unsigned edge = 0;  // those that equal the cut
#pragma unroll
  for (int c = 0; c < Column::kStretchChunks; c++) {
    const uint4 four = r.column.read(first + c * Column::kChunk);
    const unsigned keys[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const unsigned bit = 1u << (4 * c + i);
      if (keys[i] > last.cut && keys[i] != Column::kNone) kept |= bit;
      if (keys[i] == last.cut) edge |= bit;
    }
  }
  if (coarse) {
    kept |= edge;
  } else {
    unsigned ties = 0;
    for (unsigned left = edge; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const unsigned low = low_key(r.p(first + static_cast<int>(token_of(i))));
      if (low > last.low) kept |= 1u << i;
      if (low == last.low) ties |= 1u << i;
    }
    if (last.ties == 0) {  // the same for the whole block
      kept |= ties;
    } else {
      const StretchOrder order(ties, warps);
      order.each([&](int i, int place) {
        if (*equal + place < last.take) kept |= 1u << i;
      });
      *equal += order.total();
    }
  }
  const StretchOrder order(kept, warps);
  order.each([&](int i, int place) { list[place] = static_cast<std::uint16_t>(token_of(i)); });
  __syncthreads();
  return order.total();
}

/// Shared memory of a block that stages a column and lists it.
inline std::size_t list_shared_bytes(std::int64_t tokens) {
  return Column::staged_bytes(tokens) + Column::kStretch * sizeof(std::uint16_t);
}

}  // namespace sonicmoe::cuda
