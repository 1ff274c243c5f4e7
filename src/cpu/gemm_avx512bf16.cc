// The kernels built for AVX-512 with its bf16 pair products.
#define SONICMOE_ISA avx512_bf16
#include "cpu/gemm_kernels.h"

#if defined(__AVX512BF16__)
#include "cpu/gemm_table.h"

namespace sonicmoe::cpu {
const Kernels* avx512_bf16_tables() { return avx512_bf16::kTables; }
}  // namespace sonicmoe::cpu
#else
namespace sonicmoe::cpu {
const Kernels* avx512_bf16_tables() { return nullptr; }
}  // namespace sonicmoe::cpu
#endif
