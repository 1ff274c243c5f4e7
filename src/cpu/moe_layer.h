// Used by forward and backward: views of strided tensors, the layout of scratch, sums over tokens.
// The entry points here take the instruction set as an argument, so that tests can run each of
// them.
#pragma once

#include <cstddef>

#include "core/observer.h"
#include "cpu/gemm_engine.h"
#include "cpu/metadata.h"
#include "sonicmoe/grouped_gemm.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cpu {

void moe_forward_on(Isa isa, const Problem& problem, const ForwardArgs& args, const Exec& exec);
void moe_backward_on(Isa isa, const Problem& problem, const BackwardArgs& args, const Exec& exec);
void grouped_gemm_on(Isa isa, const GroupedGemm& args, const Exec& exec);
void grouped_gemm_k_on(Isa isa, const GroupedGemmK& args, const Exec& exec);

/// Byte offsets of the tensors in the caller's scratch, each a multiple of 256.
struct ForwardScratch {
  std::int64_t a = 0;         ///< A (C, n); every group of experts writes it from the beginning
  std::int64_t y = 0;         ///< Y (C, d); empty for grouped rows, whose Y is the output
  std::int64_t metadata = 0;  ///< inference only; training writes it to `saved`
  // fp8 only, all in bf16.
  std::int64_t x = 0;        ///< X (T, d), quantised and restored
  std::int64_t weights = 0;  ///< restored weights, as restored_weights() places them
  std::int64_t h = 0;        ///< H (C, G*n) before it is quantised; empty unless codes are kept
  // Low-rank factors only.
  std::int64_t p = 0;        ///< inference only, P (C, r) of all groups; training: saved_p()
  std::int64_t u = 0;        ///< U (C, r); written like A
  std::int64_t factors = 0;  ///< factors in the dtype, as rounded_factors() places them
  std::int64_t bytes = 0;
};
ForwardScratch forward_scratch(const Problem& problem, Pass pass);

struct BackwardScratch {
  std::int64_t dh = 0;       ///< dH (C, G*n); every group of experts writes it from the beginning
  std::int64_t scaled = 0;   ///< A' (C, n); written like dH
  std::int64_t dx_rows = 0;  ///< dX~ (C, d)
  // fp8 only, all in bf16.
  std::int64_t dout = 0;     ///< dO (T, d), quantised and restored
  std::int64_t weights = 0;  ///< restored weights, as restored_weights() places them
  std::int64_t h = 0;  ///< H (C, G*n) restored from the kept codes; empty unless codes are kept
  std::int64_t dh_coded = 0;  ///< dH quantised and restored; shape and use of `dh`
  // Low-rank factors only; inner rows are written like dH.
  std::int64_t q = 0;        ///< Q (C, r)
  std::int64_t u = 0;        ///< U' (C, r)
  std::int64_t v = 0;        ///< V (C, r)
  std::int64_t factors = 0;  ///< factors in the dtype, as rounded_factors() places them
  std::int64_t bytes = 0;
};
BackwardScratch backward_scratch(const Problem& problem);

/// The offset of P (C, r) in `saved`, after the metadata.
std::int64_t saved_p(const Problem& problem);

inline void* at_byte(const Buffer& buffer, std::int64_t offset) {
  return static_cast<std::byte*>(buffer.data) + offset;
}
inline void* at_element(void* data, std::int64_t offset, std::int64_t element_bytes) {
  return static_cast<std::byte*>(data) + offset * element_bytes;
}
inline const void* at_element(const void* data, std::int64_t offset, std::int64_t element_bytes) {
  return static_cast<const std::byte*>(data) + offset * element_bytes;
}

/// Asks the system for 2 MiB pages for memory that is about to be written: mapping fresh 4 KiB
/// pages takes longer than some kernels need to fill them. Does not change the contents.
void prefer_large_pages(const Buffer& memory);
void prefer_large_pages(const Tensor& tensor);

