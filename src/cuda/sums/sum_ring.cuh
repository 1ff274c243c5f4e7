// Sums of rows through rings in shared memory, for sm_90 and later. Every warp has its own ring:
// bulk copies load the rows of its next batches while it sums the current one. So a multiprocessor
// has 200 KB in flight, and the rate does not depend on the clock. Row numbers are loaded one batch
// before the rows.
#pragma once

#include <algorithm>

#include "cuda/ptx/address.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sm90.cuh"
#include "cuda/sums/rank_sums.cuh"
#include "cuda/sums/sum_args.cuh"

namespace sonicmoe::cuda {

/// The columns of a token are divided into parts. A warp sums one part at a time, in batches of
/// rows.
struct RingArgs {
  SumArgs sum;
  std::int32_t width;  ///< chunks of 16 bytes in a part; the last part of a token may have fewer
  std::int32_t parts;  ///< of a token
  std::int32_t depth;  ///< batches in a ring, at least 2
  /// A warp's next part is `step_tokens` tokens and `step_parts` parts after its current one.
  std::int32_t step_tokens;
  std::int32_t step_parts;
};

struct SumRing {
  static constexpr int kWarps = 4;   // of a block
  static constexpr int kBlocks = 3;  // on a multiprocessor
  static constexpr int kRows = 4;    // of a batch
  static constexpr int kPieces = 4;  // chunks of a part that a lane sums, 32 apart
  static constexpr int kMostWidth = 32 * kPieces;
  static constexpr int kMostDepth = 8;
  static constexpr int kSharedBytes = 227 * 1024 / kBlocks - 1024;
  // Each batch also has an info block: at offset 0 its mbarrier, then a header (a bit for each row
  // that it has, and kLast if it is the last batch of the part), then the rows' weights.
  static constexpr int kHeader = 8;
  static constexpr int kWeights = 16;
  static constexpr int kBatchInfoBytes = kWeights + kRows * 4;
  static constexpr std::uint32_t kLast = 1u << 31;

  static constexpr int batch_bytes(int width) { return kRows * width * 16 + kBatchInfoBytes; }

  /// Iterates over the parts of a warp, in the order (token, part).
  struct Walk {
    std::int64_t token;
    std::int32_t part;

    __device__ __forceinline__ explicit Walk(const RingArgs& a) {
      const int warp = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5);
      token = warp / a.parts;
      part = warp % a.parts;
    }
    __device__ __forceinline__ void next(const RingArgs& a) {
      token += a.step_tokens;
      part += a.step_parts;
      if (part >= a.parts) {
        part -= a.parts;
        token++;
      }
    }
    __device__ __forceinline__ int chunks(const RingArgs& a) const {
      return min(a.width, a.sum.chunks - part * a.width);
    }
    /// The offset in (T, d) of chunk lane + 32 c of the part.
    __device__ __forceinline__ std::int64_t byte(const RingArgs& a, int c) const {
      const int chunk = part * a.width + static_cast<int>(threadIdx.x & 31) + 32 * c;
      return (token * a.sum.chunks + chunk) * 16;
    }
  };

  /// Shared addresses of this warp's ring.
  struct WarpRing {
    std::uint32_t rows;
    std::uint32_t infos;

    __device__ __forceinline__ WarpRing(const RingArgs& a, std::uint32_t base) {
      const int warp = threadIdx.x >> 5;
      const int bytes = a.depth * (batch_bytes(a.width) - kBatchInfoBytes);
      rows = base + warp * bytes;
      infos = base + kWarps * bytes + warp * a.depth * kBatchInfoBytes;
    }
    __device__ __forceinline__ std::uint32_t row(const RingArgs& a, int stage, int i) const {
      return rows + (stage * kRows + i) * a.width * 16;
    }
    __device__ __forceinline__ std::uint32_t info(int stage) const {
      return infos + stage * kBatchInfoBytes;
    }
    __device__ __forceinline__ ptx::Mbarrier full(int stage) const {
      return ptx::Mbarrier(info(stage));
    }
  };

  /// The loads of a warp. Lane i loads the number of row i of a batch one batch before the row, and
  /// the row's weight at the same time as the row. It stores the weight to the ring one batch
  /// later, when the weight has arrived.
  class Loads {
   public:
    __device__ __forceinline__ Loads(const RingArgs& a, const WarpRing& ring)
        : a_(a), ring_(ring), at_(a), after_(at_) {
      begin_ = bounds(at_.token, count_);
      after_.next(a_);
      after_begin_ = bounds(after_.token, after_count_);
      look_up();
    }

