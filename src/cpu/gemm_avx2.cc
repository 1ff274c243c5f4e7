// The kernels built for AVX2 with FMA and F16C.
#define SONICMOE_ISA avx2
#include "cpu/gemm_kernels.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/gemm_table.h"

namespace sonicmoe::cpu {
const Kernels* avx2_tables() { return avx2::kTables; }
}  // namespace sonicmoe::cpu
#else
namespace sonicmoe::cpu {
const Kernels* avx2_tables() { return nullptr; }
}  // namespace sonicmoe::cpu
#endif
