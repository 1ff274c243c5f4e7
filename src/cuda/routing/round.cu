// Token rounding on CUDA, three kernels: rank (top-K of every token, rank keys as columns by
// expert), select (how many rows an expert keeps, and the last of them), write (the sorted lists).
#include <algorithm>

#include "core/round_rule.h"
#include "cuda/launch.h"
#include "cuda/ptx/barrier.cuh"
#include "cuda/routing/block.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/round_keys.cuh"
#include "cuda/routing/round_lists.cuh"
#include "cuda/routing/round_select.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

/// The caller's scratch.
struct RoundScratch {
  std::uint32_t* keys;    // (E, key_stride)
  std::int32_t* ids;      // (T, K)
  float* weights;         // (T, K)
  std::int32_t* counts;   // (E) f
  Threshold* thresholds;  // (E)
  std::int64_t key_stride;
  std::int64_t bytes;
};

RoundScratch scratch_at(void* base, std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
  std::int64_t used = 0;
  const auto take = [&](std::int64_t bytes) {
    void* at = static_cast<char*>(base) + used;
    used += (bytes + 255) / 256 * 256;
    return at;
  };
  RoundScratch s{};
  s.key_stride = key_stride_of(tokens);
  s.keys = static_cast<std::uint32_t*>(take(experts * s.key_stride * 4));
  s.ids = static_cast<std::int32_t*>(take(tokens * top_k * 4));
  s.weights = static_cast<float*>(take(tokens * top_k * 4));
  s.counts = static_cast<std::int32_t*>(take(experts * 4));
  s.thresholds = static_cast<Threshold*>(take(experts * std::int64_t{sizeof(Threshold)}));
  s.bytes = used;
  return s;
}

template <class R>
std::size_t rank_shared(const RouteParams& p) {
  const int groups = R::group_words(p.n_group) * (kRankThreads / R::kLanes);
  return static_cast<std::size_t>(kRankTokens * tile_stride(R::kLanes * R::kValues) + groups) * 4 +
         static_cast<std::size_t>(p.experts) * 4;
}

/// A warp's rows from `first` on: their routes, and their keys as rows of the tile.
template <class R, class Item>
__device__ void rank_rows(const RouteParams& p, const RoundScratch& s, std::int64_t first,
                          std::uint32_t* tile, std::uint32_t* groups, std::int32_t* seen) {
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  Softmax all{};
  Item mine = 0;
#pragma unroll 1
  for (int pass = 0; pass < R::kPasses; pass++) {
    const std::int64_t token = min(first + R::read_row(pass), p.tokens - 1);
    Softmax own{};
    read_row<R>(p, token, groups, pass, &mine, [&](const auto& row) {
      float probability[R::kValues];
      row().probabilities(p, probability, &own);
      store_keys<R>(probability, tile + R::read_row(pass) * kStride);
    });
    if (R::in_pass(pass)) all = own;
  }
  __syncwarp();
  const std::int64_t row = first + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  const int id = item_expert(mine);
  const float raw = R::raw_score(p, all, id, R::reload(p, token, id));
  const float weight = R::weigh(p, id, raw);
  if (R::slot() >= p.top_k || row >= p.tokens) return;
  s.ids[token * p.top_k + R::slot()] = id;
  s.weights[token * p.top_k + R::slot()] = weight;
  if (id < 0) return;
  tile[R::slot_row() * kStride + id] |= key::kChosen;
  atomicAdd(&seen[id], 1);
}

template <class R, class Item>
__global__ void __launch_bounds__(kRankThreads, R::kValues == 8 ? 3 : 1)
    rank_tokens(RouteParams p, RoundScratch s) {
  extern __shared__ __align__(16) std::uint32_t tile[];
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  std::uint32_t* groups = tile + kRankTokens * kStride;
  auto* seen = reinterpret_cast<std::int32_t*>(groups + kRankThreads / R::kLanes *
                                                            R::group_words(p.n_group));
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) seen[e] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRankTokens;
#pragma unroll 1
  for (int i = threadIdx.x / 32 * R::kRowsPerWarp; i < kRankTokens;
       i += rows_of_block<R>(kRankThreads)) {
    rank_rows<R, Item>(p, s, first + i, tile + i * kStride,
                       groups + threadIdx.x / R::kLanes * R::group_words(p.n_group), seen);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) {
    if (seen[e] != 0) atomicAdd(&s.counts[e], seen[e]);
  }
  write_columns(p, tile, kStride, {s.keys, s.key_stride}, first);
}

/// What the kernels by expert need to know.
struct RoundParams {
  std::int64_t tile;
  std::uint64_t seed;
  std::int32_t tokens;
  std::int32_t experts;
  std::int32_t top_k;
  RoundingMode mode;
  float scale;
};

