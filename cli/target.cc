#include "target.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "gpu.h"
#include "verify/device.h"

namespace sonicmoe::cli {

void TargetOptions::add_to(Command& command) {
  command.option("--backend", backend,
                 "Where to run: cpu or cuda, the first GPU (default: cuda if it can be used)");
  command.option("--engine", engine,
                 "Engine of the products on CUDA: a name that sonicmoe info lists");
  command.option("--threads", threads, "CPU threads (0: one per core)");
}

bool driver_present() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver != nullptr) dlclose(driver);
  return driver != nullptr;
}

namespace {

std::shared_ptr<void> open_device(const BackendTable& table, const char* engine) {
  try {
    return {table.device_open(0, engine), table.device_close};
  } catch (const Error& error) {
    throw Error(error.status(), gpu_problem(error.what(), driver_present()));
  }
}

bool gpu_usable() {
  const BackendTable* table = find_backend(Backend::kCuda);
  try {
    return table != nullptr && open_device(*table, nullptr) != nullptr;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string machine_here() {
  return gpu_usable() ? std::string(machine_of_gpu(verify::device_info().name)) : "";
}

void refuse_above_memory(double needed, const Target& target) {
  const double present = target.on_cuda() ? static_cast<double>(verify::device_info().free_bytes)
                                          : static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                                                static_cast<double>(sysconf(_SC_PAGE_SIZE));
  if (needed <= 0.9 * present) return;
  checks::refuse("shape needs about " + bytes_text(needed) + " of memory, must fit in the " +
                 bytes_text(present) +
                 (target.on_cuda() ? " free on the device" : " of this machine"));
}

Target target_from_options(const TargetOptions& options) {
  Target target;
  target.exec.num_threads = options.threads;
  target.exec.backend = !options.backend.empty() ? backend_from_name(options.backend)
                        : gpu_usable()           ? Backend::kCuda
                                                 : Backend::kCpu;
  target.memory = verify::host_memory();
  const BackendTable& table = backend_table(target.exec.backend);
  const char* engine = options.engine.empty() ? nullptr : options.engine.c_str();
  if (engine != nullptr && table.device_open == nullptr) {
    checks::refuse("engine is \"" + options.engine + "\", must be absent: the backend " +
                   table.name + " has no engines");
  }
  if (table.device_open != nullptr) {
    target.device = open_device(table, engine);
    target.exec.device = target.device.get();
    target.memory = verify::device_memory();
  }
  checks::exec(target.exec);
  if (const std::string note = engine_note_of(target); !note.empty()) {
    std::fprintf(stderr, "sonicmoe: %s\n", note.c_str());
  }
  return target;
}

std::string engine_of(const Target& target) {
  const BackendTable& table = backend_table(target.exec.backend);
  return table.engine_name == nullptr ? "" : table.engine_name(target.exec.device);
}

std::string engine_note_of(const Target& target) {
  const BackendTable& table = backend_table(target.exec.backend);
  return table.engine_note == nullptr ? "" : table.engine_note(target.exec.device);
}

verify::Implementation implementation_of(const Target& target) {
  return target.on_cuda() ? verify::cuda_implementation(target.exec)
                          : verify::public_api(target.exec);
}

}  // namespace sonicmoe::cli
