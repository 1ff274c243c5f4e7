// The cost of a layer, by arithmetic alone: operations, bytes, time at the roofline, padding, and
// the memory that different methods keep for backward.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/configs.h"
#include "core/machines.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {

/// The problem of a shape, with routing by ids. Refuses what moe_forward would refuse, and K > E.
Problem problem_of(const LayerShape& shape, DType dtype, const Activation& activation);

/// Speed of the products A, Y, dH and dX~ of an fp8 layer relative to bf16. With this rate the plan
/// gives forward + backward of the layers with d >= 2048 and n >= 1024 in
/// benchmarks/results/h200/fp8.json the speed over bf16 that was measured, to 3 %.
inline constexpr double kFp8Rate = 1.5;

struct KernelCost {
  /// "A", "Y", "O", "dH", "dW2", "dX~", "dW1", "dX"; in fp8 also "q(X)" and "q(dO)".
  const char* name;
  bool backward = false;
  double flops = 0.0;
  double bytes = 0.0;  ///< every operand counts once; gathered X and dO count T rows, not R
  double seconds = 0.0;
  bool memory_bound = false;
};
/// The kernels of forward, then those of backward, with their time on `machine`. Engines differ in
/// the order of dW2, dX~ and dW1.
std::vector<KernelCost> kernel_costs(const Problem& problem, const Machine& machine);

/// The part of a layer that one GPU computes: `rows` routed rows of `tokens` tokens over `experts`
/// experts. These are means and need not be whole numbers.
struct LayerLoad {
  double tokens = 0.0, rows = 0.0, experts = 0.0;
};
/// kernel_costs for a part of a layer.
std::vector<KernelCost> load_costs(const Problem& problem, const LayerLoad& load,
                                   const Machine& machine);

/// Rows that padding every expert to a multiple of `tile` adds, divided by the routed rows. The T
/// tokens choose K of E experts evenly, so that an expert's rows are binomial(T, K/E).
double expected_padding(const LayerShape& shape, std::int64_t tile);

/// Bytes kept from forward to backward.
struct MemoryCost {
  std::int64_t x = 0;            ///< T*d: every method keeps it
  std::int64_t h = 0;            ///< ours: G*T*K*n elements; in fp8 codes and scales
  std::int64_t metadata = 0;     ///< ours: the size that moe_sizes gives
  std::int64_t fp8_weights = 0;  ///< quantised weights in fp8, else 0
  std::int64_t callers = 0;      ///< ids (int64), weights (fp32) and logits (dtype) of the router
  /// Gathered X, H, A and Y: T*K*(2d + (G+1)n), as grouped-GEMM layers under autograd keep.
  std::int64_t cache_everything = 0;
  /// Y, H, A and the activation's factors: T*K*(d + 2Gn). Backward gathers X again.
  std::int64_t scatter_style = 0;

  std::int64_t ours() const { return h + metadata; }
};
MemoryCost memory_cost(const Problem& problem);

/// Bytes of scratch that a backend needs, by pass. Scratch is free again when the call is done.
struct WorkspaceCost {
  std::int64_t forward = 0, backward = 0, inference = 0;
};
/// Needs no device. Refuses a backend that this build does not have.
WorkspaceCost workspace_cost(const Problem& problem, const Exec& exec);

/// The tile of each product by the kernel's name; empty for a backend without fixed tiles. Refuses
/// what workspace_cost refuses.
std::map<std::string, std::string> chosen_tiles(const Problem& problem, const Exec& exec);

/// The same layer at other granularities: n*K, E*n and the flops stay, K runs over powers of two.
std::vector<LayerShape> granularity_sweep(const LayerShape& shape);

}  // namespace sonicmoe
