// Memory, information and timing of the CUDA device for the harness and the command, without CUDA
// types. In a build without CUDA every function throws.
#pragma once

#include <memory>

#include "verify/cases.h"
#include "verify/implementation.h"

namespace sonicmoe::verify {

/// Memory of the current device; copies wait for all earlier work.
Memory device_memory();

/// The public API with this Exec on device memory, restricted to the cases that CUDA serves.
Implementation cuda_implementation(const Exec& exec);

struct DeviceInfo {
  std::string name;
  std::int64_t free_bytes = 0;
};
DeviceInfo device_info();

/// Records points in time on a stream and gives the seconds between two of them.
class Clock {
 public:
  virtual ~Clock() = default;
  /// Records the moment when the stream has done all work enqueued so far; returns its number, from
  /// 0 on.
  virtual std::size_t mark() = 0;
  /// Waits until the stream has reached `to`.
  virtual double seconds(std::size_t from, std::size_t to) = 0;
  /// Discards all recorded moments; numbers begin at 0 again.
  virtual void restart() = 0;
};
std::unique_ptr<Clock> stream_clock(void* stream);

}  // namespace sonicmoe::verify
