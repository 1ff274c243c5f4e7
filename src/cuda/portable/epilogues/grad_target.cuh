// Where an element of a weight gradient is stored.
#pragma once

#include <cstdint>

#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

/// The output and the offset at which an element of D is stored.
struct GradTarget {
  void* data;
  std::int64_t offset;

  __device__ __forceinline__ GradTarget(const StoreExpertParams& p, int expert, int row,
                                        int column) {
    int part = 0;
    switch (p.split) {
      case GradSplit::kNone:
        break;
      case GradSplit::kColumnHalves:
        part = column >= p.border ? 1 : 0;
        column -= part * p.border;
        break;
      case GradSplit::kRowHalves:
        part = row >= p.border ? 1 : 0;
        row -= part * p.border;
        break;
      case GradSplit::kColumnsAlternate:
        part = column & 1;
        column >>= 1;
        break;
      case GradSplit::kRowsAlternate:
        part = row & 1;
        row >>= 1;
        break;
    }
    const GradOut& out = p.out[part];
    data = out.data;
    offset = expert * out.expert_stride + row * out.row_stride + column * out.column_stride;
  }
};

}  // namespace sonicmoe::cuda::portable
