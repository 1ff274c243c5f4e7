// What lies where in a symmetric buffer. Every rank has the same layout, so that a rank finds its
// place in another rank's buffer by that buffer's address alone.
#pragma once

#include <array>
#include <cstdint>

#include "core/exchange_limits.h"
#include "sonicmoe/exchange.h"

namespace sonicmoe::cuda {

/// What a flag announces. Each phase has one flag for each pair of ranks.
enum Phase : std::int32_t {
  kPhaseRouting,       ///< lists of slots
  kPhaseRows,          ///< rows of x, in backward of dout
  kPhaseAgain,         ///< rows of x in backward; a rank's own rows of dout and x
  kPhasePartials,      ///< partial sums of the first tokens of each rank (token_parts())
  kPhaseMorePartials,  ///< partial sums of its other tokens
  kPhaseScores,        ///< gradients of routing weights
  kPhaseFree,          ///< the layer has read all rows: the next step may overwrite them
  kPhaseCount,
};

constexpr std::uint32_t phase_bit(Phase phase) { return 1u << phase; }
/// Phases that a rank announces to itself too: its own rows of dout and x are then in its arrays.
inline constexpr std::uint32_t kOwnPhases = phase_bit(kPhaseAgain);

/// Begins a symmetric buffer. Flags count the steps of their phase (epochs), so a flag is never
/// reset: a rank waits until the flag has reached its own epoch of this phase.
struct Control {
  // Written by other ranks: entry r by rank r.
  std::uint32_t flags[kPhaseCount][kMaxRanks];
  std::uint32_t alarms[kMaxRanks];  ///< FaultCode of a rank that gave up, 0 if it did not
  std::int32_t slots[kMaxRanks];    ///< length of a rank's list of slots
  // Written by this rank.
  std::uint32_t epochs[kPhaseCount];
  /// What announcements by copy engines carry: the epoch. After a fault it is the epoch before, so
  /// that they announce nothing.
  std::uint32_t announced[kPhaseCount];
  std::uint32_t fault;  ///< FaultCode of this rank
};

/// Why a rank gave up; the text is in fault_sentence().
enum FaultKind : std::uint32_t { kFaultNone, kFaultMissing, kFaultOverflow };

/// Kind, phase and the rank to blame as one word; 0 is no fault.
struct FaultCode {
  std::uint32_t kind, phase, rank;

  static constexpr std::uint32_t pack(std::uint32_t kind, std::uint32_t phase, std::uint32_t rank) {
    return kind << 24 | phase << 16 | rank;
  }
  static constexpr FaultCode unpack(std::uint32_t code) {
    return {code >> 24, code >> 16 & 0xff, code & 0xffff};
  }
};

/// In pinned host memory, written by the kernel that finds a fault and read by the host without
/// waiting. `code` is written last.
struct FaultRecord {
  std::uint32_t code;
  std::uint32_t reporter;  ///< the rank that found it
  std::int64_t rows;       ///< of an overflow
};

/// The slots of all ranks: a slot is a (token, expert, weight). Slot i of rank s lies at
/// s * max_slots + i.
struct SlotLists {
  std::int32_t* token;   ///< (W, max_slots) the rank's own number of the token
  std::int32_t* expert;  ///< (W, max_slots) of all experts; -1: empty
  float* weight;         ///< (W, max_slots)
};

/// Byte offsets into a symmetric buffer.
struct ExchangeLayout {
  std::int64_t control;
  std::int64_t slot_token, slot_expert, slot_weight;
  std::int64_t x;            ///< (W, max_tokens, d) in the order of Peers::place()
  std::int64_t dout;         ///< likewise
  std::int64_t partials;     ///< (W, max_tokens, d) by rank: its partial sums of this rank's tokens
  std::int64_t score_grads;  ///< (max_slots) fp32, each written by the rank of its expert
  std::int64_t rank_masks;   ///< (max_tokens) bit q: rank q owns an expert of the token; local
  std::int64_t block_counts;  ///< slots of this rank's experts by block of list_pairs; local
  std::int64_t bytes;
};

ExchangeLayout exchange_layout(const ExchangeShape& shape);

/// Tokens of each rank whose partial sums travel together, and the phase that announces them.
struct TokenPart {
  std::int64_t first, count;
  Phase phase;
};
/// With two ranks a rank's tokens are two parts: the first partial sums travel, and are added,
/// while the others are computed. With more ranks the tokens of a part are not contiguous, and the
/// first part has all tokens.
inline std::array<TokenPart, 2> token_parts(const ExchangeShape& shape) {
  const std::int64_t first = shape.ranks == 2 ? shape.max_tokens / 2 : shape.max_tokens;
  return {{{0, first, kPhasePartials}, {first, shape.max_tokens - first, kPhaseMorePartials}}};
}

/// Slots that one block of the pair kernels looks at.
inline constexpr std::int64_t kPairChunk = 1024;
inline std::int64_t pair_blocks(const ExchangeShape& shape) {
  return (shape.ranks * shape.max_slots + kPairChunk - 1) / kPairChunk;
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
  /// Where the tokens of rank r lie at rank `at`, in units of max_tokens: a rank's own come first.
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
