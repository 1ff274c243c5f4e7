// Token rounding on CUDA, three kernels: rank (top-K of every token, rank keys as columns by
// expert), select (how many rows an expert keeps, and the last of them), write (the sorted lists).
#include <algorithm>

#include "core/round_rule.h"
#include "cuda/routing/block.cuh"
#include "cuda/routing/launch.cuh"
#include "cuda/routing/round_select.cuh"
#include "cuda/routing/routing.h"

namespace sonicmoe::cuda {
namespace {

constexpr int kRankTokens = 32;  // tokens of a block, one for each lane when columns are written
constexpr int kRankWarps = 8;
constexpr int kRankThreads = 32 * kRankWarps;

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
  s.key_stride = (tokens + 3) / 4 * 4;
  s.keys = static_cast<std::uint32_t*>(take(experts * s.key_stride * 4));
  s.ids = static_cast<std::int32_t*>(take(tokens * top_k * 4));
  s.weights = static_cast<float*>(take(tokens * top_k * 4));
  s.counts = static_cast<std::int32_t*>(take(experts * 4));
  s.thresholds = static_cast<Threshold*>(take(experts * std::int64_t{sizeof(Threshold)}));
  s.bytes = used;
  return s;
}

/// Words between the tokens of a block's tile of keys: 16-byte reads by 32 tokens hit all banks.
constexpr int tile_stride(int experts) { return (experts + 31) / 32 * 32 + 4; }

template <class R>
std::size_t rank_shared(const RouteParams& p) {
  const int groups = R::group_words(p.n_group) * (kRankThreads / R::kLanes);
  return static_cast<std::size_t>(kRankTokens * tile_stride(R::kLanes * R::kValues) + groups) * 4 +
         static_cast<std::size_t>(p.experts) * 4;
}

/// One token: its route, and its keys as a row of the tile.
template <class R, class Item>
__device__ void rank_token(const RouteParams& p, const RoundScratch& s, std::int64_t token,
                           std::uint32_t* keys, std::uint32_t* groups, std::int32_t* seen) {
  const bool real = token < p.tokens;
  if (!real) token = p.tokens - 1;
  R r;
  r.load(p, token);
  Softmax all{};
  if (p.score != ScoreMode::kSigmoid) all = r.softmax();
  float probability[R::kValues];
  r.probabilities(p, all, probability);
#pragma unroll
  for (int v = 0; v < R::kValues; v += 4) {
    const uint4 four = {key::rank_key(probability[v], 0), key::rank_key(probability[v + 1], 0),
                        key::rank_key(probability[v + 2], 0), key::rank_key(probability[v + 3], 0)};
    *reinterpret_cast<uint4*>(keys + R::first() + v) = four;
  }
  int ids[R::kSlots];
  r.template select<Item>(p, groups, ids);
  float slot_x[R::kSlots];
  float raw[R::kSlots];
  float weights[R::kSlots];
#pragma unroll
  for (int i = 0; i < R::kSlots; i++) slot_x[i] = R::reload(p, token, ids[i]);
  R::raw_scores(p, all, ids, slot_x, raw);
  R::weigh(p, ids, raw, weights);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < R::kSlots; i++) {
    const int k = i * R::kLanes + R::lane();
    if (k >= p.top_k || !real) continue;
    s.ids[token * p.top_k + k] = ids[i];
    s.weights[token * p.top_k + k] = weights[i];
    if (ids[i] < 0) continue;
    keys[ids[i]] |= key::kChosen;
    atomicAdd(&seen[ids[i]], 1);
  }
}

template <class R, class Item>
__global__ void __launch_bounds__(kRankThreads) rank_tokens(RouteParams p, RoundScratch s) {
  extern __shared__ __align__(16) std::uint32_t shared[];
  constexpr int kStride = tile_stride(R::kLanes * R::kValues);
  constexpr int kRows = kRankThreads / R::kLanes;  // tokens at a time
  std::uint32_t* tile = shared;
  std::uint32_t* groups =
      tile + kRankTokens * kStride + threadIdx.x / R::kLanes * R::group_words(p.n_group);
  auto* seen = reinterpret_cast<std::int32_t*>(tile + kRankTokens * kStride +
                                               kRows * R::group_words(p.n_group));
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) seen[e] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRankTokens;
#pragma unroll 1
  for (int i = threadIdx.x / R::kLanes; i < kRankTokens; i += kRows) {
    rank_token<R, Item>(p, s, first + i, tile + i * kStride, groups, seen);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kRankThreads) {
    if (seen[e] != 0) atomicAdd(&s.counts[e], seen[e]);
  }
  const std::int64_t token = first + threadIdx.x % 32;
  if (token >= p.tokens) return;
  const std::uint32_t* mine = tile + threadIdx.x % 32 * kStride;
  for (int e = threadIdx.x / 32 * 4; e < p.experts; e += kRankWarps * 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(mine + e);
    std::uint32_t* to = s.keys + e * s.key_stride + token;
    to[0] = four.x;
    if (e + 1 < p.experts) to[s.key_stride] = four.y;
    if (e + 2 < p.experts) to[2 * s.key_stride] = four.z;
    if (e + 3 < p.experts) to[3 * s.key_stride] = four.w;
  }
}

