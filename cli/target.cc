#include "target.h"

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "verify/device.h"

namespace sonicmoe::cli {

void TargetOptions::add_to(Command& command) {
  command.option("--backend", backend, "Where to run: cpu or cuda (the first GPU)");
  command.option("--engine", engine,
                 "Engine of the products on CUDA: a name that sonicmoe info lists");
  command.option("--threads", threads, "CPU threads (0: one per core)");
}

Target target_from_options(const TargetOptions& options) {
  Target target;
  target.exec.num_threads = options.threads;
  target.exec.backend = backend_from_name(options.backend);
  target.memory = verify::host_memory();
  const BackendTable& table = backend_table(target.exec.backend);
  const char* engine = options.engine.empty() ? nullptr : options.engine.c_str();
  if (engine != nullptr && table.device_open == nullptr) {
    checks::refuse("engine is \"" + options.engine + "\", must be absent: the backend " +
                   table.name + " has no engines");
  }
  if (table.device_open != nullptr) {
    target.device = {table.device_open(0, engine), table.device_close};
    target.exec.device = target.device.get();
    target.memory = verify::device_memory();
  }
  checks::exec(target.exec);
  return target;
}

std::string engine_of(const Target& target) {
  const BackendTable& table = backend_table(target.exec.backend);
  return table.engine_name == nullptr ? "" : table.engine_name(target.exec.device);
}

verify::Implementation implementation_of(const Target& target) {
  return target.on_cuda() ? verify::cuda_implementation(target.exec)
                          : verify::public_api(target.exec);
}

}  // namespace sonicmoe::cli
