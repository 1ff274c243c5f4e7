// Peak rates of GPUs from their data sheets, and the engine that computes products on each GPU.
#pragma once

#include <cstdint>
#include <string>

namespace sonicmoe {

/// Peak rates of a device. 16-bit tensor inputs with fp32 accumulation, dense.
struct Machine {
  std::string name;
  double flops_per_second = 0.0;
  double bytes_per_second = 0.0;
  std::int32_t capability = 0;  ///< compute capability of a GPU: 90 is 9.0
  std::int64_t memory_bytes = 0;
  /// NVLink to the other GPUs of a node, each way; 0 without a switch that joins them all.
  double link_bytes_per_second = 0.0;
  std::string source;
};
/// "h200", "a100", "rtx-4090", ...; refuses other names ("cpu" is measured by the caller).
Machine machine_from_name(const std::string& name);
/// The names of machine_from_name(), separated by ", ".
std::string machine_names();

/// How far a plan's times for an engine on a machine can be trusted.
enum class Evidence {
  kMeasured,   ///< this library was measured on this machine
  kRun,        ///< it has run there; its share of the roofline was measured on an H200
  kEstimated,  ///< it has never run there
};
const char* evidence_name(Evidence evidence);

/// Roofline time divided by measured time under sustained load: mean, minimum and maximum over 18
/// large layers on an H200. The defaults are those of the hopper engine, for forward and backward
/// one by one (benchmarks/results/h200/hot.json).
struct ShareOfRoofline {
  double mean = 0.63, least = 0.57, most = 0.68;
};

/// An engine on a machine.
struct EngineRate {
  std::string name;          ///< "hopper", "portable", "blackwell", or "cpu"
  std::string instructions;  ///< of the products: "wgmma", "mma.sync", "tcgen05", or "vector"
  Evidence evidence = Evidence::kEstimated;
  /// The highest rate that its instructions reach, at most the machine's rate.
  double flops_per_second = 0.0;
  std::string note;            ///< a sentence about that rate; may be empty
  ShareOfRoofline share = {};  ///< not known here where the evidence is kEstimated
};
/// The engine called `name`, or the machine's default engine if `name` is empty. Refuses an engine
/// that cannot run on the machine.
EngineRate engine_rate(const Machine& machine, const std::string& name = "");

}  // namespace sonicmoe