/// The rows of a (rows, cols) tensor, gathered through `index` unless it is null.
inline Operand rows_of(const Tensor& t, const std::int32_t* index) {
  return {t.data, index, t.stride[0], t.stride[1]};
}
/// The rows of a matrix in scratch whose columns are contiguous.
inline Operand dense_rows(const void* data, std::int64_t row_stride) {
  return {data, nullptr, row_stride, 1};
}
/// W (E, n, k) for rows of k values.
inline ExpertMatrix expert_matrix(const Tensor& w) {
  return {w.data, w.stride[0], w.stride[1], w.stride[2]};
}
/// The same W for rows of n values.
inline ExpertMatrix transposed_expert_matrix(const Tensor& w) {
  return {w.data, w.stride[0], w.stride[2], w.stride[1]};
}

/// Prefetches a block of memory.
inline void prefetch_rows(const void* first, std::int64_t rows, std::int64_t stride_bytes,
                          std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  const auto* row = static_cast<const std::byte*>(first);
  for (std::int64_t r = 0; r < rows; ++r, row += stride_bytes) {
    for (std::int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(row + b);
  }
}

/// The store of a tile to its rows and columns of `out`.
inline StoreTile row_store(const Kernels& k, const Tensor& out, const RowTile& tile) {
  StoreTile t{.tile = tile.acc[0]};
  t.out =
      at_element(out.data, tile.row * out.stride[0] + tile.col * out.stride[1], k.element_bytes);
  t.row_stride = out.stride[0];
  t.col_stride = out.stride[1];
  return t;
}
/// Changes a store of row_store(): row p of the tile goes to row index[p] of `out`.
inline void scatter(const Kernels& k, const Tensor& out, const std::int32_t* index,
                    const RowTile& tile, StoreTile& t) {
  t.index = index + tile.row;
  t.out = at_element(out.data, tile.col * out.stride[1], k.element_bytes);
}
inline void prefetch_row_tile(const Kernels& k, const Tensor& out, const RowTile& tile) {
  if (out.stride[1] != 1) return;
  prefetch_rows(at_element(out.data, tile.row * out.stride[0] + tile.col, k.element_bytes),
                tile.acc[0].rows, out.stride[0] * k.element_bytes,
                tile.acc[0].cols * k.element_bytes);
}

/// The groups of experts of a pass.
ExpertGroups expert_groups(const Problem& problem, std::int64_t most_rows, std::int32_t workers);

/// A worker's memory: two numbers for each row of a task, and one sum over rows.
class RowBuffers {
 public:
  RowBuffers(const Problem& problem, const Kernels& kernels);
  double* scores() const { return reinterpret_cast<double*>(memory_.data()); }    ///< kTaskRows
  double* score_gradients() const { return scores() + kTaskRows; }                ///< kTaskRows
  void* sums() const { return memory_.data() + 2 * kTaskRows * sizeof(double); }  ///< max(d, n)

 private:
  AlignedMemory memory_;
};

/// The number of tasks of sum_tokens().
std::int64_t token_tasks(const Problem& problem);

/// The columns of an (E, cols) bias that one tile needs, in the accumulators' type.
struct BiasTile {
  alignas(64) std::byte values[64 * sizeof(double)];

  /// Columns [col, col + n) of expert e; null if there is no bias.
  const void* load(const Kernels& k, const Tensor& bias, std::int64_t e, std::int64_t col,
                   std::int64_t n) {
    if (bias.data == nullptr) return nullptr;
    const std::int64_t at = e * bias.stride[0] + col * bias.stride[1];
    k.widen(at_element(bias.data, at, k.element_bytes), bias.stride[1], n, values);
    return values;
  }
};

/// out[t] = sum over the rows of token t of weight * row; 0 for a token without rows. Null
/// `weights` means that every weight is 1.
struct TokenSum {
  const Problem* problem = nullptr;
  const Kernels* kernels = nullptr;
  const Metadata* metadata = nullptr;
  const void* rows = nullptr;  ///< (C, d)
  const Tensor* weights = nullptr;
  Tensor out;
};
void sum_tokens(Team& team, PerWorker<RowBuffers>& buffers, const TokenSum& sum);

/// Grouped form: writes 0 to the rows of out that are in no group.
void zero_unowned(const Problem& problem, const Kernels& kernels, const Metadata& metadata,
                  const Tensor& out);

/// The routing weights of rows [begin, end).
void load_scores(const Problem& problem, const Metadata& metadata, const Tensor& weights,
                 std::int64_t begin, std::int64_t end, double* out);

}  // namespace sonicmoe::cpu
