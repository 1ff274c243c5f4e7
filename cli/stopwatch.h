// Times of calls and of the kernels within them, on the host's clock or a stream's.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/observer.h"
#include "target.h"
#include "verify/device.h"

namespace sonicmoe::cli {

/// The host's clock on the CPU, the stream's clock on CUDA.
std::unique_ptr<verify::Clock> clock_of(const Target& target);

double seconds_of(verify::Clock& clock, const std::function<void()>& work);

double median(std::vector<double> values);

/// Times of the kernels within observed calls. On CUDA, observed kernels do not overlap.
class KernelTimes final : public KernelObserver {
 public:
  explicit KernelTimes(verify::Clock& clock) : clock_(clock) {}
  void begin(const char* kernel) override;
  void end() override;
  /// Ends one call: waits for the device and records the sum of each kernel's times.
  void finish_call();
  /// Median seconds of a kernel in one call; 0 for a kernel that never ran.
  double median_seconds(const std::string& kernel) const;
  /// Every kernel that ran, in order of first appearance.
  const std::vector<std::string>& names() const { return names_; }

 private:
  struct Span {
    std::string kernel;
    std::size_t from, to;
  };
  verify::Clock& clock_;
  std::vector<Span> spans_;
  std::vector<std::string> names_;
  std::map<std::string, std::vector<double>> seconds_;
};

}  // namespace sonicmoe::cli
