// Sends a rank's slots to all ranks, and makes the list of a rank's pairs from the slots of all
// ranks.
#include <algorithm>

#include "cuda/device/launch.h"
#include "cuda/exchange/announce.cuh"
#include "cuda/metadata/block.cuh"
#include "cuda/metadata/slot_view.cuh"
#include "cuda/ptx/dependent.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kThreads = 1024;
static_assert(kPairChunk == kThreads, "a thread has one slot");

/// OwnSlots as a kernel argument.
struct SlotSource {
  SlotView expert, token, weight;
  std::int32_t top_k, count, tokens, experts, experts_per_rank;

  struct Slot {
    std::int32_t token;
    std::int32_t expert;  ///< -1: the slot is empty
  };
  __device__ Slot operator[](std::int64_t i) const {
    const std::int64_t t = token.data == nullptr ? static_cast<std::int32_t>(i) / top_k
                                                 : token.integer(token.offset(i));
    const bool valid = t >= 0 && t < tokens;
    return {valid ? static_cast<std::int32_t>(t) : -1,
            valid ? expert.expert(expert.offset(i), experts) : -1};
  }
};

SlotSource slot_source(const OwnSlots& s) {
  return {slot_view(s.expert),
          slot_view(s.token),
          slot_view(s.weight),
          static_cast<std::int32_t>(std::max<std::int64_t>(s.top_k, 1)),
          static_cast<std::int32_t>(s.count),
          static_cast<std::int32_t>(s.tokens),
          static_cast<std::int32_t>(s.experts),
          static_cast<std::int32_t>(s.experts_per_rank)};
}

unsigned blocks_of(std::int64_t count) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((count + kThreads - 1) / kThreads, 1, 256));
}

/// mark_ranks() for a list of pairs, whose tokens may be in any order.
__global__ void __launch_bounds__(kThreads)
    mark_pairs_kernel(const SlotSource slots, unsigned long long* masks) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  for (std::int64_t i = blockIdx.x * kThreads + threadIdx.x; i < slots.count;
       i += gridDim.x * kThreads) {
    const SlotSource::Slot slot = slots[i];
    if (slot.expert < 0) continue;
    atomicOr(&masks[slot.token], 1ull << (slot.expert / slots.experts_per_rank));
  }
}

/// mark_ranks() for ids, with one thread for each token.
__global__ void __launch_bounds__(kThreads)
    mark_ids_kernel(const SlotSource slots, unsigned long long* masks) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  for (std::int64_t t = blockIdx.x * kThreads + threadIdx.x; t < slots.tokens;
       t += gridDim.x * kThreads) {
    unsigned long long mask = 0;
    for (int k = 0; k < slots.top_k; k++) {
      const int expert = slots[t * slots.top_k + k].expert;
      if (expert >= 0) mask |= 1ull << (expert / slots.experts_per_rank);
    }
    masks[t] = mask;
  }
}

/// Bytes, of slot 0 and of chunk 0 of this rank's list.
struct ListOffsets {
  std::int64_t token, expert, weight, pair_counts;
};

/// send_slots(), a block for each chunk.
__global__ void __launch_bounds__(kThreads)
    send_slots_kernel(const __grid_constant__ Peers peers, const SlotSource slots,
                      const ListOffsets lists) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  if (__syncthreads_or(has_fault(peers)) != 0) return;
  if (blockIdx.x == 0 && threadIdx.x < peers.ranks) {
    Control* control = peers.control(static_cast<int>(threadIdx.x));
    control->slots[peers.rank] = slots.count;
    control->top_k[peers.rank] = slots.token.data == nullptr ? slots.top_k : 0;
  }
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool used = i < slots.count;
  const SlotSource::Slot slot = used ? slots[i] : SlotSource::Slot{-1, -1};
  const float weight = used ? slots.weight.weight(slots.weight.offset(i)) : 0.0f;
  const int owner = slot.expert < 0 ? -1 : slot.expert / slots.experts_per_rank;
  for (int r = 0; r < peers.ranks; r++) {
    if (used) {
      peers.at<std::int32_t>(r, lists.token)[i] = slot.token;
      peers.at<std::int32_t>(r, lists.expert)[i] = slot.expert;
      peers.at<float>(r, lists.weight)[i] = weight;
    }
    const int pairs = __syncthreads_count(owner == r);
    if (threadIdx.x == 0) peers.at<std::int32_t>(r, lists.pair_counts)[blockIdx.x] = pairs;
  }
  announce_at_end(peers, kPhaseRouting, ~std::uint64_t{0}, &peers.control(peers.rank)->push_slots);
}

