// An engine multiplies: it turns products into launches for the architectures that it serves. A new
// one is a folder beside hopper/ and a row in engines() (engine.cc).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

struct Device;

/// Compute capabilities as major * 10 + minor; 90 is an H100 or H200.
struct Capabilities {
  int first;
  int last;
  constexpr bool contain(int capability) const { return first <= capability && capability <= last; }
};

/// What an engine declares to serve. The layer refuses the rest by a sentence, before any launch.
struct Service {
  Capabilities capabilities;
  checks::DTypes dtypes;
  std::int64_t multiple;  ///< d and n are multiples of it
};

/// The order of backward's launches, chosen for what the engine can overlap.
struct BackwardOrder {
  /// dX~ before the weight gradients, so that the sums into dX run beside these.
  bool input_grad_first;
  /// Tokens of dX that are summed beside dW2; the others are summed beside dW1.
  std::int64_t tokens_beside_down_grad;
  /// What the weight gradients are told to leave room for.
  Companion companion;
};

struct Engine {
  const char* name;
  Service service;
  /// Columns of A that one partial dot product of ActivateGrad covers.
  std::int64_t weight_grad_columns;

  /// The state of one device (driver functions, what was prepared), kept by its handle.
  std::shared_ptr<void> (*open)(int ordinal);
  BackwardOrder (*backward_order)(const Problem& problem, const BackwardArgs& args);
  void (*multiply_rows)(const Device& device, const RowProduct& product, cudaStream_t stream);
  void (*multiply_depth)(const Device& device, const DepthProduct& product, cudaStream_t stream);
  /// The tile of each product of a layer whose gate and up are apart, for people to read.
  std::vector<TileChoice> (*describe)(const Problem& problem);

  /// Partial dot products of a row in ActivateGrad.
  std::int32_t weight_grad_parts(const Problem& problem) const {
    return static_cast<std::int32_t>((problem.width + weight_grad_columns - 1) /
                                     weight_grad_columns);
  }
};

/// Every engine of the build; where two serve a device, the first one is taken.
std::span<const Engine* const> engines();

/// The engine of a compute capability among `candidates`, null where none serves it.
const Engine* engine_for(int capability, std::span<const Engine* const> candidates = engines());

/// The engine of exec's device. Sizes and plans that are asked for without a device are those of
/// the first engine.
const Engine& engine_of(const Exec& exec);

}  // namespace sonicmoe::cuda
