#include "cuda/device/launch.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

namespace sonicmoe::cuda {
namespace {

/// A function on a device. User addresses have 48 bits on Arm, 47 on x86-64, and an ordinal fits
/// into the 15 bits between them and KernelBits::kBit.
std::uint64_t key_of(const void* function, int ordinal) {
  return reinterpret_cast<std::uint64_t>(function) | static_cast<std::uint64_t>(ordinal) << 48;
}

/// A lock-free open-addressing table with one bit for every inserted (function, device). It has
/// more entries than there are kernels. If it were full, CUDA would be asked again at each launch.
class KernelBits {
 public:
  std::optional<bool> find(std::uint64_t key) const {
    for (std::size_t i = 0; i < kEntries; ++i) {
      const std::uint64_t found = entry(key, i).load(std::memory_order_acquire);
      if ((found & ~kBit) == key) return (found & kBit) != 0;
      if (found == 0) return {};
    }
    return {};
  }
  void insert(std::uint64_t key, bool bit) {
    const std::uint64_t value = key | (bit ? kBit : 0);
    for (std::size_t i = 0; i < kEntries; ++i) {
      std::uint64_t found = 0;
      if (entry(key, i).compare_exchange_strong(found, value) || found == value) return;
    }
  }

 private:
  static constexpr std::size_t kEntries = 1024;
  static constexpr std::uint64_t kBit = std::uint64_t{1} << 63;
  std::atomic<std::uint64_t>& entry(std::uint64_t key, std::size_t i) {
    return entries_[(key / 16 + i) % kEntries];
  }
  const std::atomic<std::uint64_t>& entry(std::uint64_t key, std::size_t i) const {
    return entries_[(key / 16 + i) % kEntries];
  }
  std::array<std::atomic<std::uint64_t>, kEntries> entries_{};
};

cudaFuncAttributes attributes_of(const void* function) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, function), "reading a kernel's attributes");
  return attributes;
}

}  // namespace

void allow_shared_memory(const void* function) {
  static KernelBits allowed;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "reading the current device");
  const std::uint64_t key = key_of(function, device);
  if (allowed.find(key)) return;
  int most = 0;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "reading device attributes");
  const int own = static_cast<int>(attributes_of(function).sharedSizeBytes);
  check_cuda(
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most - own),
      "setting a kernel's shared memory");
  allowed.insert(key, true);
}

bool has_sm90(const Device& device, const void* function) {
  static KernelBits known;
  const std::uint64_t key = key_of(function, device.ordinal);
  if (const std::optional<bool> found = known.find(key)) return *found;
  // For SASS too, ptxVersion is the virtual architecture from which the code was compiled: the
  // value of __CUDA_ARCH__ / 10.
  const bool has = attributes_of(function).ptxVersion >= 90;
  known.insert(key, has);
  return has;
}

}  // namespace sonicmoe::cuda