/// Rows that every expert keeps, into rows[E]; not for the score mode, which looks at masses.
__device__ void count_rows(const RoundParams& p, const std::int32_t* counts, std::int32_t* rows) {
  __shared__ int3 changes[kMaxExperts];  // balanced: f - lo, hi - f, nearest - f
  const int e = threadIdx.x;
  if (e < p.experts) {
    const RoundBounds b = round_bounds(counts[e], p.tile, p.tokens);
    const std::int64_t nearest = nearest_count(b, p.tile);
    changes[e] = {static_cast<int>(b.f - b.lo), static_cast<int>(b.hi - b.f),
                  static_cast<int>(nearest - b.f)};
    std::int64_t c = p.mode == RoundingMode::kBalanced ? b.f : nearest;
    if (p.mode == RoundingMode::kUp) c = b.hi;
    if (p.mode == RoundingMode::kDown) c = b.lo;
    if (p.mode == RoundingMode::kStochastic) {
      c = stochastic_count(b, expert_draw(p.seed, static_cast<std::uint32_t>(e)));
    }
    rows[e] = static_cast<std::int32_t>(b.lo == b.hi ? b.f : c);
  }
  __syncthreads();
  if (p.mode == RoundingMode::kBalanced && threadIdx.x == 0) {
    int running = 0;
#pragma unroll 8
    for (int i = 0; i < p.experts; i++) {
      const int change = balanced_change(changes[i].x, changes[i].y, changes[i].z, running);
      rows[i] += change;
      running += change;
    }
  }
  __syncthreads();
}

/// Modes whose rows are found before the lists are written, by a kernel of their own.
__device__ bool decided_before(RoundingMode mode) {
  return mode == RoundingMode::kScore || mode == RoundingMode::kBalanced;
}

/// Rows of the balanced mode, which goes through the experts one by one: once, not in every block.
__global__ void __launch_bounds__(kMaxExperts) decide_rows(RoundParams p, RoundScratch s) {
  __shared__ std::int32_t rows[kMaxExperts];
  ptx::wait_for_previous_kernel();
  count_rows(p, s.counts, rows);
  if (static_cast<int>(threadIdx.x) < p.experts) s.thresholds[threadIdx.x].rows = rows[threadIdx.x];
}

/// Both candidates of the score mode, and the one that wins.
__device__ Threshold select_by_score(const Column& column, const RoundBounds& b,
                                     std::uint32_t* bins) {
  const auto hi = static_cast<int>(b.hi);
  const auto lo = static_cast<int>(b.lo);
  const auto f = static_cast<int>(b.f);
  if (lo == hi) return select_rows(column, f, f, bins);
  const Threshold more = select_rows(column, hi, f, bins);
  const Threshold less = select_rows(column, lo, f, bins);
  std::uint64_t gained = 0;
  std::uint64_t lost = 0;
  std::uint64_t equal = 0;  // chosen keys that equal the last kept one
  column.each([&](std::uint32_t k) {
    const std::uint64_t mass = key::mass(key::float_of(k & ~key::kChosen));
    if (k < key::kChosen) {
      if (k > more.key) gained += mass;
    } else if (k < less.key) {
      lost += mass;
    } else if (k == less.key) {
      equal += 1;
    }
  });
  gained = block_sum<kSelectThreads>(gained);
  lost = block_sum<kSelectThreads>(lost);
  equal = block_sum<kSelectThreads>(equal);
  gained += key::mass(key::float_of(more.key)) * static_cast<std::uint64_t>(more.take);
  if (less.take > 0) {
    lost += key::mass(key::float_of(less.key & ~key::kChosen)) *
            (equal - static_cast<std::uint64_t>(less.take));
  }
  return score_count(b, gained, lost) == b.hi ? more : less;
}

__global__ void __launch_bounds__(kSelectThreads) select_scores(RoundParams p, RoundScratch s) {
  extern __shared__ __align__(16) std::uint32_t room[];  // the column
  __shared__ std::uint32_t bins[RadixSelect::kBins];
  ptx::wait_for_previous_kernel();
  const int e = blockIdx.x;
  const Column column = Column::stage(s.keys + e * s.key_stride, p.tokens, room);
  const RoundBounds b = round_bounds(s.counts[e], p.tile, p.tokens);
  const Threshold result = select_by_score(column, b, bins);
  if (threadIdx.x == 0) s.thresholds[e] = result;
}

/// Chosen pairs keep route()'s weight, added ones carry p * scale.
__device__ float pair_weight(const RoundParams& p, const RoundScratch& s, std::uint32_t k,
                             int token, int expert) {
  if (k < key::kChosen) return key::mul32(key::float_of(k), p.scale);
  const std::int64_t first = static_cast<std::int64_t>(token) * p.top_k;
  int slot = 0;
#pragma unroll 8  // all reads at once: no early end
  for (int k = 1; k < p.top_k; k++) slot = s.ids[first + k] == expert ? k : slot;
  return s.weights[first + slot];
}

