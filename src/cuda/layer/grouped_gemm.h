// The grouped GEMMs of sonicmoe/grouped_gemm.h, on the device's engine.
#pragma once

#include "sonicmoe/grouped_gemm.h"

namespace sonicmoe::cuda {

std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts);
void grouped_gemm(const GroupedGemm& args, const Exec& exec);
void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec);

}  // namespace sonicmoe::cuda
