#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {

void exec(const Exec& e) {
  const BackendTable& backend = backend_table(e.backend);
  at_least("num_threads", e.num_threads, 0);
  if (backend.device_open != nullptr && e.device == nullptr) {
    refuse(std::string("device is null, must be a handle of smoe_device_open for the ") +
           backend.name + " backend");
  }
}

}  // namespace sonicmoe::checks