/// Turns rows[E] into this block's first pair; block 0 writes all offsets. *total is offsets[E].
__device__ int expert_offset(const RoundParams& p, const PairsView& out, const std::int32_t* rows,
                             int* total) {
  __shared__ int own;
  const int e = threadIdx.x;
  int sum = 0;
  const int before = block_prefix<kSelectThreads>(e < p.experts ? rows[e] : 0, &sum);
  if (e == static_cast<int>(blockIdx.x)) own = before;
  if (blockIdx.x == 0) {
    if (e < p.experts) out.offsets[e * out.offsets_stride] = before;
    if (e == 0) out.offsets[p.experts * out.offsets_stride] = sum;
  }
  __syncthreads();
  *total = sum;
  return own;
}

/// Thresholds (score mode: given) to lists: one block an expert. Rows of the modes that decide
/// before are given too.
__global__ void __launch_bounds__(kSelectThreads)
    write_pairs(RoundParams p, RoundScratch s, PairsView out) {
  extern __shared__ __align__(16) std::uint32_t room[];  // the column; then kStretch places
  __shared__ std::uint32_t bins[RadixSelect::kBins];
  __shared__ std::int32_t rows[kMaxExperts];
  static_assert(Column::kStretch <= 65536);
  ptx::wait_for_previous_kernel();
  const int e = blockIdx.x;
  const Column column = Column::stage(s.keys + e * s.key_stride, p.tokens, room);
  auto* list = reinterpret_cast<std::uint16_t*>(column.end_of(room));
  if (!decided_before(p.mode)) {
    count_rows(p, s.counts, rows);
  } else if (static_cast<int>(threadIdx.x) < p.experts) {
    rows[threadIdx.x] = s.thresholds[threadIdx.x].rows;
  }
  int total = 0;
  int at = expert_offset(p, out, rows, &total);
  for (std::int64_t i = total + static_cast<std::int64_t>(e) * kSelectThreads + threadIdx.x;
       i < out.capacity; i += gridDim.x * kSelectThreads) {
    out.set(i, -1, p.experts, 0.0f);
  }
  const Threshold last = p.mode == RoundingMode::kScore
                             ? s.thresholds[e]
                             : select_rows(column, rows[e], s.counts[e], bins);
  int equal = 0;
  for (int first = 0; first < p.tokens; first += Column::kStretch) {
    const int kept = list_kept(
        last, [&](int c) { return column.read(first + c * Column::kChunk); }, &equal, list);
    for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
      const int token = first + list[i];
      out.set(at + i, token, e, pair_weight(p, s, column.key(token), token, e));
    }
    at += kept;
    __syncthreads();
  }
}

RoundParams round_params(const RoundOptions& o, const RouteParams& p) {
  return {o.tile,  o.seed, static_cast<std::int32_t>(p.tokens), p.experts,
          p.top_k, o.mode, static_cast<float>(o.route.scale)};
}

}  // namespace

std::int64_t round_scratch_bytes(const RoundOptions& options, std::int64_t tokens,
                                 std::int64_t experts, const Exec&) {
  return scratch_at(nullptr, tokens, experts, options.route.top_k).bytes;
}

void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec) {
  const RouteParams p = params_of(options.route, logits);
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  const RoundScratch s = scratch_at(scratch.data, p.tokens, p.experts, p.top_k);
  check_launch("clearing counts", cudaMemsetAsync(s.counts, 0, p.experts * 4, stream));
  if (p.tokens > 0) {
    with_row<Finish::kTogether>(p, logits.dtype, [&](auto choice) {
      using R = typename decltype(choice)::R;
      using Item = typename decltype(choice)::Item;
      const std::size_t shared = rank_shared<R>(p);
      launch_dependent("launching token_round", rank_tokens<R, Item>,
                       {blocks_of(p.tokens, kRankTokens), kRankThreads, shared}, stream, p, s);
    });
  }
  const RoundParams r = round_params(options, p);
  const char* what = "launching token_round";
  const auto experts = static_cast<unsigned>(p.experts);
  if (r.mode == RoundingMode::kScore) {
    launch_dependent(what, select_scores, {experts, kSelectThreads, Column::staged_bytes(p.tokens)},
                     stream, r, s);
  } else if (r.mode == RoundingMode::kBalanced) {
    launch_dependent(what, decide_rows, {1, kMaxExperts}, stream, r, s);
  }
  launch_dependent(what, write_pairs, {experts, kSelectThreads, list_shared_bytes(p.tokens)},
                   stream, r, s, view_of(pairs));
}

}  // namespace sonicmoe::cuda