struct PairParams {
  SlotLists lists;
  const Control* control;
  const std::int32_t* pair_counts;
  std::int64_t max_slots;
  std::int64_t max_tokens;
  std::int32_t chunks;  // of a rank
  std::int32_t ranks;
  std::int32_t rank;
  std::int32_t first_expert;
  std::int32_t experts;  // of this rank
};

/// The slots that one rank has sent. If the routing is lost (Control::routing_lost): none.
struct SentSlots {
  const std::int32_t* token;
  const std::int32_t* expert;
  const float* weight;
  std::int32_t count;
  std::int32_t top_k;  // 0: a list of pairs
  std::int32_t first_expert;
  std::int32_t experts;

  __device__ SentSlots(const PairParams& p, int rank, bool lost)
      : token(p.lists.token + rank * p.max_slots),
        expert(p.lists.expert + rank * p.max_slots),
        weight(p.lists.weight + rank * p.max_slots),
        count(lost ? 0 : p.control->slots[rank]),
        top_k(lost ? 1 : p.control->top_k[rank]),
        first_expert(p.first_expert),
        experts(p.experts) {}

  /// The index among this rank's experts of the expert of slot i. Negative if there is no such
  /// slot, if it is empty, or if its expert belongs to another rank.
  __device__ int expert_at(int i) const {
    if (i >= count) return -1;
    const int e = expert[i] - first_expert;
    return e < experts ? e : -1;
  }
  __device__ int token_at(int i) const { return top_k != 0 ? i / top_k : token[i]; }

  /// Slot i has expert `own` and is a pair. Returns its index among the pairs in the order (token,
  /// expert, slot), minus its index in the order of slots.
  __device__ int move_of(int i, int own) const {
    return top_k != 0 ? move_in_token(i, own) : move_in_list(i, own);
  }
  /// Of ids only the K slots of the token can move a pair.
  __device__ int move_in_token(int i, int own) const {
    const int begin = i / top_k * top_k;
    int move = 0;
#pragma unroll 4
    for (int j = begin; j < begin + top_k; j++) {
      const int other = expert[j] - first_expert;
      if (other < 0 || other >= experts) continue;
      move += (other < own || (other == own && j < i) ? 1 : 0) - (j < i ? 1 : 0);
    }
    return move;
  }
  __device__ int move_in_list(int i, int own) const {
    const int own_token = token[i];
    int move = 0;
#pragma unroll 1
    for (int j = 0; j < count; j++) {
      const int other = expert_at(j);
      if (other < 0) continue;
      const int t = token[j];
      const bool same = t == own_token;
      const bool first = t < own_token || (same && other < own) || (same && other == own && j < i);
      move += (first ? 1 : 0) - (j < i ? 1 : 0);
    }
    return move;
  }
  /// The number of pairs with tokens from `first` on, by a walk through all slots.
  __device__ int pairs_from(int first) const {
    int pairs = 0;
#pragma unroll 1
    for (int j = 0; j < count; j++) pairs += expert_at(j) >= 0 && token[j] >= first ? 1 : 0;
    return pairs;
  }
};

/// Numbers of pairs, whose slots are in the order of places. They are below 2^31, because the
/// number of slots is.
struct CountSums {
  int before;   // this thread's slot
  int through;  // up to the end of this block's rank
  int all;
};
/// All threads of a block must call it, with the block's chunk in the order of places and the
/// number of pairs of the thread's own slot, 0 or 1.
__device__ CountSums sum_counts(const PairParams& p, int chunk, int own) {
  const int chunks = p.ranks * p.chunks;
  const int first = p.rank * p.chunks;
  const int end = (chunk / p.chunks + 1) * p.chunks;
  int values[4] = {0, 0, 0, own};
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    const int count = p.pair_counts[i + first < chunks ? i + first : i + first - chunks];
    values[0] += i < chunk ? count : 0;
    values[1] += i < end ? count : 0;
    values[2] += count;
  }
  int totals[4];
  block_prefix<kThreads>(values, totals);
  return {totals[0] + values[3], totals[1], totals[2]};
}

