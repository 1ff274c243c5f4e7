// The backend, device and memory that a subcommand computes with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "command.h"
#include "sonicmoe/types.h"
#include "verify/implementation.h"

namespace sonicmoe::cli {

/// An Exec with its device, closed with the last copy, and the memory to put tensors in.
struct Target {
  Exec exec;
  std::shared_ptr<void> device;
  verify::Memory memory;

  bool on_cuda() const { return exec.backend == Backend::kCuda; }
};
/// What a subcommand says of its target.
struct TargetOptions {
  std::string backend = "cpu";
  std::string engine{};  ///< empty: the backend's choice
  std::int32_t threads = 0;

  /// --backend, --engine, --threads.
  void add_to(Command& command);
};
/// Refuses a backend or engine that this build or machine cannot serve.
Target target_from_options(const TargetOptions& options);
/// The engine that multiplies on a target, empty where its backend has none.
std::string engine_of(const Target& target);
/// The functions that the harness checks on that target.
verify::Implementation implementation_of(const Target& target);

}  // namespace sonicmoe::cli
