// Token rounding on CUDA: rank (top-K of every token, rank keys as columns by expert), select (how
// many rows an expert keeps, and the last of them), list (the sorted lists), weigh (their weights).
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

constexpr int kWeighThreads = 256;

/// The caller's scratch.
struct RoundScratch {
  KeyColumns columns;
  Softmax* softmax;       // (T)
  std::int32_t* ids;      // (T, K)
  float* weights;         // (T, K)
  std::int32_t* counts;   // (E) f
  Threshold* thresholds;  // (E)
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
  s.columns.stride = key_stride_of(tokens);
  s.columns.keys =
      static_cast<CutKey*>(take(experts * s.columns.stride * std::int64_t{sizeof(CutKey)}));
  s.softmax = static_cast<Softmax*>(take(tokens * std::int64_t{sizeof(Softmax)}));
  s.ids = static_cast<std::int32_t*>(take(tokens * top_k * 4));
  s.weights = static_cast<float*>(take(tokens * top_k * 4));
  s.counts = static_cast<std::int32_t*>(take(experts * 4));
  s.thresholds = static_cast<Threshold*>(take(experts * std::int64_t{sizeof(Threshold)}));
  s.bytes = std::max(used, tokens * experts * std::int64_t{sizeof(float)});  // the gradient's
  return s;
}

/// A kernel and not cudaMemsetAsync, over which no launch could overlap.
__global__ void __launch_bounds__(kMaxExperts) clear_counts(int experts, std::int32_t* counts) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  if (static_cast<int>(threadIdx.x) < experts) counts[threadIdx.x] = 0;
}

/// A block's shared memory: the tile, room for selecting, and counts by expert.
template <class R, class Item>
std::size_t rank_shared(const RouteParams& p) {
  return kRankTokens * tile_stride(R::kLanes * R::kValues) * sizeof(CutKey) +
         R::template room_bytes<Item>(kRankThreads, p.n_group) +
         static_cast<std::size_t>(p.experts) * 4;
}

/// A warp's rows from `first` on: their routes, and their keys as rows of the tile, in which
/// `first` is token `place`.
template <class R, class Item>
__device__ void rank_rows(const RouteParams& p, const RoundScratch& s, std::int64_t first,
                          int place, CutKey* tile, std::uint32_t* room, std::int32_t* seen) {
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  Softmax all{};
  Item mine = 0;
#pragma unroll 1
  for (int pass = 0; pass < R::kPasses; pass++) {
    const std::int64_t token = min(first + R::read_row(pass), p.tokens - 1);
    Softmax own{};
    read_row<R>(p, token, room, pass, &mine, [&](const auto& row) {
      float probability[R::kValues];
      row().probabilities(p, probability, &own);
      store_keys<R>(probability, tile + tile_row(place + R::read_row(pass)) * kStride);
    });
    if (R::in_pass(pass)) all = own;
  }
  __syncwarp();
  const std::int64_t row = first + R::slot_row();
  const std::int64_t token = min(row, p.tokens - 1);
  const int id = item_expert(mine);
  const float raw = R::raw_score(p, all, id, logit_at(p.logits, token, id));
  const float weight = R::weigh(p, id, raw);
  if (R::slot() >= p.top_k || row >= p.tokens) return;
  if (R::slot() == 0) s.softmax[token] = all;
  s.ids[token * p.top_k + R::slot()] = id;
  s.weights[token * p.top_k + R::slot()] = weight;
  if (id < 0) return;
  tile[tile_row(place + R::slot_row()) * kStride + id] |= kCutChosen;
  atomicAdd(&seen[id], 1);
}

template <class R, class Item>
__global__ void __launch_bounds__(kRankThreads, R::kValues > 8      ? 1
                                                : sizeof(Item) == 4 ? 4
                                                                    : 3)
    rank_tokens(RouteParams p, RoundScratch s) {
  extern __shared__ __align__(16) std::uint32_t shared[];
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  auto* tile = reinterpret_cast<CutKey*>(shared);
  std::uint32_t* room = shared + kRankTokens * kStride / 2;
  auto* seen = reinterpret_cast<std::int32_t*>(room + kRankThreads / R::kLanes *
                                                          R::template room_words<Item>(p.n_group));
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) seen[e] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRankTokens;
#pragma unroll 1
  for (int i = threadIdx.x / 32 * R::kRowsPerWarp; i < kRankTokens;
       i += rows_of_block<R>(kRankThreads)) {
    rank_rows<R, Item>(p, s, first + i, i, tile, R::template room_of<Item>(room, p.n_group), seen);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) {
    if (seen[e] != 0) atomicAdd(&s.counts[e], seen[e]);
  }
  write_columns(p, tile, kStride, s.columns, first);
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
  Probabilities probabilities;
};

/// What decides how many rows an expert keeps, but for its tokens.
struct RowRule {
  RoundingMode mode;
  std::int64_t tile;
  std::uint64_t seed;
  std::int32_t tokens;
};

