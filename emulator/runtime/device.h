// The emulated devices: their streams, and the fault that an erroneous kernel leaves.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/host_threads.h"
#include "runtime/stream.h"

namespace sonicmoe::emulator {

inline constexpr std::size_t kPlainShared = 48 * 1024;  ///< of a block, without an attribute
inline constexpr std::size_t kReservedShared = 1024;    ///< of a block, by the system
inline constexpr int kMostThreads = 1024;               ///< of a block

/// Held while operations are issued and captured, never while they run.
std::mutex& issue_mutex();

/// Ends the operations of a device.
class DeviceFault : public std::runtime_error {
 public:
  DeviceFault(cudaError_t status, const std::string& text)
      : std::runtime_error(text), status_(status) {}
  cudaError_t status() const { return status_; }

 private:
  cudaError_t status_;
};

class Device {
 public:
  explicit Device(int ordinal)
      : ordinal_(ordinal), legacy_(std::make_shared<Stream>(*this, Stream::Kind::kLegacy)) {}

  int ordinal() const { return ordinal_; }
  const std::shared_ptr<Stream>& legacy() const { return legacy_; }
  std::shared_ptr<Stream> open_stream(Stream::Kind kind);
  /// The stream ends when all its issued work is done.
  void close_stream(const std::shared_ptr<Stream>& stream);

  /// Appends to a stream of this device, in the order that CUDA gives blocking streams and the
  /// default stream. The caller holds issue_mutex().
  MomentPtr issue(Stream& stream, Work work, std::vector<MomentPtr> after = {});
  /// Waits for everything that was issued.
  void synchronize();
  /// Ends the threads, at the end of the process.
  void finish();
  void run(const Action& action) noexcept;
  HostThreads& threads() { return threads_; }

  /// The status of the first fault; every later call on the device returns it. cudaSuccess: none.
  cudaError_t fault() const { return fault_.load(std::memory_order_acquire); }
  /// Forgets the fault and the peers.
  void reset() {
    fault_ = cudaSuccess;
    peers_ = 0;
  }

  /// Whether its kernels may use the memory of `owner`.
  bool reaches(int owner) const {
    return owner < 0 || owner == ordinal_ || (peers_.load() >> owner & 1) != 0;
  }
  /// False if the peer was enabled before.
  bool enable_peer(int other) { return (peers_.fetch_or(1u << other) >> other & 1) == 0; }

  std::size_t total_memory() const;
  std::size_t free_memory() const;

 private:
  void note_fault(cudaError_t status, const char* text);

  const int ordinal_;
  std::shared_ptr<Stream> legacy_;
  std::vector<std::shared_ptr<Stream>> streams_;  ///< the others, also closed ones that still run
  HostThreads threads_;
  std::atomic<cudaError_t> fault_{cudaSuccess};
  std::atomic<std::uint32_t> peers_{0};
};

/// Throws ApiError if there is no such device.
Device& device_of(int ordinal);
/// Of this thread.
Device& current_device();
void choose_device(int ordinal);

}  // namespace sonicmoe::emulator
