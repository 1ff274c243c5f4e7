// Low-rank factors on the CPU (formulas: sonicmoe/low_rank.h). Products with r columns or of depth
// r run on the engine of the layer: RowTerm adds inner rows times a factor to a product of the
// layer, InnerRows computes the inner rows P, U, Q, V and U'.
#pragma once

#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {

/// Bytes of the factors in Problem::dtype; 0 if the caller's factors have this dtype.
std::int64_t rounded_factors_bytes(const Problem& problem);
/// The factors that the products read: the caller's, or contiguous views of `memory`. Fills
/// nothing.
Lora rounded_factors(const Problem& problem, const Lora& lora, void* memory);
/// Rounds the caller's factors into `rounded`, the views of rounded_factors(). Writes nothing if
/// these are the caller's tensors.
void round_factors(Team& team, const Problem& problem, const Lora& lora, const Lora& rounded);

/// Inner rows (C, r) of one group of experts; with `all_rows` of all groups.
Operand inner_rows(const void* data, std::int64_t rank, bool all_rows = false);

/// out[p] = r(scale * the product), (C, r) rows. Row 0 of `out` is the first row of the group, or
/// row 0 of the layer with `all_rows`.
struct InnerRowsJob {
  RowGemm gemm;
  double scale = 1.0;
  void* out = nullptr;
  bool all_rows = false;
};
class InnerRows {
 public:
  InnerRows(Team& team, const InnerRowsJob& job);
  void run(const ExpertGroup& group);

 private:
  void finish(const RowTile& tile, std::int64_t origin) const;

  static constexpr std::int64_t kMostTileRows = 64;
  Team& team_;
  const InnerRowsJob job_;
  double scales_[kMostTileRows];  ///< job_.scale for every row of a tile
  PerWorker<RowGemmWorker> workers_;
};

}  // namespace sonicmoe::cpu
