// The kernels built for the baseline of the compiler, which every processor runs.
#define SONICMOE_ISA portable
#include "cpu/gemm_table.h"

namespace sonicmoe::cpu {
const Kernels* portable_tables() { return portable::kTables; }
}  // namespace sonicmoe::cpu
