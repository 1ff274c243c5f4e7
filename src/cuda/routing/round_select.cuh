// The best c of one expert's rank keys: radix selection over integers, so no order of events
// matters.
#pragma once

#include <cstdint>

#include "core/selection_key.h"
#include "cuda/routing/block.cuh"

namespace sonicmoe::cuda {

inline constexpr int kSelectThreads = 1024;

/// What an expert keeps: keys above `key`, and the first `take` tokens whose key equals it.
struct Threshold {
  std::uint32_t key;
  std::int32_t take;
  std::int32_t ties;  ///< 1: more tokens equal `key` than are taken
  std::int32_t rows;  ///< c
};

/// Rank keys of an expert, in global memory or staged in shared memory, where they are read many
/// times.
class Column {
 public:
  static constexpr int kChunk = kSelectThreads * 4;
  static constexpr int kStretchChunks = 8;  // what is put in order together
  static constexpr int kStretch = kChunk * kStretchChunks;
  /// Tokens of a column that fits shared memory beside a list of a stretch.
  static constexpr int kMostStaged = 34 * 1024;

  __device__ Column(const std::uint32_t* keys, int tokens) : keys_(keys), tokens_(tokens) {}

  /// Bytes of shared memory that stage() takes; 0 where the column does not fit.
  static std::size_t staged_bytes(std::int64_t tokens) {
    return tokens <= kMostStaged ? static_cast<std::size_t>(tokens + 3) / 4 * 16 : 0;
  }
  /// A copy in `room`, or the column itself where it does not fit.
  static __device__ Column stage(const std::uint32_t* keys, int tokens, std::uint32_t* room) {
    if (tokens > kMostStaged) return {keys, tokens};
#pragma unroll 8
    for (int at = static_cast<int>(threadIdx.x) * 4; at < tokens; at += kChunk) {
      *reinterpret_cast<uint4*>(room + at) = *reinterpret_cast<const uint4*>(keys + at);
    }
    __syncthreads();
    return {room, tokens};
  }

  /// Where shared memory goes on behind a staged column.
  __device__ std::uint32_t* end_of(std::uint32_t* room) const {
    return keys_ == room ? room + (tokens_ + 3) / 4 * 4 : room;
  }

  __device__ int tokens() const { return tokens_; }
  __device__ std::uint32_t key(int token) const { return keys_[token]; }

  /// This thread's four keys of the chunk that begins at `first`; keys past the last are kNone.
  __device__ uint4 read(int first) const {
    const int token = first + static_cast<int>(threadIdx.x) * 4;
    if (token >= tokens_) return {kNone, kNone, kNone, kNone};
    uint4 four = *reinterpret_cast<const uint4*>(keys_ + token);
    if (token + 1 >= tokens_) four.y = kNone;
    if (token + 2 >= tokens_) four.z = kNone;
    if (token + 3 >= tokens_) four.w = kNone;
    return four;
  }

  /// Calls body(key) for every token, in no order.
  template <class Body>
  __device__ void each(const Body& body) const {
#pragma unroll 4
    for (int first = 0; first < tokens_; first += kChunk) {
      const uint4 four = read(first);
      if (four.x != kNone) body(four.x);
      if (four.y != kNone) body(four.y);
      if (four.z != kNone) body(four.z);
      if (four.w != kNone) body(four.w);
    }
  }

  /// No rank key: p is at most 1.
  static constexpr std::uint32_t kNone = 0xffffffffu;

 private:
  const std::uint32_t* keys_;
  int tokens_;
};

/// Finds the m-th largest key (m >= 1) of one class (chosen or not). Shared memory: kBins counters.
class RadixSelect {
 public:
  static constexpr int kBins = 2048;

  __device__ RadixSelect(std::uint32_t class_bit, int m, std::uint32_t* bins)
      : class_bit_(class_bit), rank_(m), bins_(bins) {}

  /// 31 bits in three digits, the highest first.
  __device__ Threshold run(const Column& column) {
    digit<20, 11>(column);
    digit<10, 10>(column);
    digit<0, 10>(column);
    return {class_bit_ | prefix_, rank_, count_ > rank_ ? 1 : 0, 0};
  }

 private:
  template <int kShift, int kBits>
  __device__ void digit(const Column& column) {
    constexpr int kCount = 1 << kBits;
    constexpr int kPerThread = kCount / kSelectThreads;
    __shared__ int found[3];
    for (int b = threadIdx.x; b < kCount; b += kSelectThreads) bins_[b] = 0;
    __syncthreads();
    column.each([&](std::uint32_t k) {
      const bool mine = (k & key::kChosen) == class_bit_;
      const std::uint32_t bits = k & ~key::kChosen;
      // The first digit's shift is 31, so its prefix is 0 on both sides.
      if (mine && bits >> (kShift + kBits) == prefix_ >> (kShift + kBits)) {
        atomicAdd(&bins_[bits >> kShift & (kCount - 1)], 1u);
      }
    });
    __syncthreads();
    // Thread i counts from the top: bins kCount - 1 - i * kPerThread downwards.
    const int top = kCount - 1 - static_cast<int>(threadIdx.x) * kPerThread;
    int own = 0;
    for (int b = 0; b < kPerThread; b++) own += static_cast<int>(bins_[top - b]);
    int total = 0;
    int before = block_prefix<kSelectThreads>(own, &total);
    if (before < rank_ && rank_ <= before + own) {
      int b = top;
      while (before + static_cast<int>(bins_[b]) < rank_) before += static_cast<int>(bins_[b--]);
      found[0] = b;
      found[1] = rank_ - before;
      found[2] = static_cast<int>(bins_[b]);
    }
    __syncthreads();
    prefix_ |= static_cast<std::uint32_t>(found[0]) << kShift;
    rank_ = found[1];
    count_ = found[2];
    __syncthreads();
  }

  std::uint32_t class_bit_;
  std::uint32_t prefix_ = 0;
  int rank_;
  int count_ = 0;
  std::uint32_t* bins_;
};

/// The first c ranked of a column in which f are chosen.
__device__ inline Threshold select_rows(const Column& column, int c, int f, std::uint32_t* bins) {
  // No key lies between the bits of 1.0f, chosen or not, and these bounds.
  const Threshold keep_chosen = {key::kChosen - 1, 0, 0, 0};
  const Threshold keep_nothing = {Column::kNone - 1, 0, 0, 0};
  Threshold result = c == f ? keep_chosen : keep_nothing;
  if (c > f) {
    result = RadixSelect(0, c - f, bins).run(column);
  } else if (c < f && c > 0) {
    result = RadixSelect(key::kChosen, c, bins).run(column);
  }
  result.rows = c;
  return result;
}

}  // namespace sonicmoe::cuda
