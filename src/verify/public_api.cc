// Its own file, so that a program without a backend links the rest of the harness.
#include "verify/implementation.h"

namespace sonicmoe::verify {

Implementation public_api(const Exec& exec) {
  Implementation i;
  i.name = exec.backend == Backend::kCpu ? "cpu" : "cuda";
  i.memory = host_memory();
  i.moe_sizes = [exec](const Problem& p, Pass pass) { return sonicmoe::moe_sizes(p, pass, exec); };
  i.moe_forward = [exec](const Problem& p, const ForwardArgs& args) {
    sonicmoe::moe_forward(p, args, exec);
  };
  i.moe_backward = [exec](const Problem& p, const BackwardArgs& args) {
    sonicmoe::moe_backward(p, args, exec);
  };
  i.grouped_gemm = [exec](const GroupedGemm& args) { sonicmoe::grouped_gemm(args, exec); };
  i.grouped_gemm_k = [exec](const GroupedGemmK& args) { sonicmoe::grouped_gemm_k(args, exec); };
  return i;
}

}  // namespace sonicmoe::verify
