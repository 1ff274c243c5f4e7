// A backend as the core sees it: a name, a few facts and a table of functions. The public functions
// check every argument (core/checks.h), then call the table of Exec's backend, so a backend may
// assume well-formed arguments. Adding a backend is a value of Backend, a table and a row in
// src/backends.cc.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/exchange_step.h"
#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "sonicmoe/routing.h"

namespace sonicmoe {

/// A product of the layer and, as text, the tile with which the backend computes it.
struct TileChoice {
  const char* kernel;
  std::string tile;
};

/// A number by which an engine chooses between two ways, with the reason.
struct EngineChoice {
  const char* name;
  std::int64_t value;
  const char* reason;
};

/// An engine of a backend: code that computes products on a device. A build may have several.
struct EngineInfo {
  const char* name;    ///< "hopper"
  std::string serves;  ///< "9.0 (H100, H200)"
  std::span<const EngineChoice> choices;
};

/// If a function is null, the backend does not serve its call, and serve() refuses the call by
/// name. moe_sizes, layer_tiles, refusal and the functions named *_bytes launch nothing: for them
/// Exec::device may be null (the default engine) or a handle of device_model(). Calls that launch
/// kernels need a device that is present.
struct BackendTable {
  const char* name = nullptr;
  /// The alignment of a call's buffers, in bytes.
  std::int64_t buffer_alignment = 0;
  /// Opens a device and returns an immutable handle for Exec::device, which device_close frees.
  /// `engine` is a name of engines(), or null for the backend's choice. A backend without devices
  /// has no such function.
  void* (*device_open)(std::int32_t ordinal, const char* engine) = nullptr;
  void (*device_close)(void* device) = nullptr;

  /// A handle for the sizes and plans of a device that need not be present; launches refuse the
  /// handle. `capability` is a compute capability (90 is 9.0). Returns null if this build has no
  /// kernels for it.
  const void* (*device_model)(std::int32_t capability) = nullptr;
  /// The engines of this build; the first that serves a device is the default.
  std::vector<EngineInfo> (*engines)() = nullptr;
  /// The name of the engine that computes products on a device: "hopper".
  const char* (*engine_name)(const void* device) = nullptr;
  /// One sentence: why this is not the engine that was asked for; empty if it is.
  const char* (*engine_note)(const void* device) = nullptr;
  /// The architectures for which the build has device code: "sm_80 sm_90".
  const char* (*code_names)() = nullptr;

  /// Whether large layers are faster in fp8 than in bf16 on the device of `exec`. If not, or
  /// without such a function, auto_precision() never gives kFp8.
  bool (*fast_fp8)(const Exec& exec) = nullptr;

  /// The tiles of a problem whose gate and up do not alternate. A backend without fixed tiles has
  /// no such function.
  std::vector<TileChoice> (*layer_tiles)(const Problem& problem, const Exec& exec) = nullptr;
  /// Why the device of `exec` cannot compute a problem that is well formed; empty if it can. A
  /// backend that can compute all problems has no such function.
  std::string (*refusal)(const Problem& problem, const Exec& exec) = nullptr;

  Sizes (*moe_sizes)(const Problem& problem, Pass pass, const Exec& exec) = nullptr;
  /// H at `data`: (C, G, n), or (C, 2n) where gate and up alternate.
  Tensor (*h_rows)(const Problem& problem, const Weights& weights, void* data) = nullptr;
  /// Writes the buffer of core/fp8_layout.h. A backend without Precision::kFp8 has no such
  /// function.
  void (*quantize_weights)(const Problem& problem, const Weights& weights, const Buffer& out,
                           const Exec& exec) = nullptr;
  void (*unpack_weights)(const PackedWeights& packed, const Tensor& out,
                         const Exec& exec) = nullptr;
  /// Forward and backward are called only with a problem that moe_sizes has accepted, and with
  /// buffers of its sizes.
  void (*moe_forward)(const Problem& problem, const ForwardArgs& args, const Exec& exec) = nullptr;
  void (*moe_backward)(const Problem& problem, const BackwardArgs& args,
                       const Exec& exec) = nullptr;
  /// The same on packed weights.
  void (*packed_forward)(const Problem& problem, const ForwardArgs& args, const PackedLayer& packed,
                         const Exec& exec) = nullptr;
  void (*packed_backward)(const Problem& problem, const BackwardArgs& args,
                          const PackedLayer& packed, const Exec& exec) = nullptr;

