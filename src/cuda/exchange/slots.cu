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
    peers.control(static_cast<int>(threadIdx.x))->slots[peers.rank] = slots.count;
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
  const std::int32_t* slots;  // of each rank
  const std::int32_t* pair_counts;
  std::int64_t max_slots;
  std::int64_t max_tokens;
  std::int32_t chunks;  // of a rank
  std::int32_t ranks;
  std::int32_t first_expert;
  std::int32_t experts;  // of this rank

  /// The index among this rank's experts of the expert of slot i of rank s. Negative if there is no
  /// such slot, if it is empty, or if its expert belongs to another rank.
  __device__ int expert(int s, std::int64_t i) const {
    if (i >= min(static_cast<std::int64_t>(slots[s]), max_slots)) return -1;
    const int e = lists.expert[s * max_slots + i] - first_expert;
    return e < experts ? e : -1;
  }
};

/// The number of pairs in the chunks before chunk `block`, and in all `blocks` chunks. All threads
/// of a block must call it. The numbers are below 2^31, because the number of slots is.
struct CountSums {
  int before, all;
};
__device__ CountSums sum_counts(const std::int32_t* counts, int block, int blocks) {
  int values[2] = {};
  for (int b = threadIdx.x; b < blocks; b += kThreads) {
    const int count = counts[b];
    values[0] += b < block ? count : 0;
    values[1] += count;
  }
  int totals[2];
  block_prefix<kThreads>(values, totals);
  return {totals[0], totals[1]};
}

__global__ void __launch_bounds__(kThreads)
    sum_pairs_kernel(const std::int32_t* counts, int blocks, std::int64_t* total) {
  const CountSums sums = sum_counts(counts, 0, blocks);
  if (threadIdx.x == 0) *total = sums.all;
}

/// Writes the list of pairs, a block for each chunk of each rank. A pair's index is the number of
/// pairs in the chunks before its chunk, plus the number of pairs before it in its chunk. So the
/// list does not depend on timing.
__global__ void __launch_bounds__(kThreads)
    list_pairs_kernel(const PairParams p, const PairList out, const __grid_constant__ Peers peers,
                      const WaitLimits limits) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const int s = static_cast<int>(blockIdx.x) / p.chunks;
  const std::int64_t i =
      static_cast<std::int64_t>(blockIdx.x - s * p.chunks) * kPairChunk + threadIdx.x;
  // After a fault the list stays empty, because a late rank may still be writing its slots.
  const bool fault = has_fault(peers);
  const int expert = fault ? -1 : p.expert(s, i);
  const CountSums sums =
      sum_counts(p.pair_counts, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  if (sums.all > out.rows && blockIdx.x == 0 && threadIdx.x == 0) {
    give_up(peers, limits, FaultCode::pack(kFaultOverflow, kPhaseRouting, peers.rank), peers.rank,
            sums.all);
  }
  int count = 0;
  const std::int64_t row = sums.before + block_prefix<kThreads>(expert >= 0 ? 1 : 0, &count);
  if (expert >= 0 && row < out.rows) {
    const std::int64_t at = s * p.max_slots + i;
    const std::int64_t token = peers.place(s, peers.rank) * p.max_tokens + p.lists.token[at];
    out.token[row] = static_cast<std::int32_t>(token);
    out.expert[row] = expert;
    out.weight[row] = p.lists.weight[at];
    out.slot[row] = static_cast<std::int32_t>(i);
  }
  const int listed = fault ? 0 : sums.all;
  for (std::int64_t empty = listed + blockIdx.x * kThreads + threadIdx.x; empty < out.rows;
       empty += static_cast<std::int64_t>(gridDim.x) * kThreads) {
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
          p.own<Control>(layout.control)->slots,
          p.own<std::int32_t>(layout.pair_counts),
          w.shape.max_slots,
          w.shape.max_tokens,
          static_cast<std::int32_t>(chunks_of(w.shape)),
          p.ranks,
          static_cast<std::int32_t>(p.rank * w.experts_per_rank),
          static_cast<std::int32_t>(w.experts_per_rank)};
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
  const PairParams params = pair_params(work);
  launch("launching the number of pairs", sum_pairs_kernel, 1, kThreads, stream, params.pair_counts,
         params.ranks * params.chunks, total);
}

void list_pairs(const PairWork& work, const PairList& list, cudaStream_t stream) {
  const PairParams params = pair_params(work);
  launch_dependent(*work.device, "launching the list of pairs", list_pairs_kernel,
                   {static_cast<unsigned>(params.ranks * params.chunks), kThreads}, stream, params,
                   list, work.peers, work.limits);
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
  for (const void* kernel : {reinterpret_cast<const void*>(mark_pairs_kernel),
                             reinterpret_cast<const void*>(mark_ids_kernel),
                             reinterpret_cast<const void*>(send_slots_kernel),
                             reinterpret_cast<const void*>(sum_pairs_kernel),
                             reinterpret_cast<const void*>(list_pairs_kernel),
                             reinterpret_cast<const void*>(take_score_grads_kernel)}) {
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  }
}

}  // namespace sonicmoe::cuda
