// The inner loops of the CPU backend, as one table of functions for each dtype and instruction set:
// packing, the register-tiled product, and the epilogues on its fp32 (fp64) tile, which is then
// still in the L1 cache. The code that calls this table does not depend on the instruction set.
//
// A product tile is `mr` x `nr`. Both operands are packed into panels of mr or nr lanes, where a
// lane is a row of a or a column of b. For k_group = 2 and lanes 0, 1, ... a panel lies in memory
// as
//
//   lane 0: k 0, k 1 | lane 1: k 0, k 1 | ... | lane 0: k 2, k 3 | lane 1: k 2, k 3 | ...
//
// Lanes and k beyond the matrix are zero in the panel.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

enum class Isa : std::int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };
inline constexpr std::int32_t kIsaCount = 4;

/// A strided matrix whose rows may be gathered through an index: element (r, c) is at
/// data + (index ? index[r] : r) * row_stride + c * col_stride, in elements.
struct Operand {
  const void* data = nullptr;
  const std::int32_t* index = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  bool all_rows = false;  ///< without an index: has the rows of all groups (RowTask::origin)
};

/// The offset of element (r, c), in elements.
inline std::int64_t element_offset(const Operand& m, std::int64_t r, std::int64_t c) {
  const std::int64_t row = m.index != nullptr ? m.index[r] : r;
  return row * m.row_stride + c * m.col_stride;
}

/// One panel of `width` lanes with k values each; `lanes` of them exist. For pack_rows a lane is a
/// row of `source` and k its columns; for pack_cols a lane is a column and k its rows.
struct PackJob {
  Operand source;
  std::int64_t lane0 = 0;
  std::int64_t lanes = 0;
  std::int64_t width = 0;
  std::int64_t k0 = 0;
  std::int64_t k = 0;
  void* out = nullptr;
};

enum class Start : std::int32_t { kZero = 0, kAdd = 1 };

/// tile[i * nr + j] = sum over packed k of a[k][i] * b[k][j] for i < rows; kAdd adds to the tile.
struct ProductJob {
  const void* a = nullptr;
  const void* b = nullptr;
  std::int64_t k_groups = 0;
  std::int64_t rows = 0;
  Start start = Start::kZero;
  void* tile = nullptr;
};

/// The rows and columns of a product tile that exist. Accumulators are fp32; fp64 for fp64 tensors.
struct Tile {
  const void* values = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
};

/// Kernel A: H = r(acc + b1), A = r(act(H)). Pointers are to the tile's first element. Biases have
/// the accumulators' type. Biases and H may be null.
struct ForwardTile {
  Activation activation;
  Tile gate;
  Tile up;
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  void* h_gate = nullptr;
  void* h_up = nullptr;
  std::int64_t h_stride = 0;
  void* a = nullptr;
  std::int64_t a_stride = 0;
};

/// Kernel dH: computes dH, A' = r(s act(H)) and dS += sum dA' r(act(H)) from the accumulators dA'
/// and from H. Any output may be null.
struct BackwardTile {
  Activation activation;
  Tile da;
  const void* h_gate = nullptr;
  const void* h_up = nullptr;
  std::int64_t h_stride = 0;
  const double* scores = nullptr;
  void* dh_gate = nullptr;
  void* dh_up = nullptr;
  std::int64_t dh_stride = 0;
  void* scaled = nullptr;
  std::int64_t scaled_stride = 0;
  double* dscores = nullptr;
};

enum class StoreMode : std::int32_t { kWrite = 0, kAdd = 1 };

/// out(r, c) = r(scale_r * (acc + bias_c)); kAdd adds to out. With an index, row r of the tile goes
/// to row index[r] of out.
struct StoreTile {
  Tile tile;
  const void* bias = nullptr;
  const double* scale = nullptr;
  const std::int32_t* index = nullptr;
  void* out = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
  StoreMode mode = StoreMode::kWrite;
};

/// out[c] = r(sum over i < count of weight[i] * rows[index[i]][c]), added in ascending i. Null
/// weights are 1.
struct SumJob {
  const void* rows = nullptr;
  std::int64_t row_stride = 0;
  const std::int32_t* index = nullptr;
  const double* weight = nullptr;
  std::int64_t count = 0;
  std::int64_t cols = 0;
  void* out = nullptr;
  std::int64_t out_stride = 1;
};

/// sum[c] += scale_r * source(r, c) for the rows [row0, row0 + rows) in ascending order.
struct ColumnSumJob {
  Operand source;
  std::int64_t row0 = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  const double* scale = nullptr;
  void* sum = nullptr;
};

struct Kernels {
  std::int64_t mr;
  std::int64_t nr;
  std::int64_t k_group;
  std::int64_t packed_bytes;  ///< of the k_group values of one lane
  std::int64_t element_bytes;
  std::int64_t acc_bytes;
  void (*pack_rows)(const PackJob&);
  void (*pack_cols)(const PackJob&);
  void (*product)(const ProductJob&);
  void (*forward_tile)(const ForwardTile&);
  void (*backward_tile)(const BackwardTile&);
  void (*store_tile)(const StoreTile&);
  void (*sum_rows)(const SumJob&);
  void (*column_sum)(const ColumnSumJob&);
  /// The sum of a[i] * b[i] over n elements: a strided of the tensors' dtype, b contiguous
  /// accumulators.
  double (*dot)(const void* a, std::int64_t stride, const void* b, std::int64_t n);
  /// Converts n strided elements to contiguous accumulators.
  void (*widen)(const void* source, std::int64_t stride, std::int64_t n, void* out);
};

/// True if this build has `isa` and this processor runs it.
bool isa_available(Isa isa);
/// The widest instruction set that is available.
Isa best_isa();
/// "portable", "avx2", "avx512", "avx512_bf16".
const char* isa_name(Isa isa);
/// The table of a float dtype.
const Kernels& kernels(DType dtype, Isa isa);

/// The tables of one instruction set, by DType; null if the compiler could not build them.
const Kernels* portable_tables();
const Kernels* avx2_tables();
const Kernels* avx512_tables();
const Kernels* avx512_bf16_tables();

}  // namespace sonicmoe::cpu
