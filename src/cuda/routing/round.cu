// Token rounding on CUDA, in three steps: rank (top-K of every token, marks by expert), select (how
// many rows an expert keeps, and which tokens it adds or removes for that), list (the pairs,
// sorted, with their weights).
#include <algorithm>

#include "core/round_rule.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/block.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/kept_set.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/pair_gradients.cuh"
#include "cuda/routing/round_lists.cuh"
#include "cuda/routing/round_marks.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kCountThreads = 128;

/// The caller's scratch.
struct RoundScratch {
  TokenSoftmaxes* softmaxes;  // (T)
  TileMarks* marks;           // (E, tiles)
  KeptTokens kept;
  std::int32_t* counts;  // (E) f, where the mode needs all of them at once
  std::int64_t bytes;
};

RoundScratch scratch_at(void* base, std::int64_t tokens, std::int64_t experts) {
  RoundScratch s{};
  ScratchCarver carver(base);
  s.softmaxes = carver.take<TokenSoftmaxes>(tokens);
  s.kept = kept_tokens(tokens);
  s.marks = carver.take<TileMarks>(experts * s.kept.tiles);
  carve_kept(&carver, experts, &s.kept);
  s.counts = carver.take<std::int32_t>(experts);
  s.bytes = carver.used();
  return s;
}

/// Bytes of a block's shared memory: the marks, and the arrays of select().
template <class R, class Item, class Shape>
constexpr std::size_t rank_shared(int n_group) {
  return TileSmem<R, Shape>::kBytes + R::template smem_bytes<Item>(Shape::kThreads, n_group);
}

/// Updates the best rank of the experts that this pass's row did not choose. `exists`: the row is
/// not past the last one.
template <class R, class Shape, class Item>
__device__ void keep_best(const RouteParams& p, const TileSmem<R, Shape>& tile, const Item* chosen,
                          bool exists, const float (&rank)[R::kValues],
                          std::uint32_t (&best)[R::kValues / 2]) {
  const std::uint32_t all = exists ? ~0u : 0u;
  std::uint16_t* taken = tile.taken_here();
  const int id = R::lane() < p.top_k ? item_expert(chosen[R::lane()]) : -1;
  if (id >= 0) taken[id] = 0xffff;
  __syncwarp();
#pragma unroll
  for (int v = 0; v < R::kValues; v += 8) {
    const uint4 ones = *reinterpret_cast<const uint4*>(taken + R::first() + v);
    const std::uint32_t two[4] = {ones.x, ones.y, ones.z, ones.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const std::uint32_t cuts = two_cuts(rank[v + 2 * i], rank[v + 2 * i + 1]);
      best[v / 2 + i] = __vmaxu2(best[v / 2 + i], cuts & ~two[i] & all);
    }
  }
  __syncwarp();
  if (id >= 0) taken[id] = 0;
}

/// Rows that a warp reads at once.
template <class R>
constexpr int kRowsAtOnce = 32 / R::kLanes;

/// Ranks a warp's rows from `first` on, which is token `in_block` of the block. Small rows are
/// loaded one pass ahead: `next` holds the first rows at the call, and the rows after the last ones
/// at the return.
template <class R, class Item, class Shape>
__device__ void rank_rows(const RouteParams& p, const TileSmem<R, Shape>& tile,
                          TokenSoftmaxes* softmaxes, std::int64_t first, int in_block,
                          std::uint32_t* smem, RowSource<R, Item>* next,
                          std::uint32_t (&best)[R::kValues / 2]) {
  Softmax all{};
  Item mine = 0;
#pragma unroll 1
  for (int pass = 0; pass < R::kPasses; pass++) {
    const std::int64_t row = first + R::read_row(pass);
    RowSource<R, Item> source;
    if constexpr (source.kSmall) {
      source = *next;
      next->load(p, min(row + kRowsAtOnce<R>, p.tokens - 1));
    } else {
      source.load(p, min(row, p.tokens - 1));
    }
    source.clean();
    source.select(p, smem, pass, &mine);
    const Item* chosen = R::template chosen_in<Item>(smem);
    Softmax own{};
    float rank[R::kValues];
    source.widened().ranks(p, chosen, rank, &own);
    keep_best<R>(p, tile, chosen, row < p.tokens, rank, best);
    if (R::in_pass(pass)) all = own;
  }
  const std::int64_t row = first + R::slot_row();
  const int id = item_expert(mine);
  const float x = slot_logit(p, min(row, p.tokens - 1), mine);
  const Softmax slots = R::score_softmax(p, all, x);
  const float divisor = p.renormalize != 0 ? R::divisor(R::raw_score(p, slots, id, x)) : 1.0f;
  if (R::slot() >= p.top_k || row >= p.tokens) return;
  if (R::slot() == 0) softmaxes[row] = {all, slots, divisor};
  const float own = key::rank_of(p.score, score_of(p.score, all, x));
  if (id >= 0) tile.choose(in_block + R::slot_row(), id, own);
}