__global__ void __launch_bounds__(kThreads)
    sum_pairs_kernel(const PairParams p, std::int64_t* total) {
  const CountSums sums = sum_counts(p, 0, 0);
  if (threadIdx.x == 0) *total = sums.all;
}

/// kSlots: list_pairs(), kPositions: list_positions().
enum class PairOrder { kSlots, kPositions };

/// Writes the token_offsets of one rank's tokens from `out` on; `i` is the thread's slot.
__device__ void write_offsets(const PairParams& p, const SentSlots& slots, int i,
                              const CountSums& sums, int rows, std::int32_t* out) {
  const std::int64_t threads = std::int64_t{p.chunks} * kThreads;
  if (slots.top_k == 0) {
    for (std::int64_t t = i; t < p.max_tokens; t += threads) {
      out[t] = min(sums.through - slots.pairs_from(static_cast<int>(t)), rows);
    }
    return;
  }
  if (i < slots.count && i % slots.top_k == 0) out[i / slots.top_k] = min(sums.before, rows);
  const std::int64_t used = slots.count / slots.top_k;
  for (std::int64_t t = used + i; t < p.max_tokens; t += threads) {
    out[t] = min(sums.through, rows);
  }
}

/// Writes the list of pairs, a block for each chunk of each rank, ranks in the order of places. In
/// the order of slots a pair's index is the number of pairs in the chunks before its chunk, plus
/// the number of pairs before it in its chunk. So the list does not depend on timing. All blocks
/// agree whether the routing is lost. If it is not, the lists of slots are complete, and each index
/// below out.rows has one pair or is past the last one, even if a fault comes meanwhile.
template <PairOrder kOrder>
__global__ void __launch_bounds__(kThreads)
    list_pairs_kernel(const PairParams p, const PairList out, std::int32_t* token_offsets,
                      const __grid_constant__ Peers peers, const WaitLimits limits) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int place = static_cast<int>(blockIdx.x) / p.chunks;
  const bool lost = p.control->routing_lost != 0;
  const SentSlots slots(p, (p.rank + place) % p.ranks, lost);
  const int i =
      (static_cast<int>(blockIdx.x) - place * p.chunks) * kThreads + static_cast<int>(threadIdx.x);
  const auto rows = static_cast<int>(out.rows);
  const int expert = slots.expert_at(i);
  const bool listed = expert >= 0;
  // Before the sums, so that the loads of all three overlap.
  const float weight = listed ? slots.weight[i] : 0.0f;
  const int move = kOrder == PairOrder::kPositions && listed ? slots.move_of(i, expert) : 0;
  CountSums sums = sum_counts(p, static_cast<int>(blockIdx.x), listed ? 1 : 0);
  if (lost) sums = {0, 0, 0};
  if (sums.all > rows && blockIdx.x == 0 && threadIdx.x == 0) {
    give_up(peers, limits, FaultCode::pack(kFaultOverflow, kPhaseRouting, peers.rank), peers.rank,
            sums.all);
  }
  if constexpr (kOrder == PairOrder::kPositions) {
    write_offsets(p, slots, i, sums, rows, token_offsets + place * p.max_tokens);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      token_offsets[p.ranks * p.max_tokens] = min(sums.all, rows);
    }
  }
  const int row = sums.before + move;
  if (listed && row < rows) {
    out.token[row] = static_cast<std::int32_t>(place * p.max_tokens + slots.token_at(i));
    out.expert[row] = expert;
    out.weight[row] = weight;
    out.slot[row] = i;
  }
  for (std::int64_t empty =
           sums.all + static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       empty < rows; empty += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    out.token[empty] = -1;
    out.expert[empty] = -1;
    out.weight[empty] = 0.0f;
    out.slot[empty] = -1;
  }
}

PairParams pair_params(const PairWork& w) {
  const ExchangeLayout layout = exchange_layout(w.shape);
  const Peers& p = w.peers;
  return {{p.own<std::int32_t>(layout.slot_token), p.own<std::int32_t>(layout.slot_expert),
           p.own<float>(layout.slot_weight)},
          p.own<Control>(layout.control),
          p.own<std::int32_t>(layout.pair_counts),
          w.shape.max_slots,
          w.shape.max_tokens,
          static_cast<std::int32_t>(chunks_of(w.shape)),
          p.ranks,
          p.rank,
          static_cast<std::int32_t>(p.rank * w.experts_per_rank),
          static_cast<std::int32_t>(w.experts_per_rank)};
}

