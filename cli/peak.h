// What this CPU can do at best, measured.
#pragma once

#include <memory>
#include <vector>

#include "core/plan.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Multiply-add throughput of the widest vectors that the backend uses for `dtype` (bf16 dot
/// products where the CPU has them), and the bandwidth of reading and writing large arrays, both
/// with exec's threads. The peak is the best of all samples: other load on the machine lowers a
/// sample and never raises one, so samples between the runs that are held against the peak keep a
/// short load from lowering all of them.
class CpuPeak {
 public:
  CpuPeak(DType dtype, const Exec& exec);
  ~CpuPeak();
  /// Takes a fraction of a second.
  void sample();
  /// Of the samples so far, of which there must be one.
  Machine machine() const;
  std::size_t samples() const { return flops_.size(); }
  /// The slowest sample's multiply-adds over the fastest's: far below 1 on a machine that is busy.
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
