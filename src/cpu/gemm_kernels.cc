// Which instruction sets this processor runs, and their tables.
#include "cpu/gemm_kernels.h"

namespace sonicmoe::cpu {
namespace {

bool processor_runs(Isa isa) {
#if defined(__x86_64__)
  const auto avx512 = [] {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  };
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return avx512();
    case Isa::kAvx512Bf16:
      return avx512() && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return isa == Isa::kPortable;
#endif
}

const Kernels* tables(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2_tables();
    case Isa::kAvx512:
      return avx512_tables();
    case Isa::kAvx512Bf16:
      return avx512_bf16_tables();
    case Isa::kPortable:
      break;
  }
  return portable_tables();
}

}  // namespace

bool isa_available(Isa isa) { return processor_runs(isa) && tables(isa) != nullptr; }

Isa best_isa() {
  for (const Isa isa : {Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2}) {
    if (isa_available(isa)) return isa;
  }
  return Isa::kPortable;
}

const char* isa_name(Isa isa) {
  constexpr const char* kNames[kIsaCount] = {"portable", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<std::int32_t>(isa)];
}

const Kernels& kernels(DType dtype, Isa isa) {
  return tables(isa)[static_cast<std::int32_t>(dtype)];
}

}  // namespace sonicmoe::cpu
