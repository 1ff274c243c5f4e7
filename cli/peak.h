// The measured peak rates of this CPU.
#pragma once

#include <memory>
#include <vector>

#include "core/plan.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Multiply-add throughput of the widest vectors that the backend uses for `dtype` (bf16 dot
/// products where the CPU has them), and the bandwidth of reading and writing large arrays, both
/// with exec's threads. The peak is the best of all samples, because other load on the machine
/// lowers a sample and never raises one. Samples are taken between the runs that are compared with
/// the peak, so that a short load lowers only some of the samples.
class CpuPeak {
 public:
  CpuPeak(DType dtype, const Exec& exec);
  ~CpuPeak();
  /// Takes a fraction of a second.
  void sample();
  /// The best rates of the samples so far; needs at least one sample.
  Machine machine() const;
  std::size_t samples() const { return flops_.size(); }
  /// The slowest sample's multiply-add rate divided by the fastest's: far below 1 on a busy
  /// machine.
  double steadiness() const;

 private:
  struct Arrays;
  DType dtype_;
  std::unique_ptr<Arrays> arrays_;
  std::vector<double> flops_, bytes_;  ///< per second, by sample
  std::int32_t threads_ = 0;
};

/// The machine of one sample.
Machine measured_cpu(DType dtype, const Exec& exec);

}  // namespace sonicmoe::cli
