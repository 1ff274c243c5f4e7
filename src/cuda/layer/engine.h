// An engine turns products into launches for the architectures that it serves. A new engine is a
// folder beside hopper/ and a row in engines() (cuda/engines.cc).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "cuda/layer/product.h"
#include "cuda/layer/steps.h"

namespace sonicmoe::cuda {

struct Device;

/// Compute capabilities as major * 10 + minor; 90 is an H100 or H200.
struct Capabilities {
  int first;
  int last;
  constexpr bool contain(int capability) const { return first <= capability && capability <= last; }
};

/// Devices, dtypes and sizes that an engine serves. The layer refuses all others before any launch.
struct Service {
  Capabilities capabilities;
  const char* devices;  ///< examples, for messages: "H100, H200"
  checks::DTypes dtypes;
  std::int64_t multiple;  ///< d and n must be multiples of this number
};

/// The order of backward's launches; it depends on which launches the engine can overlap.
struct BackwardOrder {
  /// dX~ comes before the weight gradients, so that the sums into dX run beside these. Allowed only
  /// if dx and at least one weight gradient are asked for.
  bool input_grad_first;
  /// Tokens of dX that are summed while dW2 runs; the others are summed while dW1 runs. 0 unless
  /// dX~ is first and both weight gradients are asked for.
  std::int64_t tokens_beside_down_grad;
  /// DepthProduct::companion of the weight gradients.
  Companion companion;
};

/// Launches that make the codes of Precision::kFp8.
struct Quantizers {
  void (*rows)(const Device& device, const QuantizeRows& work, cudaStream_t stream);
  /// Writes the buffer `fp8_weights` (fp8::WeightsLayout).
  void (*weights)(const Device& device, const Problem& problem, const Weights& weights,
                  const Buffer& out, cudaStream_t stream);
};

struct Engine {
  const char* name;
  Service service;
  /// Columns of A in one partial dot product of ActivateGrad, from which dS is summed.
  std::int64_t score_columns;

  /// Creates the engine's state for one device (driver functions, kernel attributes); the device
  /// handle owns it.
  std::shared_ptr<void> (*open)(int ordinal);
  /// Whether the engine computes rightly on an open device, by experiment: empty if so, else what
  /// differed, as "its product of ... was wrong in ...". Tests ask for the products whose names
  /// contain `only`; if it is empty, all are computed. Null: not in question.
  std::string (*probe)(const Device& device, std::string_view only) = nullptr;
  BackwardOrder (*backward_order)(const Problem& problem, const BackwardArgs& args);
  /// multiply_rows and multiply_depth launch one product. If one of them threw, the earlier steps
  /// of the pass would already be launched. So every engine must serve the epilogues of the passes
  /// (StoreOutput, Activate, ActivateGrad). For any other epilogue that it lacks it throws
  /// Error(kUnsupported) with the epilogue's name.
  void (*multiply_rows)(const Device& device, const RowProduct& product, cudaStream_t stream);
  void (*multiply_depth)(const Device& device, const DepthProduct& product, cudaStream_t stream);
  /// The thresholds of the engine's choices.h.
  std::span<const EngineChoice> choices{};
  /// The tile of each product as text, for a layer with split gate and up (`sonicmoe plan`).
  std::vector<TileChoice> (*describe)(const Problem& problem);
  /// Null: the engine has no FP8. No product that it gets then has scales.
  const Quantizers* quantizers = nullptr;
  /// Whether FP8 was measured to be faster than bf16 for large problems ("auto" takes it).
  bool fast_fp8 = false;
  /// Whether products with scales take a low-rank term.
  bool adds_factors_to_codes = false;
  /// Whether gathered row products take RowOperand::arrivals.
  bool awaits_rows = false;
  /// Launches a product of packed weights that unpacks them itself, without memory for unpacked
  /// ones; false if the engine has no such product for this device, format, dtype or order. Null:
  /// it has none. The layer then unpacks some experts at a time.
  bool (*multiply_packed_rows)(const Device& device, const PackedProduct& work,
                               cudaStream_t stream) = nullptr;

  /// Number of partial dot products of a row in ActivateGrad.
  std::int32_t score_tiles(const Problem& problem) const {
    return static_cast<std::int32_t>((problem.width + score_columns - 1) / score_columns);
  }
};

/// "9.0 (H100, H200)".
std::string served_by(const Engine& engine);

}  // namespace sonicmoe::cuda
