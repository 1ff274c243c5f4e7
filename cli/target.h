// The backend, device and memory that a subcommand computes with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

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
/// Refuses a backend that this build or machine cannot serve.
Target target_from_options(const std::string& backend, std::int32_t threads);
/// The functions that the harness checks on that target.
verify::Implementation implementation_of(const Target& target);

}  // namespace sonicmoe::cli
