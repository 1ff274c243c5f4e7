// What the command knows of GPUs by their names, and how it says that there is none.
#pragma once

#include <string>
#include <string_view>

namespace sonicmoe::cli {

struct GpuName {
  std::string_view driver;   ///< cudaDeviceProp::name
  std::string_view machine;  ///< of machine_from_name()
};
/// The boards whose data sheets machine_from_name() holds. Other boards with these chips (PCIe,
/// NVL, GH200, H20, H800, MIG slices) have other rates, so a name has to match as a whole.
inline constexpr GpuName kGpuNames[] = {
    {"NVIDIA H100 80GB HBM3", "h100"},
    {"NVIDIA H200", "h200"},
    {"NVIDIA B200", "b200"},
};

/// The machine of a device; "" where its data sheet is not known here.
constexpr std::string_view machine_of_gpu(std::string_view driver_name) {
  for (const GpuName& gpu : kGpuNames) {
    if (gpu.driver == driver_name) return gpu.machine;
  }
  return "";
}

/// Why no GPU can be used. `refusal` is what opening the first device said: without a driver the
/// CUDA runtime complains of the driver's version, without a GPU the library complains of ordinal
/// 0.
inline std::string gpu_problem(const std::string& refusal, bool driver_present) {
  if (refusal.find("driver version is insufficient") != std::string::npos && !driver_present) {
    return "no NVIDIA driver found (libcuda.so.1)";
  }
  if (refusal.find("this machine has 0 CUDA devices") != std::string::npos) return "no GPU found";
  return refusal;
}

}  // namespace sonicmoe::cli
