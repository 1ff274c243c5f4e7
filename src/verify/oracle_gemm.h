// The oracle of the grouped GEMMs.
#pragma once

#include "sonicmoe/grouped_gemm.h"
#include "verify/oracle.h"

namespace sonicmoe::oracle {

/// Reads host descriptors. D[p] = A[row(p)] B_e^T for the rows below offsets[E], before rounding.
Matrix<double> grouped_gemm(const GroupedGemm& args, Precision precision);

/// D_e = sum over the rows p of expert e of A[row(p)]^T B[p], experts stacked, before rounding.
Matrix<double> grouped_gemm_k(const GroupedGemmK& args, Precision precision);

}  // namespace sonicmoe::oracle
