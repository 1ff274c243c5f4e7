// Calls of the C interface with all their memory, so that a call can be repeated from the same
// state and every byte that it was given can be compared.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "sonicmoe/c_api.h"

namespace sonicmoe::faults {

/// How a call uses a block of memory.
enum class Role { kInput, kResult, kScratch };

/// Buffers of the layer begin at a multiple of 256 bytes.
template <class T>
struct AlignedAllocator {
  using value_type = T;
  static constexpr std::align_val_t kAlignment{256};
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kAlignment)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kAlignment); }
  bool operator==(const AlignedAllocator&) const { return true; }
};
using Bytes = std::vector<std::uint8_t, AlignedAllocator<std::uint8_t>>;

struct Block {
  Role role;
  Bytes initial;  ///< the bytes before the call
  Bytes bytes;    ///< the bytes that the call sees
};

/// One call of the C interface and every byte that it may read or write.
class Call {
 public:
  explicit Call(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  /// Makes the call. Allocates nothing itself.
  smoe_status run() const { return invoke_(); }
  /// Puts every byte back to its state before the call.
  void reset();
  /// True if every byte has its state before the call.
  bool untouched() const;
  /// The bytes of all results, one block after the other.
  std::vector<std::uint8_t> results() const;
  bool has_results(const std::vector<std::uint8_t>& expected) const;

  /// Memory for the call; its present contents become the initial state in `ready`.
  Block* block(Role role, std::int64_t bytes);
  smoe_tensor* tensor(Role role, std::int32_t dtype, const std::vector<std::int64_t>& shape);
  /// A struct of the C interface that lives as long as the call, zero but for its size.
  template <class T>
  T* make() {
    auto memory = std::make_shared<T>();
    memory->size = sizeof(T);
    structs_.push_back(memory);
    return memory.get();
  }
  void ready(std::function<smoe_status()> invoke);

 private:
  std::string name_;
  std::deque<Block> blocks_;
  std::vector<std::shared_ptr<void>> structs_;
  std::function<smoe_status()> invoke_;
};

using CallPtr = std::unique_ptr<Call>;

/// A small random generator whose numbers are the same on every system.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  std::uint64_t bits();
  /// An integer of [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high);
  double normal();

 private:
  std::uint64_t state_;
};

struct LayerSpec {
  std::int32_t form = SMOE_FORM_IDS;
  std::int32_t dtype = SMOE_F32;
  std::int32_t activation = SMOE_SWIGLU;
  std::int32_t grad_mode = SMOE_GRAD_WRITE;
  std::int32_t threads = 1;
  std::int64_t tokens = 0, hidden = 0, width = 0, experts = 0, top_k = 2;
  std::int32_t bias = 0;  ///< 1: every bias and its gradient
  std::int32_t precision = SMOE_PRECISION_TENSORS;
  std::uint64_t seed = 1;
};
LayerSpec random_layer(Random& random);
std::string describe(const LayerSpec& spec);

/// `pass` is SMOE_INFERENCE, SMOE_FORWARD or SMOE_BACKWARD. For backward the forward has run.
CallPtr layer_call(const LayerSpec& spec, std::int32_t pass);
/// Quantising the weights of a layer in fp8.
CallPtr quantize_call(const LayerSpec& spec);
/// Unpacking weights of NF4 on three threads.
CallPtr unpack_call();
/// A forward call that must be refused: its output has one row too many.
CallPtr refused_call(const LayerSpec& spec);

enum class Router {
  kRoute,
  kRouteBackward,
  kRound,
  kRoundBackward,
  kExpertChoice,
  kExpertChoiceBackward,
  kLosses,
  kLossesBackward
};
inline constexpr int kRouterCalls = 8;

struct RouterSpec {
  std::int32_t dtype = SMOE_F32;
  std::int32_t score = SMOE_SCORE_SOFTMAX_AFTER_TOPK;
  std::int32_t mode = SMOE_ROUND_NEAREST;
  std::int32_t renormalize = 0;
  std::int32_t threads = 1;
  std::int64_t tokens = 0, experts = 0, top_k = 2, groups = 0, tile = 32;
  std::uint64_t seed = 1;
};
RouterSpec random_router(Random& random);
std::string describe(const RouterSpec& spec);

/// For a backward call the forward call that it needs has run.
CallPtr router_call(const RouterSpec& spec, Router which);

struct GemmSpec {
  std::int32_t dtype = SMOE_F32;
  std::int32_t gather = 0;  ///< 1: rows of a through an index
  std::int32_t threads = 1;
  std::int64_t rows = 0, experts = 0, n = 0, k = 0;
  std::uint64_t seed = 1;
};
GemmSpec random_gemm(Random& random);
enum class Grouped { kRows, kColumns };
CallPtr gemm_call(const GemmSpec& spec, Grouped which);

}  // namespace sonicmoe::faults
