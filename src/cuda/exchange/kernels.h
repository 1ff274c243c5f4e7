// Launches of the exchange's kernels. Each kernel waits only for earlier work on its `stream`;
// wait_for() also waits for other ranks.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "cuda/exchange/layout.h"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {

/// Increments this rank's epoch of each phase in `phases`, a sum of phase_bit(). The other ranks do
/// not see the new epoch until announce() of exchange.h or a push kernel announces it.
void begin_phases(const Device& device, const Peers& peers, std::uint32_t phases,
                  cudaStream_t stream);
/// As announce() of exchange.h, but always by a kernel.
void announce_by_kernel(const Device& device, const Peers& peers, Phase phase, cudaStream_t stream);
/// Begins the next epoch of a phase and announces it to all ranks.
void signal(const Device& device, const Peers& peers, Phase phase, cudaStream_t stream);

struct WaitLimits {
  std::int64_t nanoseconds;
  FaultRecord* record;  ///< device address of the pinned record
};
/// What wait_for() waits for.
struct Awaited {
  Phase phase;
  std::uint64_t from = ~std::uint64_t{0};  ///< bit r: the announcement of rank r
  /// A count in this GPU's memory, 0 before the launch, which the wait increments by a release once
  /// the announcements have come, before it lets the next kernel start, also after a fault.
  unsigned* arrival = nullptr;
};
/// Makes `stream` wait until the ranks `from` have announced this rank's current epoch of the
/// phase. After the time limit, or if another rank has a fault, the kernel records the fault,
/// alarms all ranks and ends. The kernel may read the epoch before the previous kernel in `stream`
/// is complete. So that previous kernel must not be the one that begins the epoch: an earlier
/// kernel must begin it.
///
/// The next kernel may start before this kernel is complete. Only if it waits for this kernel, or
/// first acquires `arrival`, may it read what other ranks have sent.
void wait_for(const Device& device, const Peers& peers, const Awaited& awaited,
              const WaitLimits& limits, cudaStream_t stream);

/// Waits for kPhaseFree of all ranks, announces kPhaseReady, waits until all ranks have announced
/// it, and announces kPhaseStarted. So the ranks begin to send within a few microseconds. An
/// earlier kernel must begin the epochs.
void meet(const Device& device, const Peers& peers, const WaitLimits& limits, cudaStream_t stream);

/// This rank's routing, one entry for each slot.
struct OwnSlots {
  Tensor expert;  ///< ids (T, K), or the expert of each pair
  Tensor token;   ///< of each pair; absent: slot / top_k
  Tensor weight;
  std::int64_t top_k;   ///< of ids; 0: a list of pairs, which may be empty and without addresses
  std::int64_t count;   ///< slots
  std::int64_t tokens;  ///< T of this rank
  std::int64_t experts;
  std::int64_t experts_per_rank;
};
/// Sets bit r of masks[t] if rank r owns an expert of token t, else clears it.
void mark_ranks(const Device& device, const OwnSlots& slots, std::uint64_t* masks,
                cudaStream_t stream);
/// Writes this rank's slots to the buffers of all ranks, with their number and K, and to each rank
/// the number of its pairs in each chunk of them. Then announces kPhaseRouting.
void send_slots(const Device& device, const Peers& peers, const ExchangeShape& shape,
                const OwnSlots& slots, cudaStream_t stream);

