#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {

void exec(const Exec& e) {
  known("backend", static_cast<std::int32_t>(e.backend), 2);
  at_least("num_threads", e.num_threads, 0);
  if (e.backend == Backend::kCpu) return;
  if (cuda_backend() == nullptr) {
    refuse(Status::kUnsupported, "backend is cuda, must be cpu: this build has no CUDA backend");
  }
  if (e.device == nullptr) {
    refuse("device is null, must be a handle of smoe_device_open for the cuda backend");
  }
}

}  // namespace sonicmoe::checks