/// Rows of an expert with f chosen tokens under the modes that look at nothing else. Not inlined:
/// kernels that run once through their code wait for each line of it.
__device__ __noinline__ int rows_by_count(RowRule rule, int f, int expert) {
  const RoundBounds b = round_bounds(f, rule.tile, rule.tokens);
  if (rule.mode == RoundingMode::kUp) return static_cast<int>(b.hi);
  if (rule.mode == RoundingMode::kDown || b.lo == b.hi) return static_cast<int>(b.lo);
  if (rule.mode == RoundingMode::kStochastic) {
    return static_cast<int>(
        stochastic_count(b, expert_draw(rule.seed, static_cast<std::uint32_t>(expert))));
  }
  return static_cast<int>(nearest_count(b, rule.tile));
}

/// Modes whose rows are found before the lists are written, by a kernel of their own.
__device__ bool decided_before(RoundingMode mode) {
  return mode == RoundingMode::kScore || mode == RoundingMode::kBalanced;
}

/// Rows of the balanced mode, which goes through the experts one by one: once, not in every block.
__global__ void __launch_bounds__(kMaxExperts) decide_rows(RoundParams p, RoundScratch s) {
  __shared__ int4 changes[kMaxExperts];  // f, and f - lo, hi - f, nearest - f
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = threadIdx.x;
  if (e < p.experts) {
    const RoundBounds b = round_bounds(s.counts[e], p.tile, p.tokens);
    changes[e] = {static_cast<int>(b.f), static_cast<int>(b.f - b.lo), static_cast<int>(b.hi - b.f),
                  static_cast<int>(nearest_count(b, p.tile) - b.f)};
  }
  __syncthreads();
  if (e == 0) {
    int running = 0;
#pragma unroll 8
    for (int i = 0; i < p.experts; i++) {
      const int4 own = changes[i];
      const int change = balanced_change(own.y, own.z, own.w, running);
      changes[i].x = own.x + change;
      running += change;
    }
  }
  __syncthreads();
  if (e < p.experts) s.thresholds[e].rows = changes[e].x;
}

/// The chosen bit aside, whether a key is kept; `low` are the bits below the cut.
__device__ bool is_above(const Threshold& t, unsigned key, unsigned low) {
  if (key != t.cut) return key > t.cut;
  return t.ties != 0 ? low > t.low : low >= t.low;
}

/// Both candidates of the score mode, and the one that wins.
__device__ Threshold select_by_score(const Ranking& r, const RoundBounds& b, SelectRoom* room) {
  const auto hi = static_cast<int>(b.hi);
  const auto lo = static_cast<int>(b.lo);
  const auto f = static_cast<int>(b.f);
  if (lo == hi) return select_rows(r, f, f, room);
  const Threshold more = select_rows(r, hi, f, room);
  const Threshold less = select_rows(r, lo, f, room);
  std::uint64_t gained = 0;
  std::uint64_t lost = 0;
  std::uint64_t equal = 0;  // chosen keys that equal the last kept one
  const Side others = Side::others();
  r.column.from(others, others.turned(more.cut), [&](unsigned k, int token) {
    const float p = r.p(token);
    gained += is_above(more, k, low_key(p)) ? key::mass(p) : 0;
  });
  const Side chosen = Side::chosen();
  r.column.from(chosen, chosen.turned(less.cut), [&](unsigned k, int token) {
    const float p = r.p(token);
    const unsigned low = low_key(p);
    if (k == less.cut && low == less.low && less.ties != 0) {
      equal += 1;
    } else {
      lost += is_above(less, k, low) ? 0 : key::mass(p);
    }
  });
  gained = block_sum<kSelectThreads>(gained);
  lost = block_sum<kSelectThreads>(lost);
  equal = block_sum<kSelectThreads>(equal);
  const auto edge = [](const Threshold& t) {
    return key::mass(key::float_of((t.cut & kCutMask) << kCutBits | t.low));
  };
  if (more.ties != 0) gained += edge(more) * static_cast<std::uint64_t>(more.take);
  if (less.ties != 0) lost += edge(less) * (equal - static_cast<std::uint64_t>(less.take));
  return score_count(b, gained, lost) == b.hi ? more : less;
}

__global__ void __launch_bounds__(kSelectThreads, 2) select_scores(RoundParams p, RoundScratch s) {
  extern __shared__ __align__(16) CutKey keys[];  // the column
  __shared__ SelectRoom room;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = blockIdx.x;
  const Ranking ranking{Column::stage(s.columns.keys + e * s.columns.stride, p.tokens, keys),
                        p.probabilities, e};
  const RoundBounds b = round_bounds(s.counts[e], p.tile, p.tokens);
  Column::wait_for_copy();
  const Threshold result = select_by_score(ranking, b, &room);
  if (threadIdx.x == 0) s.thresholds[e] = result;
}

/// What a block knows of its list and of all.
struct ListPlace {
  int rows;
  int first;  // pair
};