  std::int64_t (*grouped_gemm_scratch_bytes)(std::int64_t rows, std::int64_t experts) = nullptr;
  void (*grouped_gemm)(const GroupedGemm& args, const Exec& exec) = nullptr;
  void (*grouped_gemm_k)(const GroupedGemmK& args, const Exec& exec) = nullptr;

  void (*route)(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                const Tensor& weights, const Exec& exec) = nullptr;
  void (*route_backward)(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                         const Tensor& dweights, const Tensor& dlogits, const Exec& exec) = nullptr;

  std::int64_t (*round_scratch_bytes)(const RoundOptions& options, std::int64_t tokens,
                                      std::int64_t experts, const Exec& exec) = nullptr;
  void (*token_round)(const RoundOptions& options, const Tensor& logits, const Pairs& pairs,
                      Buffer scratch, const Exec& exec) = nullptr;
  void (*token_round_backward)(const RoundOptions& options, const Tensor& logits,
                               const Pairs& pairs, const Tensor& dweight, const Tensor& dlogits,
                               Buffer scratch, const Exec& exec) = nullptr;

  std::int64_t (*expert_choice_scratch_bytes)(std::int64_t tokens, std::int64_t experts) = nullptr;
  void (*expert_choice)(const Tensor& logits, std::int64_t capacity, const Pairs& pairs,
                        Buffer scratch, const Exec& exec) = nullptr;
  void (*expert_choice_backward)(const Tensor& logits, const Pairs& pairs, const Tensor& dweight,
                                 const Tensor& dlogits, Buffer scratch, const Exec& exec) = nullptr;

  std::int64_t (*router_losses_scratch_bytes)(std::int64_t tokens, std::int64_t experts) = nullptr;
  void (*router_losses)(const RouteOptions& options, const Tensor& logits, const Tensor& ids,
                        const RouterLosses& out, Buffer scratch, const Exec& exec) = nullptr;
  void (*router_losses_backward)(const RouteOptions& options, const Tensor& logits,
                                 const Tensor& tokens_per_expert, const Tensor& dvalues,
                                 const Tensor& dlogits, const Exec& exec) = nullptr;

  std::int64_t (*exchange_bytes)(const ExchangeShape& shape, const Exec& exec) = nullptr;
  Exchange* (*exchange_open)(const ExchangeOptions& options, const Exec& exec) = nullptr;
  void (*exchange_close)(Exchange* exchange, const Exec& exec) = nullptr;
  /// The state of an open exchange.
  const ExchangeState& (*exchange_state)(const Exchange& exchange) = nullptr;
  void (*exchange_check)(Exchange& exchange, const Exec& exec) = nullptr;
  void (*exchange_reset)(Exchange& exchange, const Exec& exec) = nullptr;
  // The parts of a step, in order, with checked arguments.
  void (*exchange_begin)(Exchange& exchange, const ExchangeStep& step) = nullptr;
  std::int64_t (*exchange_rows)(Exchange& exchange) = nullptr;
  /// Keeps the step, whose rows and buffers are now known.
  void (*exchange_compute)(Exchange& exchange, const ExchangeStep& step) = nullptr;
  void (*exchange_finish)(Exchange& exchange) = nullptr;
  Sizes (*exchange_sizes)(const Exchange& exchange, const Problem& problem, std::int64_t rows,
                          Pass pass, const Exec& exec) = nullptr;
};

/// The functions below are in src/backends.cc, which stands above all backends.
///
/// "cpu", "cuda", and back; an unknown name is refused.
const char* backend_name(Backend backend);
Backend backend_from_name(const std::string& name);
/// Why this build has no CUDA backend; empty if it has one.
const char* cuda_absence();
/// Null where this build does not have it.
const BackendTable* find_backend(Backend backend);
/// Refuses an unknown backend and a backend that this build does not have.
const BackendTable& backend_table(Backend backend);

/// The backend's function for a call on `exec`. Refuses the call, by name, if the backend lacks it.
template <class F>
F serve(const Exec& exec, const char* name, F BackendTable::* function) {
  const BackendTable& table = backend_table(exec.backend);
  if (table.*function == nullptr) {
    throw Error(Status::kUnsupported, std::string(name) + " is not served by the backend " +
                                          table.name + ", must run on another");
  }
  return table.*function;
}

}  // namespace sonicmoe
