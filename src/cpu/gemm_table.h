// The tables of functions of one instruction set. Included by gemm_<isa>.cc.
#pragma once

#include "cpu/activation_tile.h"
#include "cpu/gemm_tile.h"

namespace sonicmoe::cpu::SONICMOE_ISA {

template <class S, class Dot>
constexpr Kernels table_of() {
  return {.mr = TileShape::kRows,
          .nr = kTileCols<Dot>,
          .k_group = Dot::kGroup,
          .packed_bytes = sizeof(typename Dot::Packed),
          .element_bytes = sizeof(S),
          .acc_bytes = sizeof(typename Dot::Acc),
          .pack_rows = pack_rows<S, Dot>,
          .pack_cols = pack_cols<S, Dot>,
          .product = product<Dot>,
          .forward_tile = forward_tile<S>,
          .backward_tile = backward_tile<S>,
          .store_tile = store_tile<S>,
          .sum_rows = sum_rows<S>,
          .column_sum = column_sum<S>,
          .dot = dot<S>,
          .widen = widen<S>};
}

#if defined(__AVX512BF16__)
using Bf16Dot = PairDot;
#else
using Bf16Dot = PlainDot<float>;
#endif

/// In the order of DType: f32, bf16, f16, f64.
inline constexpr Kernels kTables[] = {table_of<float, PlainDot<float>>(), table_of<BF16, Bf16Dot>(),
                                      table_of<F16, PlainDot<float>>(),
                                      table_of<double, PlainDot<double>>()};

}  // namespace sonicmoe::cpu::SONICMOE_ISA
