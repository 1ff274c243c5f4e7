#include "target.h"

#include "core/backend_table.h"
#include "core/checks.h"
#include "verify/device.h"

namespace sonicmoe::cli {

Target target_from_options(const std::string& backend, std::int32_t threads) {
  Target target;
  target.exec.num_threads = threads;
  target.exec.backend = backend_from_name(backend);
  target.memory = verify::host_memory();
  const BackendTable& table = backend_table(target.exec.backend);
  if (table.device_open != nullptr) {
    target.device = {table.device_open(0), table.device_close};
    target.exec.device = target.device.get();
    target.memory = verify::device_memory();
  }
  checks::exec(target.exec);
  return target;
}

verify::Implementation implementation_of(const Target& target) {
  return target.on_cuda() ? verify::cuda_implementation(target.exec)
                          : verify::public_api(target.exec);
}

}  // namespace sonicmoe::cli
