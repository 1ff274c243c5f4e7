// Modules: the PTX that nvcc embeds in a program, and its kernels.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "machine.h"
#include "runtime/configuration.h"

namespace sonicmoe::emulator {

/// The PTX text inside of the argument of __cudaRegisterFatBinary. Empty if there is none; throws
/// std::runtime_error if the text is compressed.
std::string_view ptx_of(const void* wrapper);

/// A module that __cudaRegisterFatBinary registers. It is parsed at the first request for one of
/// its kernels.
class LoadedModule {
 public:
  explicit LoadedModule(const void* wrapper) : wrapper_(wrapper) {}

  /// Throws ApiError if there is no PTX or no such kernel in it, std::runtime_error if it cannot be
  /// understood. If the configuration's `without` is NAME:LINE, kernels whose name contains NAME
  /// lose the instruction at that line of the PTX. removals.py finds so whether a test notices it.
  Program build(const std::string& kernel);

 private:
  void parse();
  void place_variables();

  const void* wrapper_;
  std::mutex mutex_;
  bool is_parsed_ = false;
  Module module_;
  std::map<std::string, std::uint64_t> variables_;  ///< addresses, equal on all devices
};

class Kernel {
 public:
  Kernel(std::shared_ptr<LoadedModule> module, std::string name)
      : module_(std::move(module)), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  std::string readable_name() const;
  /// Built at the first call.
  std::shared_ptr<const Program> program();
  int most_threads();
  bool is_of(const LoadedModule* module) const { return module_.get() == module; }

  /// Appends the name to the configuration's log, once in a process.
  void note_run();

  /// cudaFuncAttributeMaxDynamicSharedMemorySize on a device. 0: never set.
  std::atomic<int>& dynamic_shared(int device) { return dynamic_shared_[device]; }

 private:
  const std::shared_ptr<LoadedModule> module_;
  const std::string name_;
  std::mutex mutex_;
  std::shared_ptr<const Program> program_;
  std::once_flag noted_;
  std::array<std::atomic<int>, kMostDevices> dynamic_shared_{};
};

/// Kernels by the address of their host function, or by the handle that __cudaGetKernel returns.
class Kernels {
 public:
  void add(const void* host, std::shared_ptr<Kernel> kernel);
  void remove_module(const LoadedModule* module);
  /// Throws ApiError if there is none.
  std::shared_ptr<Kernel> find(const void* host_or_handle) const;

 private:
  mutable std::mutex mutex_;
  std::map<const void*, std::shared_ptr<Kernel>> kernels_;
};
Kernels& kernels();

}  // namespace sonicmoe::emulator
