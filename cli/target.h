// The backend, device and memory that a subcommand computes with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "command.h"
#include "sonicmoe/types.h"
#include "verify/implementation.h"

namespace sonicmoe::cli {

/// An Exec, its device and the memory for tensors. The last copy of a target closes the device.
struct Target {
  Exec exec;
  std::shared_ptr<void> device;
  verify::Memory memory;

  bool on_cuda() const { return exec.backend == Backend::kCuda; }
};
/// The options of a subcommand that choose its target.
struct TargetOptions {
  std::string backend{};  ///< empty: cuda if the first GPU can be used, else cpu
  std::string engine{};   ///< empty: the backend's choice
  std::int32_t threads = 0;

  /// --backend, --engine, --threads.
  void add_to(Command& command);
};
/// Refuses a backend or engine that this build or machine cannot serve. Prints engine_note_of() to
/// stderr.
Target target_from_options(const TargetOptions& options);
/// The engine that multiplies on `target`; empty if its backend has no engines.
std::string engine_of(const Target& target);
/// Why `target` does not use the engine that was asked for, a sentence; empty if it does.
std::string engine_note_of(const Target& target);
/// Refuses work that needs more bytes than the target has.
void refuse_above_memory(double needed, const Target& target);
/// The data sheet of the first GPU, by its name in machine_from_name(); empty if no GPU can be used
/// or its data sheet is not known.
std::string machine_here();
/// Whether the CUDA driver is installed.
bool driver_present();
/// The functions that the harness checks on `target`.
verify::Implementation implementation_of(const Target& target);

}  // namespace sonicmoe::cli
