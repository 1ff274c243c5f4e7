// Which data sheet belongs to a GPU's name, and the sentence for a machine without a usable GPU.
#pragma once

#include <string>
#include <string_view>

namespace sonicmoe::cli {

struct GpuName {
  std::string_view driver;   ///< cudaDeviceProp::name
  std::string_view machine;  ///< of machine_from_name()
};
/// The boards whose data sheets machine_from_name() holds. Other boards with these chips (GH200,
/// H20, H800, Max-Q, laptops, MIG slices) have other rates, so a name has to match as a whole.
inline constexpr GpuName kGpuNames[] = {
    {"NVIDIA H100 80GB HBM3", "h100"},
    {"NVIDIA H100 NVL", "h100-nvl"},
    {"NVIDIA H100 PCIe", "h100-pcie"},
    {"NVIDIA H200", "h200"},
    {"NVIDIA B200", "b200"},
    {"NVIDIA A100-SXM4-80GB", "a100"},
    {"NVIDIA A100-SXM4-40GB", "a100-40gb"},
    {"NVIDIA A10", "a10"},
    {"NVIDIA A40", "a40"},
    {"NVIDIA RTX A6000", "rtx-a6000"},
    {"NVIDIA GeForce RTX 3090", "rtx-3090"},
    {"NVIDIA L4", "l4"},
    {"NVIDIA L40S", "l40s"},
    {"NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"},
    {"NVIDIA GeForce RTX 4090", "rtx-4090"},
    {"NVIDIA GeForce RTX 5090", "rtx-5090"},
    {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"},
};

/// The machine of a device; "" for a device that kGpuNames does not list.
constexpr std::string_view machine_of_gpu(std::string_view driver_name) {
  for (const GpuName& gpu : kGpuNames) {
    if (gpu.driver == driver_name) return gpu.machine;
  }
  return "";
}

/// Why no GPU can be used. `refusal` is the error message from opening the first device. This
/// message misleads in two cases: without a driver the CUDA runtime says that the driver's version
/// is insufficient, and without a GPU the library says that ordinal 0 is wrong.
inline std::string gpu_problem(const std::string& refusal, bool driver_present) {
  if (refusal.find("driver version is insufficient") != std::string::npos && !driver_present) {
    return "no NVIDIA driver found (libcuda.so.1)";
  }
  if (refusal.find("this machine has 0 CUDA devices") != std::string::npos) return "no GPU found";
  return refusal;
}

}  // namespace sonicmoe::cli
