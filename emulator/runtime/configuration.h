// The settings of the emulated devices, from environment variables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sonicmoe::emulator {

inline constexpr int kMostDevices = 16;

/// What depends on the compute capability of a device.
struct Limits {
  int capability;            ///< major * 10 + minor
  std::size_t block_shared;  ///< bytes of a block, with the attribute
  int multiprocessor_threads;
  /// Thread block clusters, programmatic dependent launch, TMA.
  bool has_sm90() const { return capability >= 90; }
};

struct Configuration {
  Limits limits{90, 227 * 1024, 2048};  ///< SONICMOE_EMULATED_CAPABILITY, 9.0
  int devices = 2;                      ///< SONICMOE_EMULATED_GPUS
  int multiprocessors = 4;              ///< SONICMOE_EMULATED_MULTIPROCESSORS, of each device
  std::uint64_t seed = 1;               ///< SONICMOE_EMULATED_SEED: of the order in which warps run
  int patience_s = 60;  ///< SONICMOE_EMULATED_PATIENCE: seconds without progress are a deadlock
  std::string without;  ///< SONICMOE_EMULATED_WITHOUT: NAME:LINE, see PtxText::build()
  std::string instead;  ///< SONICMOE_EMULATED_INSTEAD: NAME:LINE:TEXT, see PtxText::build()
  /// SONICMOE_EMULATED_LOG: file that gets the name of each kernel that ran, and its PTX's target
  std::string log;
};

/// Read once. A value that is not allowed ends the program with a sentence.
const Configuration& configuration();

}  // namespace sonicmoe::emulator
