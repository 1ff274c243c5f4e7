#include "cuda/device/launch.h"

#include <array>
#include <atomic>
#include <cstdint>

namespace sonicmoe::cuda {
namespace {

/// The set of (function, device) whose shared memory limit is set: a lock-free open-addressing
/// table. It has more entries than there are kernels. If it were full, the limit would be set to
/// the same value again at each launch.
class PreparedFunctions {
 public:
  bool contains(std::uint64_t key) const {
    for (std::size_t i = 0; i < kEntries; ++i) {
      const std::uint64_t found = entry(key, i).load(std::memory_order_acquire);
      if (found == key) return true;
      if (found == 0) return false;
    }
    return false;
  }
  void insert(std::uint64_t key) {
    for (std::size_t i = 0; i < kEntries; ++i) {
      std::uint64_t found = 0;
      if (entry(key, i).compare_exchange_strong(found, key) || found == key) return;
    }
  }

 private:
  static constexpr std::size_t kEntries = 1024;
  std::atomic<std::uint64_t>& entry(std::uint64_t key, std::size_t i) {
    return entries_[(key / 16 + i) % kEntries];
  }
  const std::atomic<std::uint64_t>& entry(std::uint64_t key, std::size_t i) const {
    return entries_[(key / 16 + i) % kEntries];
  }
  std::array<std::atomic<std::uint64_t>, kEntries> entries_{};
};

}  // namespace

void allow_shared_memory(const void* function) {
  static PreparedFunctions prepared;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  // User addresses have 47 bits, so the device ordinal fits above them.
  const std::uint64_t key =
      reinterpret_cast<std::uint64_t>(function) | static_cast<std::uint64_t>(device) << 48;
  if (prepared.contains(key)) return;
  int most = 0;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "reading device attributes");
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, function), "reading a kernel's attributes");
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  most - static_cast<int>(attributes.sharedSizeBytes)),
             "setting a kernel's shared memory");
  prepared.insert(key);
}

}  // namespace sonicmoe::cuda
