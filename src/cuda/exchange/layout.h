// The layout of a symmetric buffer. It is the same on every rank. So the address of another rank's
// buffer is enough to find every array in it.
#pragma once

#include <array>
#include <cstdint>

#include "core/exchange_limits.h"
#include "sonicmoe/exchange.h"

namespace sonicmoe::cuda {

/// The phases of a step. When a rank has finished its part of a phase for another rank, it
/// announces the phase to that rank by a flag. A rank's buffer has one flag for each phase and
/// sending rank. The comments say which data have then arrived.
enum Phase : std::int32_t {
  kPhaseRouting,       ///< lists of slots
  kPhaseReady,         ///< nothing: the rank is about to send rows (kCopy, more than two ranks)
  kPhaseStarted,       ///< nothing: the rank's copy engines have begun to send rows (kCopy)
  kPhaseRows,          ///< rows of x; in backward rows of dout
  kPhaseAgain,         ///< backward: rows of x
  kPhasePartials,      ///< partial sums of the first part of the tokens (token_parts())
  kPhaseMorePartials,  ///< partial sums of the other tokens
  kPhaseScores,        ///< gradients of routing weights
  kPhaseFree,          ///< the layer has read all rows: the next step may overwrite them
  kPhaseCount,
};

constexpr std::uint32_t phase_bit(Phase phase) { return 1u << phase; }

/// How far a kernel is that sends; 0 before and after each launch.
struct PushProgress {
  std::uint32_t taken;  ///< rows that its warps have taken
  std::uint32_t ended;  ///< blocks
};

/// The flags at the beginning of a symmetric buffer. The epoch of a phase is the number of times
/// that the rank has begun it (begin_phases(), signal()). A flag holds the last epoch that its rank
/// has announced, and during steps it only grows. A waiting rank waits until the flag has reached
/// its own epoch of the phase. Only exchange_open() and exchange_reset() set flags to 0.
struct Control {
  // Written by other ranks: entry r by rank r.
  std::uint32_t flags[kPhaseCount][kMaxRanks];
  std::uint32_t alarms[kMaxRanks];  ///< FaultCode of a rank that has a fault; 0: it has none
  std::int32_t slots[kMaxRanks];    ///< length of a rank's list of slots
  std::int32_t top_k[kMaxRanks];    ///< slots of a token; 0: a list of pairs in any order
  // Written by this rank.
  std::uint32_t epochs[kPhaseCount];
  /// The value that the copy engines copy to the flags: the epoch, or after a fault the previous
  /// epoch, so that nothing is announced.
  std::uint32_t announced[kPhaseCount];
  std::uint32_t fault;  ///< FaultCode of this rank
  /// 1: the last wait for kPhaseRouting ended with a fault, so the lists of slots may be
  /// incomplete; 0: all of them have come.
  std::uint32_t routing_lost;
  PushProgress push_slots;   ///< of slots, on the caller's stream
  PushProgress push;         ///< of rows and partial sums, on the sending stream
  PushProgress push_scores;  ///< of gradients of routing weights, on the stream `aside`
  std::uint64_t deadline;    ///< of the rows of a product that waits for them (RowArrivals)
  std::uint32_t late;        ///< 1 + the rank for whose rows a product has waited too long; 0: none
};

/// The kind of a fault; fault_sentence() has the text.
enum FaultKind : std::uint32_t { kFaultNone, kFaultMissing, kFaultOverflow };

/// Kind, phase and the rank that caused the fault, as one word; 0 means no fault.
struct FaultCode {
  std::uint32_t kind, phase, rank;

