// Launches of the exchange's kernels. Each runs on `stream` and waits for nothing but what comes
// before it there, except wait_for(), which waits for other ranks.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "cuda/exchange/layout.h"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {

/// Begins the next epoch of phases (a sum of phase_bit()), which announce() of exchange.h announces
/// later.
void begin_phases(const Device& device, const Peers& peers, std::uint32_t phases,
                  cudaStream_t stream);
/// Announces the phase's epoch to the other ranks by a kernel: everything before it in the stream
/// is visible to a rank that has waited for it. A rank that has given up announces nothing.
void announce_by_kernel(const Device& device, const Peers& peers, Phase phase, cudaStream_t stream);
/// Begins the next epoch of a phase and announces it to all ranks.
void signal(const Device& device, const Peers& peers, Phase phase, cudaStream_t stream);

struct WaitLimits {
  std::int64_t nanoseconds;
  FaultRecord* record;  ///< as the device sees it
};
/// Waits until every rank has announced this rank's epoch of `phase`. After the time limit, or when
/// another rank has given up, it writes the fault, alarms all ranks and ends. The kernel before it
/// must not begin the epoch.
void wait_for(const Device& device, const Peers& peers, Phase phase, const WaitLimits& limits,
              cudaStream_t stream);

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
/// masks[t]: which ranks own an expert of token t.
void mark_ranks(const Device& device, const OwnSlots& slots, std::uint64_t* masks,
                cudaStream_t stream);
/// Writes this rank's slots into the lists of every rank.
void send_slots(const Device& device, const Peers& peers, const ExchangeShape& shape,
                const OwnSlots& slots, cudaStream_t stream);

/// The slots of all ranks whose experts this rank owns, in order of (rank, slot).
struct PairList {
  std::int32_t* token;    ///< (rows) place of its rank * max_tokens + its number there; -1 past the
                          ///< last pair
  std::int32_t* expert;   ///< (rows) this rank's own number
  float* weight;          ///< (rows)
  std::int32_t* slot;     ///< (rows) slot of the sending rank
  std::uint8_t* has_row;  ///< (W * max_tokens) 1: the token has a pair
  std::int64_t rows;
};
struct PairWork {
  const Device* device;
  Peers peers;
  ExchangeShape shape;
  std::int64_t experts_per_rank;
  WaitLimits limits;
};
/// Counts the pairs; list_pairs() needs the counts, and zeros in list.has_row. `list` may be null.
void count_pairs(const PairWork& work, const PairList* list, cudaStream_t stream);
/// The number of pairs that count_pairs() has counted.
void sum_pairs(const PairWork& work, std::int64_t* total, cudaStream_t stream);
/// Pairs beyond `rows` are a fault: it is recorded and all ranks are alarmed. After an earlier
/// fault the list is empty.
void list_pairs(const PairWork& work, const PairList& list, cudaStream_t stream);

/// Rows of d elements of 16 bits, a multiple of 8.
struct RowSource {
  const void* data;
  std::int64_t stride;  ///< elements
  std::int64_t rows;
  std::int64_t hidden;
};
struct OwnRows {
  RowSource source;
  const std::int32_t* row_token;  ///< of Metadata, as the two below
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  std::int64_t experts;
};
/// Copies row t to every other rank of masks[t], into the array (W, max_tokens, d) at byte `offset`
/// of its buffer.
void push_rows(const Peers& peers, const ExchangeShape& shape, const RowSource& source,
               std::int64_t offset, int multiprocessors, cudaStream_t stream);
/// Copies the rows of `source`, this rank's tokens, that `list` has to the array at byte `offset`
/// of this rank's buffer: tiles with rows of several ranks read all of them there. Within an expert
/// of the list rows are in order of tokens, and this rank's come first.
void gather_own_rows(const Device& device, const Peers& peers, const OwnRows& own,
                     std::int64_t offset, cudaStream_t stream);

/// Partial sums (W * max_tokens, d) of which those of a part are sent.
struct PartialSource {
  const void* data;
  std::int64_t hidden;  ///< d
  const std::uint8_t* has_row;
  TokenPart part;
};
/// Copies the partial sums whose token has a row to the token's rank.
void push_partials(const Peers& peers, const ExchangeShape& shape, const PartialSource& source,
                   int multiprocessors, cudaStream_t stream);
/// Sends the gradient of each pair's routing weight to the slot that it came from.
void push_score_grads(const Peers& peers, const ExchangeShape& shape, const PairList& list,
                      const float* grads, cudaStream_t stream);

/// The partial sums of `hidden` elements that other ranks have sent, for sums that add them to this
/// rank's own. A layer may have fewer elements a row than the shape.
RankSums other_sums(const Peers& peers, const ExchangeShape& shape, std::int64_t hidden);
/// out[t] = r(sum over the ranks of masks[t], in rank order, of their partial sums), where this
/// rank has none. NaN after a fault.
void sum_partials(const Peers& peers, const ExchangeShape& shape, const Tensor& out,
                  cudaStream_t stream);
/// out[slot] = gradient that the expert's rank has sent; 0 for empty slots, NaN after a fault.
void take_score_grads(const Peers& peers, const ExchangeShape& shape, const OwnSlots& slots,
                      const Tensor& out, cudaStream_t stream);

/// Loads the kernels of each file. The first launch of a kernel that is loaded late may wait for
/// the device, on which another rank's kernel may be waiting for this one.
void load_signal_kernels();
void load_slot_kernels();
void load_row_kernels();

}  // namespace sonicmoe::cuda
