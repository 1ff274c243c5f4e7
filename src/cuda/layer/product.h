// Grouped GEMMs described without tiles, kernels or architectures. A pass builds products
// (forward.cc, backward.cc); an engine turns each into a launch (engine.h).
//
// Letters: C is the row capacity (the host does not know the number of routed rows), E the number
// of experts, G is 2 with a gate, else 1. "Row p" is a row in expert order. Tensors are device
// memory; the host reads only shapes, strides and addresses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <variant>

#include "core/fp8_layout.h"
#include "cuda/math/layouts.h"
#include "cuda/metadata/metadata.h"
#include "cuda/metadata/row_arrivals.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// The rows of each expert, on the device.
struct RowGroups {
  const Metadata* lists;              ///< row ranges and tile records of the experts
  const ExpertRecord* longest_first;  ///< (E) experts by descending number of rows; null: unsorted
  std::int64_t experts;               ///< E, or the experts of a range
  std::int64_t capacity;              ///< C
  std::int64_t of_experts = 0;        ///< the E of which `experts` are a range; 0: all
  std::int64_t mean_rows() const { return capacity / std::max(experts, of_experts); }
  /// An upper bound of the tiles of a tile record's rows by one of `column_tiles` parts of the
  /// columns; at least 1. The host can give only a bound: it knows C, not R.
  std::int64_t most_tiles(std::int64_t column_tiles) const {
    const std::int64_t records = std::min(capacity, capacity / kRecordRows + experts);
    return std::max<std::int64_t>(1, records * column_tiles);
  }
};

/// Columns, and along K and N of weights rows and columns, whose codes share a scale. A code is one
/// e4m3 byte, a scale an fp32 power of two. `Tensor`s of codes have strides in codes; their dtype
/// has no meaning.
inline constexpr std::int64_t kScaleBlock = fp8::kBlock;

/// The scales of rows of codes: one for each row and block of kScaleBlock codes.
struct RowScales {
  float* data = nullptr;  ///< null: the rows are elements, not codes
  /// 0: scales are (rows, depth / kScaleBlock). Otherwise they are (depth / kScaleBlock,
  /// block_stride): those of consecutive rows are contiguous.
  std::int64_t block_stride = 0;
};

/// Quantised rows.
struct CodedRows {
  Tensor codes{};  ///< (rows, depth) or (rows, parts, depth), contiguous; absent: none
  RowScales scales{};
};

/// Rows in memory as elements, as codes, or as both.
struct StoredRows {
  Tensor elements{};
  /// Whatever the layout of `elements`, gate's columns come first. Codes of A are (C, n), those of
  /// H (C, G, n), those of dH (C, G n) with n rounded up to whole blocks.
  CodedRows codes{};
};

/// Gathered rows: row p of the product is row index[p] of `rows`, or row p where index is null.
struct RowOperand {
  Tensor rows;  ///< (T, width), (C, width) or (C, G, width); with scales, codes (T or C, width)
  const std::int32_t* index;
  RowScales scales{};      ///< by row if and only if `index` is given (block_stride is 0)
  RowArrivals arrivals{};  ///< of `rows`; only for an engine that awaits_rows, in a row product
};

/// How the gate and up matrices of an expert form one operand.
enum class WeightParts {
  kOne,            ///< `first` alone
  kSideBySide,     ///< output column j has a gate and an up value: the activation needs both
  kOneAfterOther,  ///< K runs over the n rows of gate, then over the n rows of up
};

/// The scales of matrices of codes: one for each block of kScaleBlock by kScaleBlock. Strides count
/// scales.
struct WeightScales {
  const float* data = nullptr;  ///< null: the matrices are elements, not codes
  std::int64_t expert_stride = 0;
  std::int64_t part_stride = 0;  ///< from the scales of `first` to those of `second`
  std::int64_t column_stride = 0;
  std::int64_t depth_stride = 0;
};

/// One matrix (columns, depth) for each expert: D = rows * first[e]^T. If rows and weights have
/// scales, the product of the codes of each block along the depth is multiplied by the scales of
/// the row and of the weights and added to an fp32 sum. Both have scales, or neither.
struct WeightOperand {
  Tensor first;   ///< (E, columns, depth); gate where there are two
  Tensor second;  ///< up, same shape; absent for kOne
  WeightParts parts;
  WeightScales scales{};
};

