#include "core/machines.h"

#include <algorithm>

#include "core/check_tensor.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// Rates are dense bf16 with fp32 accumulation. Most data sheets give the rate with sparsity, which
// is twice the dense rate. The GeForce cards multiply at half rate when they accumulate in fp32:
// 142, 330 and 419 TFLOP/s of fp16 with fp16 accumulation become the figures below. A card sold
// with 80 GB has 80 GiB; the driver reserves up to 2 % of it, ECC on GDDR6 about 6 %.
const Machine kMachines[] = {
    {"h100", 989.4e12, 3.35e12, 90, 80 * kGiB, 450e9,
     "NVIDIA H100 SXM5 data sheet: 989.4 TFLOP/s dense bf16, 3.35 TB/s"},
    {"h100-nvl", 835.5e12, 3.9e12, 90, 94 * kGiB, 0,
     "NVIDIA H100 NVL data sheet: 835.5 TFLOP/s dense bf16, 3.9 TB/s"},
    {"h100-pcie", 756e12, 2.0e12, 90, 80 * kGiB, 0,
     "NVIDIA H100 PCIe data sheet: 756 TFLOP/s dense bf16, 2 TB/s"},
    {"h200", 989.4e12, 4.8e12, 90, 141 * kGiB, 450e9,
     "NVIDIA H200 SXM data sheet: 989.4 TFLOP/s dense bf16, 4.8 TB/s"},
    {"b200", 2250e12, 8.0e12, 100, 180 * kGiB, 900e9,
     "NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense bf16, 8 TB/s"},
    {"a100", 312e12, 2.039e12, 80, 80 * kGiB, 300e9,
     "NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s dense bf16, 2.039 TB/s"},
    {"a100-40gb", 312e12, 1.555e12, 80, 40 * kGiB, 300e9,
     "NVIDIA A100 40GB SXM data sheet: 312 TFLOP/s dense bf16, 1.555 TB/s"},
    {"a10", 125e12, 600e9, 86, 24 * kGiB, 0,
     "NVIDIA A10 data sheet: 125 TFLOP/s dense bf16, 600 GB/s"},
    {"a40", 149.7e12, 696e9, 86, 48 * kGiB, 0,
     "NVIDIA A40 data sheet: 149.7 TFLOP/s dense bf16, fp32 accumulation, 696 GB/s"},
    {"rtx-a6000", 154.8e12, 768e9, 86, 48 * kGiB, 0,
     "NVIDIA Ampere GA102 white paper: 154.8 TFLOP/s dense bf16, fp32 accumulation, 768 GB/s"},
    {"rtx-3090", 71e12, 936e9, 86, 24 * kGiB, 0,
     "NVIDIA Ampere GA102 white paper: 71 TFLOP/s dense bf16, fp32 accumulation (half rate), "
     "936 GB/s"},
    {"l4", 121e12, 300e9, 89, 24 * kGiB, 0,
     "NVIDIA L4 data sheet: 121 TFLOP/s dense bf16, 300 GB/s"},
    {"l40s", 362e12, 864e9, 89, 48 * kGiB, 0,
     "NVIDIA L40S data sheet: 362 TFLOP/s dense bf16, 864 GB/s"},
    {"rtx-6000-ada", 364.2e12, 960e9, 89, 48 * kGiB, 0,
     "NVIDIA RTX 6000 Ada data sheet: a quarter of its 1457 TFLOP/s of sparse fp8, 960 GB/s"},
    {"rtx-4090", 165.2e12, 1008e9, 89, 24 * kGiB, 0,
     "NVIDIA Ada white paper: 165.2 TFLOP/s dense bf16, fp32 accumulation (half rate), 1008 GB/s"},
    {"rtx-5090", 209.5e12, 1792e9, 120, 32 * kGiB, 0,
     "NVIDIA RTX Blackwell white paper: 209.5 TFLOP/s dense bf16, fp32 accumulation (half rate), "
     "1792 GB/s"},
    {"rtx-pro-6000", 503.8e12, 1792e9, 120, 96 * kGiB, 0,
     "NVIDIA RTX PRO Blackwell white paper, 600 W Workstation Edition: 503.8 TFLOP/s dense bf16, "
     "fp32 accumulation, 1792 GB/s"},
};

// Measured on an H200 (peak 989.4 TFLOP/s), hot, operands not loaded: mma.sync reaches 632 TFLOP/s,
// wgmma 855.
constexpr double kMmaSyncOnHopper = 632.0 / 989.4;

}  // namespace

std::string machine_names() {
  std::string names;
  for (const Machine& m : kMachines) names += (names.empty() ? "" : ", ") + m.name;
  return names;
}

Machine machine_from_name(const std::string& name) {
  for (const Machine& m : kMachines) {
    if (m.name == name) return m;
  }
  checks::refuse("device is \"" + name + "\", must be one of: " + machine_names() + ", cpu");
}

const char* evidence_name(Evidence evidence) {
  switch (evidence) {
    case Evidence::kMeasured:
      return "measured";
    case Evidence::kRun:
      return "run";
    case Evidence::kEstimated:
      break;
  }
  return "estimated";
}

EngineRate engine_rate(const Machine& machine, const std::string& name) {
  const bool hopper = machine.capability == 90, gpu = machine.capability != 0;
  const std::string usual = hopper ? "hopper" : gpu ? "portable" : "cpu";
  const std::string engine = name.empty() ? usual : name;
  const bool data_centre = machine.capability >= 100 && machine.capability < 110;
  const std::string other = hopper ? "portable" : data_centre ? "blackwell" : usual;
  if (engine != usual && engine != other) {
    checks::refuse("engine is \"" + engine + "\", must be " + usual +
                   (other == usual ? "" : " or " + other) + " on " + machine.name);
  }
  if (engine == "blackwell") {
    return {engine, "tcgen05", Evidence::kEstimated, machine.flops_per_second,
            "used only if it is asked for by name, because no GPU has run it"};
  }
  if (engine == "cpu") {
    return {engine, "vector", Evidence::kMeasured, machine.flops_per_second, ""};
  }
  if (engine == "hopper") {
    const bool record = machine.name == "h200";
    const bool run = record || machine.name == "h100";
    return {engine, "wgmma",
            record ? Evidence::kMeasured
            : run  ? Evidence::kRun
                   : Evidence::kEstimated,
            machine.flops_per_second, ""};
  }
  EngineRate portable{engine, "mma.sync", Evidence::kEstimated, machine.flops_per_second, ""};
  if (hopper) {
    if (machine.name == "h200") {
      portable.evidence = Evidence::kMeasured;
      // For forward and backward together (benchmarks/results/h200/portable.json).
      portable.share = {0.62, 0.57, 0.67};
    }
    portable.flops_per_second *= kMmaSyncOnHopper;
    portable.note = "mma.sync reaches 0.64 of this peak, 632 TFLOP/s measured on an H200";
  } else if (data_centre) {
    portable.note = "this peak needs tcgen05; how far below it mma.sync stays is not known here";
  }
  return portable;
}

}  // namespace sonicmoe