/// The pairs of this rank: the slots of all ranks whose expert this rank owns. list_pairs() puts
/// them in the order (Peers::place() of the rank, slot), list_positions() in the order (place,
/// token, expert, slot), which is that of positions (Metadata).
struct PairList {
  std::int32_t* token;   ///< (rows) Peers::place() of its rank * max_tokens + its index on that
                         ///< rank; -1 past the last pair
  std::int32_t* expert;  ///< (rows) index among this rank's experts
  float* weight;         ///< (rows)
  std::int32_t* slot;    ///< (rows) index of the slot on the sending rank
  std::int64_t rows;
};
struct PairWork {
  const Device* device;
  Peers peers;
  ExchangeShape shape;
  std::int64_t experts_per_rank;
  WaitLimits limits;
};
/// Writes the number of pairs, which the other ranks have counted, to `total`.
void sum_pairs(const PairWork& work, std::int64_t* total, cudaStream_t stream);
/// Fills the list, behind a wait_for() kPhaseRouting. If there are more pairs than list.rows, it
/// records a fault and alarms all ranks; the list then has the first list.rows pairs. If the wait
/// ended with a fault, the list is empty.
void list_pairs(const PairWork& work, const PairList& list, cudaStream_t stream);
/// As list_pairs(), in the order of positions. Writes also token_offsets (W * max_tokens + 1): the
/// number of pairs before each token, at most list.rows.
///
/// The slots of ids are in token order, so a thread looks only at the K slots of its token. If a
/// rank has sent a list of pairs instead, a thread looks at all of the rank's slots: a list of
/// 65536 pairs then takes milliseconds.
void list_positions(const PairWork& work, const PairList& list, std::int32_t* token_offsets,
                    cudaStream_t stream);

/// Rows of `hidden` elements of 16 bits. `hidden` is a multiple of 8.
struct RowSource {
  const void* data;
  std::int64_t stride;  ///< elements
  std::int64_t rows;
  std::int64_t hidden;
};
/// Where push_rows() sends rows, and the phase that announces them.
struct RowTarget {
  std::int64_t offset;  ///< bytes, of an array (W, max_tokens, d) in each rank's buffer
  Phase phase;
};
/// Copies row t of `source` to each other rank whose bit is set in masks[t] (mark_ranks()), then
/// announces the phase to all other ranks. The kernel announces by itself: a kernel behind it could
/// not start before running products leave a multiprocessor free.
void push_rows(const Peers& peers, const ExchangeShape& shape, const RowSource& source,
               const RowTarget& target, int multiprocessors, cudaStream_t stream);
/// Copies this rank's rows into the array at byte `offset` of its own buffer. Tiles with rows of
/// several ranks, and weight gradients, read the rows of all ranks there.
void copy_own_rows(const Peers& peers, const RowSource& source, std::int64_t offset,
                   cudaStream_t stream);

/// Partial sums (W * max_tokens, d), and the tokens whose sums are sent: a part of the tokens of
/// the rank at `place`.
struct PartialSource {
  const void* data;
  std::int64_t hidden;                ///< d
  const std::int32_t* token_offsets;  ///< of Metadata: which tokens have rows; null: none has
  TokenPart part;
  std::int32_t place;
};
/// Copies the partial sum of each token that has a row to the token's rank, then announces the
/// part's phase to that rank.
void push_partials(const Peers& peers, const ExchangeShape& shape, const PartialSource& source,
                   int multiprocessors, cudaStream_t stream);
/// Sends the gradient of each pair's routing weight to its slot, on the rank that sent the pair,
/// then announces kPhaseScores to all other ranks. `list` has room for rows.
void push_score_grads(const Peers& peers, const ExchangeShape& shape, const PairList& list,
                      const float* grads, cudaStream_t stream);

/// Describes the partial sums that other ranks have sent to this rank, for the kernels that add
/// them to this rank's own partial sums. Their rows have `hidden` elements, which may be fewer than
/// shape.hidden.
RankSums other_sums(const Peers& peers, const ExchangeShape& shape, std::int64_t hidden);
/// out[t] = r(sum of the partial sums of the ranks in masks[t], in rank order); NaN after a fault.
/// For a rank that has no partial sums of its own.
void sum_partials(const Peers& peers, const ExchangeShape& shape, const Tensor& out,
                  cudaStream_t stream);
/// out[slot] = the gradient that the rank of the slot's expert has sent; 0 for empty slots, NaN
/// after a fault.
void take_score_grads(const Peers& peers, const ExchangeShape& shape, const OwnSlots& slots,
                      const Tensor& out, cudaStream_t stream);

/// Load all kernels of a file now. Otherwise the first launch of a kernel would load it, and
/// loading may wait until the device is idle. If a kernel of another rank ran there and waited for
/// the result of this launch, neither would end (deadlock).
void load_signal_kernels();
void load_slot_kernels();
void load_row_kernels();

}  // namespace sonicmoe::cuda