/// Rows of every expert to this block's first pair; block 0 writes all offsets.
__device__ ListPlace list_place(const RoundParams& p, const RoundScratch& s, const PairsView& out) {
  constexpr int kEach = kMaxExperts / kSelectThreads;
  __shared__ int own[2];
  int rows[kEach];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int e = static_cast<int>(threadIdx.x) * kEach + i;
    rows[i] = 0;
    if (e < p.experts) {
      rows[i] = decided_before(p.mode)
                    ? s.thresholds[e].rows
                    : rows_by_count({p.mode, p.tile, p.seed, p.tokens}, s.counts[e], e);
    }
    sum += rows[i];
  }
  int all = 0;
  int before = block_prefix<kSelectThreads>(sum, &all);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int e = static_cast<int>(threadIdx.x) * kEach + i;
    if (e == static_cast<int>(blockIdx.x)) {
      own[0] = rows[i];
      own[1] = before;
    }
    if (blockIdx.x == 0 && e < p.experts) out.offsets[e * out.offsets_stride] = before;
    before += rows[i];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) out.offsets[p.experts * out.offsets_stride] = all;
  __syncthreads();
  return {own[0], own[1]};
}

/// Thresholds (score mode: given) to lists: one block an expert. Rows of the modes that decide
/// before are given too.
__global__ void __launch_bounds__(kSelectThreads, 2)
    list_pairs(RoundParams p, RoundScratch s, PairsView out) {
  extern __shared__ __align__(16) CutKey keys[];  // the column; then kStretch places
  __shared__ SelectRoom room;
  static_assert(Column::kStretch <= 65536);
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = blockIdx.x;
  const Ranking ranking{Column::stage(s.columns.keys + e * s.columns.stride, p.tokens, keys),
                        p.probabilities, e};
  std::uint16_t* list = ranking.column.end_of(keys);
  const ListPlace place = list_place(p, s, out);
  Column::wait_for_copy();
  Threshold last = keep_chosen(place.rows);
  if (p.mode == RoundingMode::kScore) {
    last = s.thresholds[e];
  } else if (list == keys || !turn_bits(ranking, place.rows, s.counts[e], keys, &room)) {
    last = select_rows(ranking, place.rows, s.counts[e], &room);
  }
  int equal = 0;
  int at = place.first;
  for (int first = 0; first < p.tokens; first += Column::kStretch) {
    const int kept = list_kept(ranking, last, first, &equal, list);
#pragma unroll 2
    for (int i = threadIdx.x; i < kept; i += kSelectThreads) out.set(at + i, first + list[i], e);
    at += kept;
    __syncthreads();
  }
}

/// Weights, and what stands past the last pair. Pairs among their token's top K keep route()'s
/// weight, added ones carry p * scale. Pair by pair, so that the list of a crowded expert does not
/// wait for one block.
__global__ void __launch_bounds__(kWeighThreads)
    weigh_pairs(RoundParams p, RoundScratch s, PairsView out) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kWeighThreads + threadIdx.x;
  if (i >= out.capacity) return;
  if (i >= out.offsets[p.experts * out.offsets_stride]) {
    out.set(i, -1, p.experts);
    out.weight[i * out.weight_stride] = 0.0f;
    return;
  }
  const int token = out.token[i * out.token_stride];
  const int expert = out.expert[i * out.expert_stride];
  const std::int64_t first = static_cast<std::int64_t>(token) * p.top_k;
  int slot = -1;
#pragma unroll 8  // all reads at once: no early end
  for (int k = 0; k < p.top_k; k++) slot = s.ids[first + k] == expert ? k : slot;
  out.weight[i * out.weight_stride] =
      slot >= 0 ? s.weights[first + slot] : key::mul32(p.probabilities.of(token, expert), p.scale);
}

RoundParams round_params(const RoundOptions& o, const RouteParams& p, const RoundScratch& s) {
  return {o.tile,  o.seed, static_cast<std::int32_t>(p.tokens), p.experts,
          p.top_k, o.mode, static_cast<float>(o.route.scale),   {p.logits, s.softmax, p.score}};
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
  const char* what = "launching token_round";
  launch_dependent(what, clear_counts, {1, kMaxExperts}, stream, p.experts, s.counts);
  if (p.tokens > 0) {
    with_row(p, [&](auto choice) {
      using R = typename decltype(choice)::R;
      using Item = typename decltype(choice)::Item;
      const std::size_t shared = rank_shared<R, Item>(p);
      launch_dependent(what, rank_tokens<R, Item>,
                       {blocks_of(p.tokens, kRankTokens), kRankThreads, shared}, stream, p, s);
    });
  }
  const RoundParams r = round_params(options, p, s);
  const auto experts = static_cast<unsigned>(p.experts);
  if (r.mode == RoundingMode::kScore) {
    launch_dependent(what, select_scores, {experts, kSelectThreads, Column::staged_bytes(p.tokens)},
                     stream, r, s);
  } else if (r.mode == RoundingMode::kBalanced) {
    launch_dependent(what, decide_rows, {1, kMaxExperts}, stream, r, s);
  }
  launch_dependent(what, list_pairs, {experts, kSelectThreads, list_shared_bytes(p.tokens)}, stream,
                   r, s, view_of(pairs));
  launch_dependent(
      what, weigh_pairs,
      {blocks_of(std::max<std::int64_t>(pairs.token.shape[0], 1), kWeighThreads), kWeighThreads},
      stream, r, s, view_of(pairs));
}

}  // namespace sonicmoe::cuda
