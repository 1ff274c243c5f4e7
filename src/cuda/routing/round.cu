// Token rounding on CUDA: rank (top-K of every token, marks by expert), select (how many rows an
// expert keeps, and which tokens come or go for that), list (the sorted lists and their weights).
#include <algorithm>

#include "core/round_rule.h"
#include "cuda/device/launch.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/block.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/round_lists.cuh"
#include "cuda/routing/round_marks.cuh"
#include "cuda/routing/round_turn.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kCountThreads = 128;

/// The caller's scratch.
struct RoundScratch {
  TokenShares* shares;  // (T)
  TileMarks* marks;     // (E, tiles)
  KeptTokens kept;
  std::int32_t* counts;  // (E) f, where the mode needs all of them at once
  std::int64_t bytes;
};

RoundScratch scratch_at(void* base, std::int64_t tokens, std::int64_t experts) {
  RoundScratch s{};
  ScratchCarver carver(base);
  s.shares = carver.take<TokenShares>(tokens);
  s.kept = kept_tokens(tokens);
  s.marks = carver.take<TileMarks>(experts * s.kept.tiles);
  carve_kept(&carver, experts, &s.kept);
  s.counts = carver.take<std::int32_t>(experts);
  s.bytes = std::max(carver.used(), tokens * experts * std::int64_t{sizeof(float)});  // gradient's
  return s;
}

/// A block's shared memory: the marks, and room for selecting.
template <class R, class Item, class Shape>
std::size_t rank_shared(const RouteParams& p) {
  return TileRoom<R, Shape>::kBytes + R::template room_bytes<Item>(Shape::kThreads, p.n_group);
}

/// Keeps the best p of those that the row of this pass has not chosen, where it exists.
template <class R, class Shape, class Item>
__device__ void keep_best(const RouteParams& p, const TileRoom<R, Shape>& tile, const Item* chosen,
                          bool exists, const float (&probability)[R::kValues],
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
      const std::uint32_t cuts = two_cuts(probability[v + 2 * i], probability[v + 2 * i + 1]);
      best[v / 2 + i] = __vmaxu2(best[v / 2 + i], cuts & ~two[i] & all);
    }
  }
  __syncwarp();
  if (id >= 0) taken[id] = 0;
}

/// Rows that a warp reads at once.
template <class R>
constexpr int kRowsAtOnce = 32 / R::kLanes;

/// A warp's rows from `first` on, which is token `place` of the tile. Small rows are loaded one
/// ahead: the first ones are in `next`, and afterwards those behind the last.
template <class R, class Item, class Shape>
__device__ void rank_rows(const RouteParams& p, const TileRoom<R, Shape>& tile, TokenShares* shares,
                          std::int64_t first, int place, std::uint32_t* room,
                          RowSource<R, Item>* next, std::uint32_t (&best)[R::kValues / 2]) {
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
    source.select(p, room, pass, &mine);
    const Item* chosen = R::template chosen_in<Item>(room);
    Softmax own{};
    float probability[R::kValues];
    source.widened().probabilities(p, chosen, probability, &own);
    keep_best<R>(p, tile, chosen, row < p.tokens, probability, best);
    if (R::in_pass(pass)) all = own;
  }
  const std::int64_t row = first + R::slot_row();
  const int id = item_expert(mine);
  const float x = slot_logit(p, min(row, p.tokens - 1), mine);
  const Softmax slots = R::score_softmax(p, all, x);
  const float divisor = p.renormalize != 0 ? R::divisor(R::raw_score(p, slots, id, x)) : 1.0f;
  if (R::slot() >= p.top_k || row >= p.tokens) return;
  if (R::slot() == 0) shares[row] = {all, slots, divisor};
  const float own = p.score == ScoreMode::kSigmoid ? key::sigmoid32(x) : all(x);
  if (id >= 0) tile.choose(place + R::slot_row(), id, own);
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
  const TileRoom<R, Shape> tile(shared);
  auto* room = reinterpret_cast<std::uint32_t*>(shared + TileRoom<R, Shape>::kBytes);
  tile.clear();
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int place = static_cast<int>(threadIdx.x) / 32 * Shape::kWarpTokens;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * Shape::kTokens + place;
  RowSource<R, Item> next;
  if constexpr (next.kSmall) next.load(p, min(first + R::read_row(0), p.tokens - 1));
  __syncthreads();
  std::uint32_t best[R::kValues / 2] = {};
#pragma unroll 1
  for (int i = 0; i < Shape::kWarpTokens; i += R::kRowsPerWarp) {
    rank_rows<R, Item>(p, tile, s.shares, first + i, place + i,
                       R::template room_of<Item>(room, p.n_group), &next, best);
  }
  tile.store_best(best);
  __syncthreads();
  tile.write_all(p.experts, s.marks, s.kept.tiles);
}

/// What the kernels by expert need to know.
struct RoundParams {
  std::int64_t tile;
  std::uint64_t seed;
  std::int32_t tokens;
  std::int32_t experts;
  RoundingMode mode;
  PairScores scores;
};

