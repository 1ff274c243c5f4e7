// The CUDA device as the harness and the command need it, without CUDA's types. In a build without
// CUDA every function refuses.
#pragma once

#include <memory>

#include "verify/cases.h"
#include "verify/implementation.h"

namespace sonicmoe::verify {

/// Memory of the current device; copies wait for everything that was asked for before.
Memory device_memory();

/// The public API with this Exec on device memory, and the cases that CUDA promises to serve.
Implementation cuda_implementation(const Exec& exec);

struct DeviceInfo {
  std::string name;
  std::int64_t free_bytes = 0;
};
DeviceInfo device_info();

/// Moments whose distance can be asked for afterwards.
class Clock {
 public:
  virtual ~Clock() = default;
  /// The number of a new moment, from 0 on: now, or when the stream gets here.
  virtual std::size_t mark() = 0;
  /// Waits for `to`.
  virtual double seconds(std::size_t from, std::size_t to) = 0;
  /// Forgets all moments.
  virtual void restart() = 0;
};
std::unique_ptr<Clock> stream_clock(void* stream);

}  // namespace sonicmoe::verify
