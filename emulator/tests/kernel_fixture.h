// Runs PTX text in the tests of the emulator.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace sonicmoe::emulator {

/// Arrays of the host that a kernel may access, and nothing else.
class Arrays : public GlobalMemory {
 public:
  /// Adds an array of `bytes` zeros.
  std::byte* add(std::size_t bytes) {
    arrays_.emplace_back(std::make_unique<std::byte[]>(bytes + 1024), bytes);
    const auto address = reinterpret_cast<std::uintptr_t>(arrays_.back().first.get());
    begins_.push_back(arrays_.back().first.get() + (1024 - address % 1024));
    return begins_.back();
  }
  template <class T>
  T* add(const std::vector<T>& values) {
    std::byte* at = add(values.size() * sizeof(T));
    std::memcpy(at, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  void check(std::uint64_t address, std::size_t bytes) const override {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const auto begin = reinterpret_cast<std::uint64_t>(begins_[i]);
      if (address >= begin && address + bytes <= begin + arrays_[i].second) return;
    }
    throw Fault("global memory is accessed out of bounds");
  }

 private:
  std::vector<std::pair<std::unique_ptr<std::byte[]>, std::size_t>> arrays_;
  std::vector<std::byte*> begins_;
};

struct BenchShape {
  Dim grid{1, 1, 1};
  Dim block{32, 1, 1};
  Dim cluster{1, 1, 1};
  std::size_t dynamic_shared = 0;
  Target target{90, true};
  bool may_overlap = false;  ///< with the kernel before, which is complete
};

inline Function first_kernel(const std::string& text) {
  const Module module = parse_module(text);
  return parse_kernel(module, module.kernels.at(0));
}

/// Runs the first kernel of `text`, whose parameters are 64-bit words. Throws Fault.
inline void run_kernel(const std::string& text, const BenchShape& shape, const Arrays& memory,
                       const std::vector<std::uint64_t>& parameters, std::uint64_t seed = 1) {
  const Program program = Builder(first_kernel(text), {}, shape.target).build();
  Launch launch;
  launch.program = &program;
  launch.grid = shape.grid;
  launch.block = shape.block;
  launch.cluster = shape.cluster;
  launch.dynamic_shared = shape.dynamic_shared;
  launch.parameters.resize(program.parameter_bytes);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    std::memcpy(launch.parameters.data() + program.parameter_offsets.at(i), &parameters[i],
                program.parameter_sizes[i]);
  }
  Settings settings;
  settings.seed = seed;
  settings.patience_s = 2;
  Neighbours neighbours;
  if (shape.may_overlap) neighbours.previous_is_complete = [] { return true; };
  Grid(launch, settings, memory, std::move(neighbours)).run();
}

inline std::uint64_t word_of(const void* pointer) {
  return reinterpret_cast<std::uint64_t>(pointer);
}

}  // namespace sonicmoe::emulator
