// The kernels built for the compiler's baseline: what every processor can run.
#define SONICMOE_ISA portable
#include "cpu/gemm_table.h"

namespace sonicmoe::cpu {
const Kernels* portable_tables() { return portable::kTables; }
}  // namespace sonicmoe::cpu
