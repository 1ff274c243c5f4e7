#include "cuda/device/architectures.h"

#include <algorithm>

namespace sonicmoe::cuda {

std::span<const int> architectures() {
  static constexpr int kArchitectures[] = {SONICMOE_CUDA_ARCHITECTURES};
  return kArchitectures;
}

bool has_code(int capability, std::span<const int> compiled) {
  return std::any_of(compiled.begin(), compiled.end(), [&](int architecture) {
    const bool runs_sass = architecture / 10 == capability / 10 && architecture <= capability;
    const bool runs_ptx = architecture == 80 && capability >= 80;
    return runs_sass || runs_ptx;
  });
}

const char* code_names() { return SONICMOE_CUDA_CODE; }

}  // namespace sonicmoe::cuda
