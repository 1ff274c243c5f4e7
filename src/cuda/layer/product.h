// What a pass multiplies, in words that no kernel, tile or architecture occurs in. A pass builds
// products (forward.cc, backward.cc); an engine turns each into a launch (engine.h).
//
// Letters: C grouped rows (an upper bound that the host knows), E experts. Tensors are device
// memory; only shapes, strides and addresses are read on the host.
#pragma once

#include <cstdint>
#include <variant>

#include "cuda/metadata/metadata.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// How the grouped rows divide into experts, on the device.
struct RowGroups {
  const Metadata* lists;              ///< row blocks and row ranges of the experts
  const ExpertRecord* longest_first;  ///< (E) experts by falling number of rows; null: unsorted
  std::int64_t experts;               ///< E
  std::int64_t capacity;              ///< C
  std::int64_t mean_rows() const { return capacity / experts; }
};

/// Rows by index: row p of the product is row index[p] of `rows`, or row p where index is null.
struct RowOperand {
  Tensor rows;  ///< (T, width), (C, width) or (C, parts, width)
  const std::int32_t* index;
};

/// How the gate and up matrices of an expert make up one operand.
enum class WeightParts {
  kOne,            ///< `first` alone
  kSideBySide,     ///< output column j comes from gate and from up: the activation needs both
  kOneAfterOther,  ///< the depth runs through the gate's rows, then through up's
};

/// A matrix (columns, depth) an expert: D = rows * first[e]^T.
struct WeightOperand {
  Tensor first;   ///< (E, columns, depth); the gate of two
  Tensor second;  ///< up, same shape; absent for kOne
  WeightParts parts;
};

/// How gate and up lie in H, dH and in what is computed from them.
enum class GateLayout {
  kNone,         ///< no gate
  kSplit,        ///< (C, 2, n): the gate's n columns, then up's
  kInterleaved,  ///< (C, 2n): gate and up alternate
};

/// out = r(scale * (D + bias)).
struct StoreOutput {
  Tensor out;      ///< (C, columns)
  Tensor bias{};   ///< (E, columns) or absent
  Tensor scale{};  ///< (C) fp32 or absent
};

/// H = r(D + bias), A = r(act(H)).
struct Activate {
  Tensor h;          ///< (C, 2, n), (C, 2n) or (C, 1, n), by `layout`; absent at inference
  Tensor a;          ///< (C, n)
  Tensor bias_gate;  ///< (E, n) or absent
  Tensor bias_up;    ///< (E, n) or absent
  Activation activation;
  GateLayout layout;
};

/// With dA = D: dH = r(act'(H) * weight * dA), A' = r(weight * act(H)), and the dot products
/// <A, dA> of which a row's routing weight gradient is the sum.
struct ActivateGrad {
  Tensor h;                  ///< as Activate wrote it
  Tensor dh;                 ///< as h
  Tensor a;                  ///< (C, n) A'
  const float* row_weight;   ///< (C)
  float* weight_grad_parts;  ///< (C, parts): partial dot products, by tile of columns
  std::int32_t parts;        ///< Engine::weight_grad_parts()
  Activation activation;
  GateLayout layout;
};

/// When the tiles of a product may begin. A pass runs on one stream.
enum class Start {
  kAfterPrevious,  ///< when all launches before are complete
  kIndependent,    ///< beside the launch before, of which it reads nothing
  kWithRowsOf,     ///< it reads rows that `LaunchHints::source` writes: beside its last tiles
};

struct RowProduct;

/// What an engine may use to overlap launches and to order tiles.
struct LaunchHints {
  Start start = Start::kAfterPrevious;
  const RowProduct* source = nullptr;  ///< of kWithRowsOf
  unsigned* tile_counter = nullptr;    ///< zero before the launch: for dynamic tile order
  /// Zero before the launch; for products whose rows a later one with kWithRowsOf reads.
  unsigned* release_counter = nullptr;
};

/// D[p] = rows[index[p]] * W[e]^T for the rows p of every expert e.
struct RowProduct {
  DType dtype;
  RowGroups groups;
  RowOperand rows;
  WeightOperand weights;
  std::variant<StoreOutput, Activate, ActivateGrad> epilogue;
  LaunchHints hints;
};

/// How the columns of D go to one or two weight gradients.
enum class GradParts {
  kOne,        ///< all to out[0]
  kHalves,     ///< the left half to out[0] (gate), the right one to out[1] (up)
  kAlternate,  ///< even columns to out[0], odd ones to out[1]
};

/// What is launched to run beside a product.
enum class Companion {
  kNone,
  kTokenSum,  ///< a sum over tokens' rows, limited by memory: short tiles should leave it room
};

/// D[e] = sum over the rows p of expert e of left[index[p]]^T * right[p]: a weight gradient.
struct DepthProduct {
  DType dtype;
  RowGroups groups;
  RowOperand left;  ///< its width is M
  Tensor right;     ///< (C, N), or (C, parts, N) of which `right_part` is multiplied
  std::int32_t right_part;
  Tensor out[2];  ///< (E, M, N) in the dtype or fp32, one of M and N contiguous; absent: none
  GradParts parts;
  GradMode mode;
  LaunchHints hints;
  Companion companion;
};

}  // namespace sonicmoe::cuda
