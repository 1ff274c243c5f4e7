// The memory of the emulated devices: host memory that kernels may touch, and nothing else.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "machine.h"

namespace sonicmoe::emulator {

inline constexpr int kEveryDevice = -1;

/// A live allocation.
struct Extent {
  enum class Kind { kDevice, kPinned, kVariable, kImported };
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  int owner = kEveryDevice;  ///< the ordinal of the device whose memory it is
  Kind kind = Kind::kDevice;

  bool contains(std::uint64_t address, std::size_t count) const {
    return address - begin < bytes && count <= bytes - (address - begin);
  }
};

/// Names memory of another process.
struct SharedMemoryName {
  std::int32_t process;
  std::int32_t file;  ///< a descriptor of the process
  std::uint64_t bytes;
};

/// All allocations of all devices. An address is never used twice, so an access to freed memory is
/// always found. Any thread may call it.
class Memory {
 public:
  using Table = std::vector<Extent>;  ///< sorted by address

  Memory();

  /// Allocates memory that is aligned to 512 bytes, as on the device, and never to more. Throws
  /// ApiError.
  void* allocate(std::size_t bytes, int owner, Extent::Kind kind);
  /// Throws ApiError unless `address` was returned for an allocation of this kind.
  void release(void* address, Extent::Kind kind);
  /// Releases all allocations of a device.
  void release_all(int owner);

  /// Moves an allocation to memory that other processes can map. Nobody may use it meanwhile.
  SharedMemoryName share(const void* address);
  void* import(const SharedMemoryName& name, int owner);

  /// The allocation that contains [address, address + bytes), or an Extent of 0 bytes.
  Extent find(const void* address, std::size_t bytes) const;
  /// Whether the address is in the range from which allocations are taken.
  bool is_ours(const void* address) const;
  std::size_t used_by(int owner) const;

  /// Changes with every allocation and release.
  std::uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  std::shared_ptr<const Table> table() const;

 private:
  std::uint64_t take_pages(std::size_t bytes);
  void publish(Table table);
  void unmap(const Extent& extent);

  mutable std::mutex mutex_;
  std::uint64_t begin_ = 0;
  std::size_t bytes_ = 0;  ///< of the range from which allocations are taken
  std::uint64_t next_ = 0;
  std::shared_ptr<const Table> table_ = std::make_shared<Table>();
  std::atomic<std::uint64_t> generation_{0};
  std::map<std::uint64_t, int> files_;  ///< of shared allocations, by address
};

Memory& memory();

class Device;

/// Memory as one grid sees it. One thread uses it.
class GridMemory final : public GlobalMemory {
 public:
  explicit GridMemory(const Device& device) : device_(device) {}
  void check(std::uint64_t address, std::size_t bytes) const override;
  /// Whether check() has thrown.
  bool is_violated() const { return violated_; }

 private:
  [[noreturn]] void refuse(std::uint64_t address, std::size_t bytes) const;

  const Device& device_;
  mutable bool violated_ = false;
  mutable std::uint64_t generation_ = ~std::uint64_t{0};
  mutable std::shared_ptr<const Memory::Table> table_;
  mutable std::array<Extent, 4> recent_{};
  mutable std::size_t oldest_ = 0;  ///< of recent_
};

}  // namespace sonicmoe::emulator
