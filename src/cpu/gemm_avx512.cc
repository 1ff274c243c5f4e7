// The kernels built for AVX-512 F, BW, VL and DQ.
#define SONICMOE_ISA avx512
#include "cpu/gemm_kernels.h"

#if defined(__AVX512F__)
#include "cpu/gemm_table.h"

namespace sonicmoe::cpu {
const Kernels* avx512_tables() { return avx512::kTables; }
}  // namespace sonicmoe::cpu
#else
namespace sonicmoe::cpu {
const Kernels* avx512_tables() { return nullptr; }
}  // namespace sonicmoe::cpu
#endif