template <class Kernel>
void launch_list(const PairWork& work, const PairList& list, Kernel kernel,
                 std::int32_t* token_offsets, cudaStream_t stream) {
  const PairParams params = pair_params(work);
  launch_dependent(*work.device, "launching the list of pairs", kernel,
                   {static_cast<unsigned>(params.ranks * params.chunks), kThreads}, stream, params,
                   list, token_offsets, work.peers, work.limits);
}

/// take_score_grads(). Blocks are small enough to run on a multiprocessor together with a block of
/// a weight gradient.
__global__ void __launch_bounds__(kBesideThreads, kBesideBlocks)
    take_score_grads_kernel(const __grid_constant__ Peers peers, const SlotSource slots,
                            const float* sent, const SlotView out) {
  const bool fault = has_fault(peers);
  for (std::int64_t i = blockIdx.x * kBesideThreads + threadIdx.x; i < slots.count;
       i += gridDim.x * kBesideThreads) {
    const float value = slots[i].expert < 0 ? 0.0f : sent[i];
    out.weight(out.offset(i)) = fault ? __int_as_float(0x7fffffff) : value;
  }
}

}  // namespace

void mark_ranks(const Device& device, const OwnSlots& slots, std::uint64_t* masks,
                cudaStream_t stream) {
  if (slots.tokens == 0) return;
  const char* what = "launching the ranks of tokens";
  auto* words = reinterpret_cast<unsigned long long*>(masks);
  const SlotSource source = slot_source(slots);
  if (slots.top_k != 0) {
    launch_dependent(device, what, mark_ids_kernel, {blocks_of(slots.tokens), kThreads}, stream,
                     source, words);
    return;
  }
  check_cuda(cudaMemsetAsync(masks, 0, slots.tokens * sizeof(std::uint64_t), stream), what);
  launch_dependent(device, what, mark_pairs_kernel, {blocks_of(slots.count), kThreads}, stream,
                   source, words);
}

void send_slots(const Device& device, const Peers& peers, const ExchangeShape& shape,
                const OwnSlots& slots, cudaStream_t stream) {
  const ExchangeLayout layout = exchange_layout(shape);
  const std::int64_t first = peers.rank * shape.max_slots * 4;
  launch_dependent(
      device, "launching the exchange of routing", send_slots_kernel,
      {static_cast<unsigned>(chunks_of(shape)), kThreads}, stream, peers, slot_source(slots),
      ListOffsets{layout.slot_token + first, layout.slot_expert + first, layout.slot_weight + first,
                  layout.pair_counts + peers.rank * chunks_of(shape) * 4});
}

void sum_pairs(const PairWork& work, std::int64_t* total, cudaStream_t stream) {
  launch("launching the number of pairs", sum_pairs_kernel, 1, kThreads, stream, pair_params(work),
         total);
}

void list_pairs(const PairWork& work, const PairList& list, cudaStream_t stream) {
  launch_list(work, list, list_pairs_kernel<PairOrder::kSlots>, nullptr, stream);
}

void list_positions(const PairWork& work, const PairList& list, std::int32_t* token_offsets,
                    cudaStream_t stream) {
  launch_list(work, list, list_pairs_kernel<PairOrder::kPositions>, token_offsets, stream);
}

void take_score_grads(const Peers& peers, const ExchangeShape& shape, const OwnSlots& slots,
                      const Tensor& out, cudaStream_t stream) {
  if (slots.count == 0) return;
  constexpr std::int64_t kSlots = 8 * kBesideThreads;  // of a block
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>((slots.count + kSlots - 1) / kSlots, 1024));
  launch("launching the gradients of routing weights", take_score_grads_kernel, blocks,
         kBesideThreads, stream, peers, slot_source(slots),
         peers.own<float>(exchange_layout(shape).score_grads), slot_view(out));
}

void load_slot_kernels() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(mark_pairs_kernel),
        reinterpret_cast<const void*>(mark_ids_kernel),
        reinterpret_cast<const void*>(send_slots_kernel),
        reinterpret_cast<const void*>(sum_pairs_kernel),
        reinterpret_cast<const void*>(list_pairs_kernel<PairOrder::kSlots>),
        reinterpret_cast<const void*>(list_pairs_kernel<PairOrder::kPositions>),
        reinterpret_cast<const void*>(take_score_grads_kernel)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

}  // namespace sonicmoe::cuda
