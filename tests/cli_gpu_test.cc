// The names and sentences of cli/gpu.h. No single machine could show all of them.
#include <gtest/gtest.h>

#include "../cli/gpu.h"
#include "core/plan.h"

namespace sonicmoe::cli {
namespace {

struct Case {
  const char* driver;
  const char* machine;
};

TEST(Gpu, IsKnownByItsWholeName) {
  constexpr Case kCases[] = {
      {"NVIDIA H100 80GB HBM3", "h100"},
      {"NVIDIA H200", "h200"},
      {"NVIDIA B200", "b200"},
      {"NVIDIA GH200 480GB", ""},
      {"NVIDIA GH200 144G HBM3e", ""},
      {"NVIDIA H20", ""},
      {"NVIDIA H20-3e", ""},
      {"NVIDIA H100 PCIe", "h100-pcie"},
      {"NVIDIA H100 NVL", "h100-nvl"},
      {"NVIDIA H200 NVL", ""},
      {"NVIDIA H800", ""},
      {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""},
      {"NVIDIA GB200", ""},
      {"NVIDIA A100-SXM4-80GB", "a100"},
      {"NVIDIA A100 80GB PCIe", ""},
      {"NVIDIA A100-SXM4-80GB MIG 3g.40gb", ""},
      {"NVIDIA A10G", ""},
      {"NVIDIA L40", ""},
      {"NVIDIA GeForce RTX 3090 Ti", ""},
      {"NVIDIA GeForce RTX 4090", "rtx-4090"},
      {"NVIDIA GeForce RTX 4090 D", ""},
      {"NVIDIA GeForce RTX 4090 Laptop GPU", ""},
      {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"},
      {"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", ""},
      {"", ""},
  };
  for (const Case& c : kCases) EXPECT_EQ(machine_of_gpu(c.driver), c.machine) << c.driver;
}

TEST(Gpu, EveryKnownNameHasADataSheet) {
  for (const GpuName& gpu : kGpuNames) {
    EXPECT_EQ(machine_from_name(std::string(gpu.machine)).name, gpu.machine);
  }
}

TEST(Gpu, IsMissedByASentenceThatSaysWhatIsMissing) {
  const std::string old_driver =
      "no CUDA device can be used: CUDA driver version is insufficient for CUDA runtime version.";
  EXPECT_EQ(gpu_problem(old_driver, false), "no NVIDIA driver found (libcuda.so.1)");
  EXPECT_EQ(gpu_problem(old_driver, true), old_driver);  // here the driver's version is the problem
  EXPECT_EQ(gpu_problem("ordinal is 0 but this machine has 0 CUDA devices.", true), "no GPU found");
  const std::string other = "device 0 has compute capability 8.0 but the kernels need 9.0.";
  EXPECT_EQ(gpu_problem(other, true), other);
}

}  // namespace
}  // namespace sonicmoe::cli
