// The gradients that no engine computes: gradients of routing weights and biases, and zeros for
// experts and slots without rows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/metadata/metadata.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// Lists that the products of backward read in addition to the metadata.
struct RowLists {
  float* weights;         ///< (C): the routing weight of every row; 1 without routing weights
  ExpertRecord* experts;  ///< (E): by descending number of rows, then by expert number
  unsigned* counters;     ///< set to zero
  std::int32_t counter_count;
};
/// Also zeroes `dweights`, unless it is absent.
void make_row_lists(const Device& device, const Problem& problem, const Metadata& metadata,
                    const Tensor& weights, const RowLists& lists, const Tensor& dweights,
                    cudaStream_t stream);

/// dS: dweights[slot] = sum of the row's partial dot products, in order (+ <dO[token], b2>). Empty
/// slots are not written.
struct ScoreGrad {
  const float* parts;  ///< (C, tiles)
  std::int32_t tiles;
  Tensor dout;    ///< (T, d)
  Tensor b_down;  ///< (E, d) or absent
  Tensor out;     ///< dweights
  /// Runs at the same time as an independent weight gradient, as sum_rows_beside() with kPrevious.
  /// The condition of kPrevious must hold for the kernel that writes `parts`.
  bool beside;
};
void finish_scores(const Device& device, const Problem& problem, const Metadata& metadata,
                   const ScoreGrad& args, cudaStream_t stream);

/// out[e] = sum over the rows of e of weight * source[index[row]], in a fixed order. With `odd`,
/// even columns go to `out` and odd ones to `odd`; one of the two may have no data.
struct ColumnSum {
  const void* source;         ///< rows of 16-bit elements
  std::int64_t row_stride;    ///< elements
  const std::int32_t* index;  ///< null: the row itself
  const float* weights;       ///< by row; null: 1
  Tensor out;                 ///< (E, columns), elements or fp32
  GradMode mode;
  const Tensor* odd = nullptr;
};
void sum_columns(const Problem& problem, const Metadata& metadata, const ColumnSum& args,
                 cudaStream_t stream);

/// Zeroes every element of a view of any strides.
void clear(const Tensor& tensor, cudaStream_t stream);

}  // namespace sonicmoe::cuda