/// Blocks of kThreads that should fit one multiprocessor.
template <class R, class Item, class Shape>
constexpr int rank_blocks() {
  if (R::kValues > 8) return 1;
  return (sizeof(Item) == 4 ? 1024 : 768) / Shape::kThreads;
}

template <class R, class Item, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, rank_blocks<R, Item, Shape>())
    rank_tokens(RouteParams p, RoundScratch s) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  const TileSmem<R, Shape> tile(shared);
  auto* smem = reinterpret_cast<std::uint32_t*>(shared + TileSmem<R, Shape>::kBytes);
  tile.clear();
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int in_block = static_cast<int>(threadIdx.x) / 32 * Shape::kWarpTokens;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * Shape::kTokens + in_block;
  RowSource<R, Item> next;
  if constexpr (next.kSmall) next.load(p, min(first + R::read_row(0), p.tokens - 1));
  __syncthreads();
  std::uint32_t best[R::kValues / 2] = {};
#pragma unroll 1
  for (int i = 0; i < Shape::kWarpTokens; i += R::kRowsPerWarp) {
    rank_rows<R, Item>(p, tile, s.softmaxes, first + i, in_block + i,
                       R::template smem_of<Item>(smem, p.n_group), &next, best);
  }
  tile.store_best(best);
  __syncthreads();
  tile.write_all(p.experts, s.marks, s.kept.tiles);
}

/// Parameters of the kernels that work by expert.
struct RoundParams {
  std::int64_t tile;
  std::uint64_t seed;
  std::int32_t tokens;
  std::int32_t experts;
  RoundingMode mode;
  PairScores scores;
};

/// Rows of an expert with f chosen tokens, for modes that need only f.
__device__ std::int64_t rows_by_count(const RoundParams& p, const RoundBounds& b, int expert) {
  if (p.mode == RoundingMode::kUp) return b.hi;
  if (p.mode == RoundingMode::kDown || b.lo == b.hi) return b.lo;
  if (p.mode == RoundingMode::kStochastic) {
    return stochastic_count(b, expert_draw(p.seed, static_cast<std::uint32_t>(expert)));
  }
  return nearest_count(b, p.tile);
}

/// Writes f, the number of tokens that chose the expert, for every expert.
__global__ void __launch_bounds__(kCountThreads) count_chosen(RoundScratch s) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const TileMarks* marks = s.marks + blockIdx.x * s.kept.tiles;
  int count = 0;
  for (std::int64_t i = threadIdx.x; i < s.kept.tiles; i += kCountThreads) {
    count += __popcll(marks[i].chosen);
  }
  count = block_sum<kCountThreads>(count);
  if (threadIdx.x == 0) s.counts[blockIdx.x] = count;
}

/// Decides the rows of all experts in the balanced mode. An expert's rows depend on the experts
/// before it, so one block decides for all.
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
  if (e < p.experts) s.kept.rows[e] = changes[e].x;
}

/// The score mode: selects the tokens and returns the rows that the expert keeps.
__device__ std::int64_t round_by_score(const KeptSet& t, const RoundBounds& b) {
  if (b.lo == b.hi) return b.f;
  const auto more = static_cast<int>(b.hi - b.f);
  const auto less = static_cast<int>(b.f - b.lo);
  std::uint64_t lost = 0;
  {
    const TokenSearch search(t.x, Side::kChosen, less, &t.smem->search);
    lost = t.mass(search, Side::kChosen, search.last(less));
  }
  {
    const TokenSearch search(t.x, Side::kOthers, more, &t.smem->search);
    const std::uint64_t last = search.last(more);
    const std::uint64_t gained = t.mass(search, Side::kOthers, last);
    if (score_count(b, gained, lost) == b.hi) {
      t.toggle(search, Side::kOthers, last);
      return b.hi;
    }
  }
  t.toggle(Side::kChosen, less);
  return b.lo;
}

