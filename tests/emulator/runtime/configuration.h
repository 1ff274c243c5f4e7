// The settings of the emulated devices, from environment variables.
#pragma once

#include <cstdint>
#include <string>

namespace sonicmoe::emulator {

inline constexpr int kMostDevices = 16;

struct Configuration {
  int devices = 2;          ///< SONICMOE_EMULATED_GPUS
  int multiprocessors = 4;  ///< SONICMOE_EMULATED_MULTIPROCESSORS, of each device
  std::uint64_t seed = 1;   ///< SONICMOE_EMULATED_SEED: of the order in which warps run
  int patience_s = 60;      ///< SONICMOE_EMULATED_PATIENCE: seconds without progress are a deadlock
  std::string without;      ///< SONICMOE_EMULATED_WITHOUT: NAME:LINE, see PtxText::build()
  std::string log;  ///< SONICMOE_EMULATED_LOG: file that gets the name of each kernel that ran
};

/// Read once. A value that is no number of the allowed range ends the program with a sentence.
const Configuration& configuration();

}  // namespace sonicmoe::emulator