    __device__ __forceinline__ void load(int stage) {
      const SumArgs& s = a_.sum;
      if (weight_address_ != 0 && lane() < kRows) ptx::store_float(weight_address_, weight_);
      weight_address_ = 0;
      if (at_.token >= s.tokens) return;
      const std::uint32_t rows = __ballot_sync(~0u, row_ >= 0);
      const bool last = k_ + kRows >= count_;
      const int bytes = at_.chunks(a_) * 16;
      if (lane() == 0) {
        ptx::store_word(ring_.info(stage) + kHeader, rows | (last ? kLast : 0));
        ring_.full(stage).arrive_expecting(__popc(rows) * bytes);
      }
      __syncwarp();
      if (row_ >= 0) {
        const std::int64_t chunk = static_cast<std::int64_t>(row_) * s.chunks + at_.part * a_.width;
        ptx::bulk_load(ring_.row(a_, stage, lane()), static_cast<const uint4*>(s.rows) + chunk,
                       bytes, ring_.full(stage));
        if (s.weights.data != nullptr) {
          weight_ = __ldg(static_cast<const float*>(s.weights.data) + weight_offset_);
        }
      }
      weight_address_ = ring_.info(stage) + kWeights + lane() * 4;
      k_ += kRows;
      if (last) next_part();
      look_up();
    }

   private:
    static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }

    __device__ __forceinline__ std::int64_t bounds(std::int64_t token, int& count) const {
      const SumArgs& s = a_.sum;
      count = s.top_k;
      if (s.token_offsets == nullptr || token >= s.tokens) return token * s.top_k;
      const std::int64_t begin = s.token_offsets[token];
      count = static_cast<int>(s.token_offsets[token + 1] - begin);
      return begin;
    }

    __device__ __forceinline__ void next_part() {
      k_ = 0;
      at_ = after_;
      begin_ = after_begin_;
      count_ = after_count_;
      after_.next(a_);
      after_begin_ = bounds(after_.token, after_count_);
    }

    __device__ __forceinline__ void look_up() {
      const SumArgs& s = a_.sum;
      const int k = k_ + lane();
      row_ = -1;
      if (at_.token >= s.tokens || lane() >= kRows || k >= count_) return;
      row_ = __ldg(s.position_row + begin_ + k);
      if (s.token_offsets == nullptr) {
        weight_offset_ = s.weights.offset(at_.token, k);
      } else {
        const std::int64_t slot =
            s.position_slot != nullptr ? __ldg(s.position_slot + begin_ + k) : begin_ + k;
        weight_offset_ = slot * s.weights.column;
      }
    }

    const RingArgs& a_;
    const WarpRing& ring_;
    Walk at_;             // part of the batch that is loaded next
    Walk after_;          // the part after it
    std::int64_t begin_;  // first position of the part's token
    std::int64_t after_begin_;
    int count_;  // positions of the part's token
    int after_count_;
    int k_ = 0;    // first position of the batch, in the token
    int row_ = 0;  // of this lane
    std::int64_t weight_offset_ = 0;
    float weight_ = 1.0f;
    std::uint32_t weight_address_ = 0;  // 0: no weight to store
  };

  /// The partial sums of the first other rank. They are loaded before the rows of the part are
  /// summed. The mask of the ranks that have a partial sum is loaded one part before.
  template <class Result>
  class OfOthers {
   public:
    struct Part {
      typename Result::Ranks ranks;
      bool fault;
      typename Result::template Others<uint4> chunk[kPieces];
    };

    __device__ __forceinline__ OfOthers(const RingArgs& a, const Result& result)
        : at_(a), ranks_(find(a, result)) {}
    /// The chunks of the warp's next part, which has a token.
    __device__ __forceinline__ Part take(const RingArgs& a, const Result& result) {
      const int chunks = at_.chunks(a);
      Part part{ranks_, result.fault(), {}};
#pragma unroll
      for (int c = 0; c < kPieces; c++) {
        if (static_cast<int>(threadIdx.x & 31) + 32 * c < chunks) {
          part.chunk[c] = result.template load<uint4>(ranks_, at_.byte(a, c));
        }
      }
      at_.next(a);
      ranks_ = find(a, result);
      return part;
    }

   private:
    __device__ __forceinline__ typename Result::Ranks find(const RingArgs& a,
                                                           const Result& result) const {
      return at_.token < a.sum.tokens ? result.ranks_of(at_.token) : typename Result::Ranks{};
    }

    Walk at_;  // the part whose ranks are known
    typename Result::Ranks ranks_;
  };

  /// Adds the rows of a batch.
  template <class Element>
  static __device__ __forceinline__ void add(float (&sum)[kPieces][8], const RingArgs& a,
                                             const WarpRing& ring, int stage, int chunks,
                                             std::uint32_t rows) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      if ((rows >> i & 1) == 0) continue;
      const float weight = ptx::load_float(ring.info(stage) + kWeights + i * 4);
      const std::uint32_t from = ring.row(a, stage, i) + lane * 16;
      uint4 value[kPieces];