/// Selects the tokens that an expert keeps, from the marks. One block for each expert.
__global__ void __launch_bounds__(kSearchThreads, 2) select_tokens(RoundParams p, RoundScratch s) {
  __shared__ SelectSmem smem;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = blockIdx.x;
  const KeptSet t{{s.marks + e * s.kept.tiles, p.scores, e, p.tokens}, s.kept.of(e), &smem};
  const int f = keep_chosen(t);
  const RoundBounds b = round_bounds(f, p.tile, p.tokens);
  std::int64_t rows = 0;
  if (p.mode == RoundingMode::kScore) {
    rows = round_by_score(t, b);
  } else {
    rows = p.mode == RoundingMode::kBalanced ? *t.kept.rows : rows_by_count(p, b, e);
    if (rows > f) t.toggle(Side::kOthers, static_cast<int>(rows - f));
    if (rows < f) t.toggle(Side::kChosen, static_cast<int>(f - rows));
  }
  t.finish(static_cast<int>(rows));
}

__global__ void __launch_bounds__(kListThreads)
    list_pairs(PairScores scores, const TileMarks* marks, KeptTokens kept, PairsView out) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  list_range(scores, marks, kept, out);
}

RoundParams round_params(const RoundOptions& o, const RouteParams& p, const RoundScratch& s) {
  return {o.tile,    o.seed, static_cast<std::int32_t>(p.tokens),
          p.experts, o.mode, {p.logits, s.softmaxes, p.score, p.renormalize, p.scale}};
}

template <class R, class Item, class Shape>
void launch_rank(const RouteParams& p, const RoundScratch& s, const Exec& exec) {
  // The grid covers whole tiles: blocks of one group also write the marks of groups past the last
  // token.
  constexpr unsigned kParts = kTileTokens / Shape::kTokens;
  launch_dependent(device_of(exec), "launching token_round", rank_tokens<R, Item, Shape>,
                   {blocks_of(p.tokens, kTileTokens) * kParts, Shape::kThreads,
                    rank_shared<R, Item, Shape>(p.n_group)},
                   stream_of(exec), p, s);
}

void rank(const RouteParams& p, const RoundScratch& s, const Exec& exec) {
  // With so few tokens a grid of one block a tile has at most 128 blocks; an H100 has 132
  // multiprocessors.
  constexpr std::int64_t kFewTokens = 8192;
  with_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    using Item = typename decltype(choice)::Item;
    if constexpr (R::kLanes < 32) {  // four warps read the 16 rows of a group in one or two passes
      if (p.tokens <= kFewTokens) return launch_rank<R, Item, RankGroup>(p, s, exec);
    }
    // Where a block that ranks a whole tile may need more shared memory than the device has, blocks
    // of one group rank it. Items of 32 bits have no expert groups (selects_by_word).
    constexpr int kMostGroups = sizeof(Item) == 4 ? 0 : kMaxGroups;
    if constexpr (rank_shared<R, Item, RankTile>(kMostGroups) > kLeastShared) {
      static_assert(rank_shared<R, Item, RankGroup>(kMostGroups) <= kLeastShared);
      const auto most = static_cast<std::size_t>(device_of(exec).block_shared);
      if (rank_shared<R, Item, RankTile>(p.n_group) > most) {
        return launch_rank<R, Item, RankGroup>(p, s, exec);
      }
    }
    launch_rank<R, Item, RankTile>(p, s, exec);
  });
}

}  // namespace

std::int64_t round_scratch_bytes(const RoundOptions&, std::int64_t tokens, std::int64_t experts,
                                 const Exec&) {
  return std::max(scratch_at(nullptr, tokens, experts).bytes,
                  gradient_scratch(nullptr, tokens, experts).bytes);
}

void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec) {
  const RouteParams p = params_of(options.route, logits);
  const auto stream = stream_of(exec);
  const RoundScratch s = scratch_at(scratch.data, p.tokens, p.experts);
  if (p.tokens > 0) rank(p, s, exec);
  const char* what = "launching token_round";
  const RoundParams r = round_params(options, p, s);
  const auto experts = static_cast<unsigned>(p.experts);
  if (r.mode == RoundingMode::kBalanced) {
    launch_dependent(device_of(exec), what, count_chosen, {experts, kCountThreads}, stream, s);
    launch_dependent(device_of(exec), what, decide_rows, {1, kMaxExperts}, stream, r, s);
  }
  launch_dependent(device_of(exec), what, select_tokens, {experts, kSearchThreads}, stream, r, s);
  launch_dependent(device_of(exec), what, list_pairs,
                   {dim3(experts, s.kept.range_count), kListThreads}, stream, r.scores,
                   static_cast<const TileMarks*>(s.marks), s.kept, view_of(pairs));
}

}  // namespace sonicmoe::cuda