  static constexpr std::uint32_t pack(std::uint32_t kind, std::uint32_t phase, std::uint32_t rank) {
    return kind << 24 | phase << 16 | rank;
  }
  static constexpr FaultCode unpack(std::uint32_t code) {
    return {code >> 24, code >> 16 & 0xff, code & 0xffff};
  }
};

/// A fault for the host, in pinned host memory. The kernel that finds the fault writes it, `code`
/// last. The host reads it without waiting for the device.
struct FaultRecord {
  std::uint32_t code;
  std::uint32_t reporter;  ///< this rank if it found the fault, else the rank whose alarm it read
  std::int64_t rows;       ///< of an overflow
};

/// The slots of all ranks: a slot is a (token, expert, weight). Slot i of rank s lies at
/// s * max_slots + i.
struct SlotLists {
  std::int32_t* token;   ///< (W, max_slots) index among the tokens of the slot's rank
  std::int32_t* expert;  ///< (W, max_slots) index among all E experts; -1: empty
  float* weight;         ///< (W, max_slots)
};

/// Byte offsets into a symmetric buffer.
struct ExchangeLayout {
  std::int64_t control;
  std::int64_t slot_token, slot_expert, slot_weight;
  std::int64_t x;            ///< (W, max_tokens, d) in the order of Peers::place()
  std::int64_t dout;         ///< dO, with the shape and order of x
  std::int64_t partials;     ///< (W, max_tokens, d) by rank: its partial sums of this rank's tokens
  std::int64_t score_grads;  ///< (max_slots) fp32, each written by the rank of its expert
  std::int64_t pair_counts;  ///< (W, chunks_of()) this rank's pairs in each chunk of slots
  std::int64_t rank_masks;   ///< (max_tokens) bit q: rank q owns an expert; used by this rank only
  std::int64_t bytes;
};

ExchangeLayout exchange_layout(const ExchangeShape& shape);

/// A part of each rank's tokens: its partial sums are sent together and announced by `phase`. All
/// ranks have the same `first` and `count`.
struct TokenPart {
  std::int64_t first, count;
  Phase phase;
};
/// Divides a rank's tokens into two parts. With two ranks, the partial sums of the first part are
/// sent while the partial sums of the second part are computed. With more ranks the first part has
/// all tokens, because the partial sums of one rank are sent while those of the next rank are
/// computed.
inline std::array<TokenPart, 2> token_parts(const ExchangeShape& shape) {
  const std::int64_t first = shape.ranks == 2 ? shape.max_tokens / 2 : shape.max_tokens;
  return {{{0, first, kPhasePartials}, {first, shape.max_tokens - first, kPhaseMorePartials}}};
}

/// The number of slots that one block of send_slots() or list_pairs() processes.
inline constexpr std::int64_t kPairChunk = 1024;
/// The chunks of a rank's slots.
inline std::int64_t chunks_of(const ExchangeShape& shape) {
  return (shape.max_slots + kPairChunk - 1) / kPairChunk;
}

/// The symmetric buffers of all ranks; passed to kernels by value.
struct Peers {
  std::uint8_t* base[kMaxRanks];
  std::int32_t ranks;
  std::int32_t rank;

#if defined(__CUDACC__)
#define SONICMOE_HOST_DEVICE __host__ __device__
#else
#define SONICMOE_HOST_DEVICE
#endif
  /// The position of rank r's tokens in the arrays of rank `at`, in units of max_tokens. On each
  /// rank its own tokens come first, then the tokens of the next rank.
  SONICMOE_HOST_DEVICE std::int32_t place(std::int32_t r, std::int32_t at) const {
    return (r - at + ranks) % ranks;
  }
#undef SONICMOE_HOST_DEVICE

#if defined(__CUDACC__)
  template <class T>
  __device__ __forceinline__ T* at(int r, std::int64_t offset) const {
    return reinterpret_cast<T*>(base[r] + offset);
  }
  __device__ __forceinline__ Control* control(int r) const {
    return reinterpret_cast<Control*>(base[r]);
  }
#endif
  /// An array in this rank's own buffer.
  template <class T>
  T* own(std::int64_t offset) const {
    return reinterpret_cast<T*>(base[rank] + offset);
  }
};

}  // namespace sonicmoe::cuda