/// Adds inner[p] * outer[e]^T to row p of a product, for each row p of expert e: K grows by r.
/// `outer` has the columns of the weights, and the same contiguous dimension. r is a multiple of 8.
/// A product of codes takes elements here too. Its columns of H or A are multiplied in whole blocks
/// of kScaleBlock, so `outer` then has zeros up to whole blocks, which its shape does not count.
struct LowRankTerm {
  Tensor inner;     ///< (C, r), rows in expert order
  Tensor outer[2];  ///< (E, columns, r); [1] only with WeightParts::kSideBySide
};

/// out = r(factor * scale * (D + bias)).
struct StoreOutput {
  Tensor out;      ///< (C, columns)
  Tensor bias{};   ///< (E, columns) or absent
  Tensor scale{};  ///< (C) fp32 or absent
  float factor = 1.0f;

  bool scales() const { return scale.data != nullptr || factor != 1.0f; }
};

/// H = r(D + bias), A = r(act(H)).
struct Activate {
  StoredRows h;      ///< (C, 2, n), (C, 2n) or (C, 1, n), by `layout`; absent at inference
  StoredRows a;      ///< (C, n)
  Tensor bias_gate;  ///< (E, n) or absent
  Tensor bias_up;    ///< (E, n) or absent
  Activation activation;
  GateLayout layout;
};

/// With dA' = D: dH = r(act'(H) * weight * dA'), A' = r(weight * act(H)), and partial dot products
/// <A, dA'>. Their sum over a row is the gradient of the row's routing weight.
struct ActivateGrad {
  StoredRows h;              ///< written by Activate: elements or codes
  StoredRows dh;             ///< elements by `layout`, and codes for a product of codes
  Tensor a;                  ///< (C, n) A'
  const float* row_weight;   ///< (C)
  float* score_parts;        ///< (C, score_tiles): one partial dot product for each tile of columns
  std::int32_t score_tiles;  ///< Engine::score_tiles()
  Activation activation;
  GateLayout layout;  ///< of dh, and of h if the product has no scales; else h is not interleaved
};

/// When the tiles of a product may begin. The launches of a pass are on one stream.
enum class Start {
  kAfterPrevious,  ///< after all earlier launches are complete
  kIndependent,    ///< while the previous launch runs: the product reads none of its results
  kWithRowsOf,     ///< while the last tiles of `LaunchHints::source` run: the product reads the
                   ///< rows that `source` writes
};

struct RowProduct;

/// Hints by which an engine may overlap launches and order tiles. An engine may ignore them.
struct LaunchHints {
  Start start = Start::kAfterPrevious;
  const RowProduct* source = nullptr;  ///< with kWithRowsOf only
  unsigned* tile_counter = nullptr;    ///< of the dynamic tile scheduler; zero before the launch
  /// Counts the CTAs whose first tiles are in memory; zero before the launch. Given if a later
  /// product with kWithRowsOf reads the rows of these tiles: that product starts on them once all
  /// CTAs are counted.
  unsigned* release_counter = nullptr;
  /// For a weight gradient with kIndependent whose rows come from other GPUs, too: a count that is
  /// not 0 once these rows have arrived (wait_for() of exchange/kernels.h). The product acquires it
  /// before it reads rows. Null: all rows are of this GPU.
  unsigned* arrival = nullptr;
};

/// D[p] = rows[index[p]] * W[e]^T, plus the low-rank term, for the rows p of every expert e.
struct RowProduct {
  DType dtype;
  RowGroups groups;
  RowOperand rows;
  WeightOperand weights;
  std::optional<LowRankTerm> low_rank{};
  std::variant<StoreOutput, Activate, ActivateGrad> epilogue;
  LaunchHints hints;
};

/// How the columns of D are distributed over one or two weight gradients.
enum class GradParts {
  kOne,        ///< all to out[0]
  kHalves,     ///< the left half to out[0] (gate), the right one to out[1] (up)
  kAlternate,  ///< even columns to out[0], odd ones to out[1]
};

/// The launch that runs at the same time as a product.
enum class Companion {
  kNone,
  kTokenSum,  ///< a sum over tokens' rows, limited by memory; the product may leave some
              ///< multiprocessors to it
};

/// D[e] = sum over the rows p of expert e of left[index[p]]^T * right[p]: a weight gradient.
struct DepthProduct {
  DType dtype;
  RowGroups groups;
  RowOperand left;  ///< its width is M
  Tensor right;     ///< (C, N), or (C, G, N) of which part `right_part` is multiplied
  std::int32_t right_part;
  Tensor out[2];  ///< (E, M, N) in the dtype or fp32, one of M and N contiguous; absent: none
  GradParts parts;
  GradMode mode;
  LaunchHints hints;
  Companion companion;
};

}  // namespace sonicmoe::cuda