/// Numbers that select and write share.
struct RoundParams {
  std::int64_t tile;
  std::uint64_t seed;
  std::int32_t tokens;
  std::int32_t experts;
  std::int32_t top_k;
  RoundingMode mode;
  float scale;
};

/// The running sum of the experts before this one; every thread gets it.
__device__ std::int64_t balance_before(const RoundParams& p, const std::int32_t* counts) {
  __shared__ std::int32_t all[kMaxExperts];
  __shared__ std::int64_t result;
  for (int e = threadIdx.x; e < static_cast<int>(blockIdx.x); e += kSelectThreads)
    all[e] = counts[e];
  __syncthreads();
  if (threadIdx.x == 0) {
    std::int64_t running = 0;
    for (int e = 0; e < static_cast<int>(blockIdx.x); e++) {
      const RoundBounds b = round_bounds(all[e], p.tile, p.tokens);
      running += balanced_count(b, p.tile, running) - b.f;
    }
    result = running;
  }
  __syncthreads();
  return result;
}

/// Both candidates of the score mode, and the one that wins.
__device__ Threshold select_by_score(const Column& column, const RoundBounds& b,
                                     std::uint32_t* bins) {
  const auto hi = static_cast<int>(b.hi);
  const auto lo = static_cast<int>(b.lo);
  const auto f = static_cast<int>(b.f);
  const Threshold more = select_rows(column, hi, f, bins);
  const Threshold less = select_rows(column, lo, f, bins);
  std::uint64_t gained = 0;
  std::uint64_t lost = 0;
  std::uint64_t kept = 0;  // chosen keys that equal the last kept one
  column.each([&](std::uint32_t k, int) {
    const std::uint64_t mass = key::mass(key::float_of(k & ~key::kChosen));
    if (k < key::kChosen) {
      if (k > more.key) gained += mass;
    } else if (k < less.key) {
      lost += mass;
    } else if (k == less.key) {
      kept += 1;
    }
  });
  gained = block_sum<kSelectThreads>(gained);
  lost = block_sum<kSelectThreads>(lost);
  kept = block_sum<kSelectThreads>(kept);
  gained += key::mass(key::float_of(more.key)) * static_cast<std::uint64_t>(more.take);
  if (less.take > 0) {
    lost += key::mass(key::float_of(less.key & ~key::kChosen)) *
            (kept - static_cast<std::uint64_t>(less.take));
  }
  return score_count(b, gained, lost) == b.hi ? more : less;
}

__global__ void __launch_bounds__(kSelectThreads) select_experts(RoundParams p, RoundScratch s) {
  __shared__ std::uint32_t bins[RadixSelect::kBins];
  const int e = blockIdx.x;
  const Column column{s.keys + e * s.key_stride, p.tokens};
  const RoundBounds b = round_bounds(s.counts[e], p.tile, p.tokens);
  Threshold result{};
  if (p.mode == RoundingMode::kScore && b.lo != b.hi) {
    result = select_by_score(column, b, bins);
  } else {
    std::int64_t c = b.f;
    if (p.mode == RoundingMode::kBalanced) {
      c = balanced_count(b, p.tile, balance_before(p, s.counts));
    } else if (b.lo != b.hi) {
      c = p.mode == RoundingMode::kUp     ? b.hi
          : p.mode == RoundingMode::kDown ? b.lo
          : p.mode == RoundingMode::kStochastic
              ? stochastic_count(b, expert_draw(p.seed, static_cast<std::uint32_t>(e)))
              : nearest_count(b, p.tile);
    }
    result = select_rows(column, static_cast<int>(c), static_cast<int>(b.f), bins);
  }
  if (threadIdx.x == 0) s.thresholds[e] = result;
}

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