/// Rows of an expert with f chosen tokens under the modes that look at nothing else.
__device__ std::int64_t rows_by_count(const RoundParams& p, const RoundBounds& b, int expert) {
  if (p.mode == RoundingMode::kUp) return b.hi;
  if (p.mode == RoundingMode::kDown || b.lo == b.hi) return b.lo;
  if (p.mode == RoundingMode::kStochastic) {
    return stochastic_count(b, expert_draw(p.seed, static_cast<std::uint32_t>(expert)));
  }
  return nearest_count(b, p.tile);
}

/// f of every expert.
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
  if (e < p.experts) s.kept.rows[e] = changes[e].x;
}

/// The score mode: rows that the expert keeps.
__device__ std::int64_t turn_by_score(const Turning& t, const RoundBounds& b) {
  if (b.lo == b.hi) return b.f;
  const auto more = static_cast<int>(b.hi - b.f);
  const auto less = static_cast<int>(b.f - b.lo);
  std::uint64_t lost = 0;
  {
    const TokenSearch search(t.x, Side::kChosen, less, &t.room->search);
    lost = Turning::mass(search, Side::kChosen, search.last(less));
  }
  {
    const TokenSearch search(t.x, Side::kOthers, more, &t.room->search);
    const std::uint64_t last = search.last(more);
    const std::uint64_t gained = Turning::mass(search, Side::kOthers, last);
    if (score_count(b, gained, lost) == b.hi) {
      t.turn(search, Side::kOthers, last);
      return b.hi;
    }
  }
  t.turn(Side::kChosen, less);
  return b.lo;
}

/// From marks to the tokens that are kept: one block an expert.
__global__ void __launch_bounds__(kSearchThreads, 2) select_tokens(RoundParams p, RoundScratch s) {
  __shared__ SelectRoom room;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int e = blockIdx.x;
  const Turning t{{s.marks + e * s.kept.tiles, p.scores, e, p.tokens}, s.kept.of(e), &room};
  const int f = keep_chosen(t);
  const RoundBounds b = round_bounds(f, p.tile, p.tokens);
  std::int64_t rows = 0;
  if (p.mode == RoundingMode::kScore) {
    rows = turn_by_score(t, b);
  } else {
    rows = p.mode == RoundingMode::kBalanced ? *t.kept.rows : rows_by_count(p, b, e);
    if (rows > f) t.turn(Side::kOthers, static_cast<int>(rows - f));
    if (rows < f) t.turn(Side::kChosen, static_cast<int>(f - rows));
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
          p.experts, o.mode, {p.logits, s.shares, p.score, p.renormalize, p.scale}};
}

template <class R, class Item, class Shape>
void launch_rank(const RouteParams& p, const RoundScratch& s, cudaStream_t stream) {
  // Whole tiles: where groups are ranked apart, those past the last token are marked as well.
  constexpr unsigned kParts = kTileTokens / Shape::kTokens;
  launch_dependent(
      "launching token_round", rank_tokens<R, Item, Shape>,
      {blocks_of(p.tokens, kTileTokens) * kParts, Shape::kThreads, rank_shared<R, Item, Shape>(p)},
      stream, p, s);
}

void rank(const RouteParams& p, const RoundScratch& s, cudaStream_t stream) {
  constexpr std::int64_t kFewTokens = 8192;  // fewer tiles than multiprocessors
  with_row(p, [&](auto choice) {
    using R = typename decltype(choice)::R;
    using Item = typename decltype(choice)::Item;
    if constexpr (R::kLanes < 32) {  // rows whose groups fit four warps at a time
      if (p.tokens <= kFewTokens) return launch_rank<R, Item, RankGroup>(p, s, stream);
    }
    launch_rank<R, Item, RankTile>(p, s, stream);
  });
}

}  // namespace

std::int64_t round_scratch_bytes(const RoundOptions&, std::int64_t tokens, std::int64_t experts,
                                 const Exec&) {
  return scratch_at(nullptr, tokens, experts).bytes;
}

void token_round(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                 Buffer scratch, const Exec& exec) {
  const RouteParams p = params_of(options.route, logits);
  const auto stream = static_cast<cudaStream_t>(exec.stream);
  const RoundScratch s = scratch_at(scratch.data, p.tokens, p.experts);
  if (p.tokens > 0) rank(p, s, stream);
  const char* what = "launching token_round";
  const RoundParams r = round_params(options, p, s);
  const auto experts = static_cast<unsigned>(p.experts);
  if (r.mode == RoundingMode::kBalanced) {
    launch_dependent(what, count_chosen, {experts, kCountThreads}, stream, s);
    launch_dependent(what, decide_rows, {1, kMaxExperts}, stream, r, s);
  }
  launch_dependent(what, select_tokens, {experts, kSearchThreads}, stream, r, s);
  launch_dependent(what, list_pairs, {dim3(experts, s.kept.range_count), kListThreads}, stream,
                   r.scores, static_cast<const TileMarks*>(s.marks), s.kept, view_of(pairs));
}

}  // namespace sonicmoe::cuda