#pragma unroll
      for (int c = 0; c < kPieces; c++) {
        if (lane + 32 * c < chunks) value[c] = ptx::load_shared16(from + c * 512);
      }
#pragma unroll
      for (int c = 0; c < kPieces; c++) {
        if (lane + 32 * c < chunks) accumulate<Element>(sum[c], value[c], weight);
      }
    }
  }
};
static_assert(2 * SumRing::kWarps * SumRing::batch_bytes(SumRing::kMostWidth) <=
              SumRing::kSharedBytes);

/// Each warp sums its parts one after the other, from its ring.
template <class Result>
__device__ __forceinline__ void sum_from_ring(const RingArgs& a, const Result& result) {
  extern __shared__ __align__(128) std::uint8_t shared[];
  const SumArgs& s = a.sum;
  const int lane = threadIdx.x & 31;
  const SumRing::WarpRing ring(a, ptx::shared_address(shared));
  if (lane < a.depth) ring.full(lane).init(1);
  ptx::fence_barrier_init();
  ptx::fence_async_shared();
  __syncwarp();
  ptx::wait_for_previous_kernel();
  SumRing::Loads loads(a, ring);
  for (int stage = 0; stage < a.depth; stage++) loads.load(stage);
  int stage = 0;
  std::uint32_t parity = 0;
  SumRing::OfOthers<Result> ahead(a, result);
  for (SumRing::Walk at(a); at.token < s.tokens; at.next(a)) {
    const int chunks = at.chunks(a);
    const auto others = ahead.take(a, result);
    auto further = result.template further<uint4, SumRing::kPieces>(others.ranks);
#pragma unroll
    for (int c = 0; c < SumRing::kPieces; c++) {
      if (lane + 32 * c < chunks) result.load(further, c, at.byte(a, c));
    }
    float sum[SumRing::kPieces][8] = {};
    std::uint32_t header = 0;
    while ((header & SumRing::kLast) == 0) {
      ring.full(stage).wait(parity);
      __syncwarp();
      header = ptx::load_word(ring.info(stage) + SumRing::kHeader);
      if (s.is_fp16 != 0) {
        SumRing::add<__half>(sum, a, ring, stage, chunks, header);
      } else {
        SumRing::add<__nv_bfloat16>(sum, a, ring, stage, chunks, header);
      }
      __syncwarp();
      loads.load(stage);
      if (++stage == a.depth) {
        stage = 0;
        parity ^= 1;
      }
    }
    auto* out =
        reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(s.out) + at.token * s.out_stride) +
        at.part * a.width + lane;
#pragma unroll
    for (int c = 0; c < SumRing::kPieces; c++) {
      if (lane + 32 * c >= chunks) continue;
      const uint4 own = rounded(s, sum[c]);
      const std::int64_t byte = at.byte(a, c);
      const uint4 total =
          s.is_fp16 != 0
              ? result.template add<__half>(others.chunk[c], others.ranks, byte, own, further, c)
              : result.template add<__nv_bfloat16>(others.chunk[c], others.ranks, byte, own,
                                                   further, c);
      out[32 * c] = others.fault ? nan_chunk<uint4>() : total;
    }
  }
}

template <class Result>
__global__ void __launch_bounds__(SumRing::kWarps * 32, SumRing::kBlocks)
    sum_rows_ring_kernel(const __grid_constant__ RingArgs a, const Result result) {
  if constexpr (ptx::kHasSm90) {
    sum_from_ring(a, result);
  } else {
    __trap();  // sum_rows launches sum_rows_few_kernel there
  }
}

/// The launch's grid and arguments on `multiprocessors`.
struct RingLaunch {
  RingArgs args{};
  unsigned blocks = 0;
  int shared_bytes = 0;

  RingLaunch(const SumArgs& sum, int multiprocessors) {
    const std::int64_t most = std::int64_t{multiprocessors} * SumRing::kBlocks;
    const auto across = [&](int parts) { return (sum.chunks + parts - 1) / parts; };
    int parts = across(SumRing::kMostWidth);
    // With few tokens, narrower parts keep every warp busy.
    while (sum.tokens * parts * 2 <= most * SumRing::kWarps && across(parts) > 32) parts *= 2;
    args.sum = sum;
    args.width = across(parts);
    args.parts = across(args.width);
    const int batch = SumRing::kWarps * SumRing::batch_bytes(args.width);
    args.depth = std::min(SumRing::kSharedBytes / batch, SumRing::kMostDepth);
    shared_bytes = args.depth * batch;
    const std::int64_t needed = (sum.tokens * args.parts + SumRing::kWarps - 1) / SumRing::kWarps;
    blocks = static_cast<unsigned>(std::min(needed, most));
    const int stride = static_cast<int>(blocks) * SumRing::kWarps;
    args.step_tokens = stride / args.parts;
    args.step_parts = stride % args.parts;
  }
};

}  // namespace sonicmoe::cuda