PairsView view_of(const Pairs& pairs) {
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

/// Chosen pairs keep route()'s weight, added ones carry p * scale.
__device__ float pair_weight(const RoundParams& p, const RoundScratch& s, std::uint32_t k,
                             int token, int expert) {
  if (k < key::kChosen) return key::mul32(key::float_of(k), p.scale);
  const std::int64_t first = static_cast<std::int64_t>(token) * p.top_k;
  int slot = 0;
  while (s.ids[first + slot] != expert) slot++;
  return s.weights[first + slot];
}

/// Offset of this block's expert; block 0 writes them all. *total is offsets[E].
__device__ std::int64_t expert_offset(const RoundParams& p, const RoundScratch& s,
                                      const PairsView& out, std::int64_t* total) {
  __shared__ int own;
  const int e = threadIdx.x;
  const int rows = e < p.experts ? s.thresholds[e].rows : 0;
  int sum = 0;
  const int before = block_prefix<kSelectThreads>(rows, &sum);
  if (e == static_cast<int>(blockIdx.x)) own = before;
  if (blockIdx.x == 0) {
    if (e < p.experts) out.offsets[e * out.offsets_stride] = before;
    if (e == 0) out.offsets[p.experts * out.offsets_stride] = sum;
  }
  __syncthreads();
  *total = sum;
  return own;
}

__global__ void __launch_bounds__(kSelectThreads)
    write_pairs(RoundParams p, RoundScratch s, PairsView out) {
  constexpr int kChunk = kSelectThreads * 4;
  __shared__ std::uint32_t kept_key[kChunk];
  __shared__ std::int32_t kept_token[kChunk];
  const int e = blockIdx.x;
  std::int64_t total = 0;
  std::int64_t at = expert_offset(p, s, out, &total);
  for (std::int64_t i =
           total + static_cast<std::int64_t>(blockIdx.x) * kSelectThreads + threadIdx.x;
       i < out.capacity; i += static_cast<std::int64_t>(gridDim.x) * kSelectThreads) {
    out.set(i, -1, p.experts, 0.0f);
  }
  const Threshold last = s.thresholds[e];
  const std::uint32_t* keys = s.keys + e * s.key_stride;
  int equal_before = 0;
  for (int first = 0; first < p.tokens; first += kChunk) {
    const int token = first + static_cast<int>(threadIdx.x) * 4;
    std::uint32_t k[4] = {};
    if (token < p.tokens) {
      const uint4 four = *reinterpret_cast<const uint4*>(keys + token);
      k[0] = four.x;
      k[1] = four.y;
      k[2] = four.z;
      k[3] = four.w;
    }
    int equal = 0;
    if (last.ties != 0) {  // the same for the whole block
      for (int i = 0; i < 4; i++) equal += token + i < p.tokens && k[i] == last.key ? 1 : 0;
      int sum = 0;
      equal = equal_before + block_prefix<kSelectThreads>(equal, &sum);
      equal_before += sum;
    }
    bool keep[4];
    int count = 0;
    for (int i = 0; i < 4; i++) {
      const bool tie = k[i] == last.key && last.take > 0 && (last.ties == 0 || equal < last.take);
      keep[i] = token + i < p.tokens && (k[i] > last.key || tie);
      equal += token + i < p.tokens && k[i] == last.key ? 1 : 0;
      count += keep[i] ? 1 : 0;
    }
    int kept = 0;
    int place = block_prefix<kSelectThreads>(count, &kept);
    for (int i = 0; i < 4; i++) {
      if (!keep[i]) continue;
      kept_key[place] = k[i];
      kept_token[place++] = token + i;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kept; i += kSelectThreads) {
      out.set(at + i, kept_token[i], e, pair_weight(p, s, kept_key[i], kept_token[i], e));
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
    with_row(p, logits.dtype, [&](auto choice) {
      using R = typename decltype(choice)::R;
      using Item = typename decltype(choice)::Item;
      const std::size_t shared = rank_shared<R>(p);
      check_launch(
          "shared memory of token_round",
          cudaFuncSetAttribute(rank_tokens<R, Item>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)));
      rank_tokens<R, Item>
          <<<blocks_of(p.tokens, kRankTokens), kRankThreads, shared, stream>>>(p, s);
    });
  }
  const RoundParams r = round_params(options, p);
  select_experts<<<p.experts, kSelectThreads, 0, stream>>>(r, s);
  write_pairs<<<p.experts, kSelectThreads, 0, stream>>>(r, s, view_of(pairs));
  check_launch("the launches of token_round");
}

}  // namespace sonicmoe::cuda
