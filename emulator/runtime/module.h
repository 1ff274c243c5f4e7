// A program's PTX and its kernels.
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
#include <vector>

#include "machine.h"
#include "runtime/configuration.h"

namespace sonicmoe::emulator {

/// A text of PTX. A kernel is parsed when it is asked for.
class PtxText {
 public:
  explicit PtxText(std::string_view text) : text_(text), target_(target_of(text)) {}

  const Target& target() const { return target_; }

  /// Throws ApiError if the text has no such kernel, std::runtime_error if it cannot be understood.
  /// If the configuration's `without` is NAME:LINE, kernels whose name contains NAME lose the
  /// instruction at that line of the PTX. removals.py finds so whether a test notices it.
  Program build(const std::string& kernel);

 private:
  void place_variables();

  const std::string_view text_;
  std::string changed_;  ///< by the configuration's `instead`; if it is empty, `text_` serves
  const Target target_;
  std::mutex mutex_;
  bool is_parsed_ = false;
  Module module_;
  std::map<std::string, std::uint64_t> variables_;  ///< addresses, equal on all devices
};

/// Finds the PTX of a kernel by its name and a device's capability, in all texts that
/// emulator_add_ptx() has added. If several texts for one target contain an instance of the same
/// template, the first is used, because their code is equal.
class PtxTexts {
 public:
  /// See emulator_add_ptx().
  void add(const char* begin, const char* end);
  /// The code that a device of `capability` runs (Target::runs_on). Throws ApiError if there is
  /// none.
  PtxText& with(const std::string& kernel, int capability);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<PtxText>> texts_;
  std::map<std::string, std::map<Target, PtxText*>> by_kernel_;
};
PtxTexts& ptx_texts();

class Kernel {
 public:
  /// `module` is the handle that __cudaRegisterFatBinary returned.
  Kernel(const void* module, std::string name) : module_(module), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  std::string readable_name() const;
  /// Built at the first call.
  std::shared_ptr<const Program> program();
  int most_threads();
  bool is_of(const void* module) const { return module_ == module; }

  /// Appends the name to the configuration's log, once in a process.
  void note_run();

  /// cudaFuncAttributeMaxDynamicSharedMemorySize on a device. 0: never set.
  std::atomic<int>& dynamic_shared(int device) { return dynamic_shared_[device]; }

 private:
  const void* module_;
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
  void remove_module(const void* module);
  /// Throws ApiError if there is none.
  std::shared_ptr<Kernel> find(const void* host_or_handle) const;

 private:
  mutable std::mutex mutex_;
  std::map<const void*, std::shared_ptr<Kernel>> kernels_;
};
Kernels& kernels();

}  // namespace sonicmoe::emulator

/// Adds texts of PTX, each ended by a zero byte. A program calls it before its first launch,
/// because the emulator does not read the fat binaries that nvcc embeds.
extern "C" void emulator_add_ptx(const char* begin, const char* end);
