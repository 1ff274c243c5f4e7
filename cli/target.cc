#include "target.h"

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "verify/device.h"

namespace sonicmoe::cli {

Backend backend_from_name(const std::string& name) {
  if (name == "cpu") return Backend::kCpu;
  if (name == "cuda") return Backend::kCuda;
  checks::refuse("backend is \"" + name + "\", must be one of: cpu, cuda");
}

Target target_from_options(const std::string& backend, std::int32_t threads) {
  Target target;
  target.exec.num_threads = threads;
  target.exec.backend = backend_from_name(backend);
  target.memory = verify::host_memory();
  if (target.on_cuda()) {
    if (const CudaBackend* cuda = cuda_backend(); cuda != nullptr) {
      target.device = {cuda->device_open(0), cuda->device_close};
      target.exec.device = target.device.get();
      target.memory = verify::device_memory();
    }
  }
  checks::exec(target.exec);
  return target;
}

verify::Implementation implementation_of(const Target& target) {
  return target.on_cuda() ? verify::cuda_implementation(target.exec)
                          : verify::public_api(target.exec);
}

}  // namespace sonicmoe::cli
