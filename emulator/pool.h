// Memory of warps and CTAs. Later ones use it again, because fresh pages of the system take longer
// than most kernels.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "clocks.h"

namespace sonicmoe::emulator {

struct FreeMemory {
  void operator()(std::byte* p) const { std::free(p); }
};

/// Memory that is full of garbage, or of what its last user left.
class AlignedMemory {
 public:
  static constexpr std::size_t kAlignment = 1024;  ///< of shared memory on the device

  explicit AlignedMemory(std::size_t bytes)
      : bytes_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes))) {
    constexpr int kGarbage = 0xa5;
    std::memset(bytes_.get(), kGarbage, bytes);
  }
  std::byte* bytes() const { return bytes_.get(); }

 private:
  std::unique_ptr<std::byte[], FreeMemory> bytes_;
};

/// The registers of a warp.
struct RegisterFile : AlignedMemory {
  using AlignedMemory::AlignedMemory;
  /// The program (Program::number) whose constants are in the file. No instruction changes them, so
  /// the next warp of this program finds them there.
  std::uint64_t constants_of = 0;
};

/// Shared memory of a CTA, and who wrote it last.
struct SharedMemory : AlignedMemory {
  static constexpr std::size_t kGranule = 16;  ///< bytes whose last write is known
  static constexpr std::size_t kUnit = 4;      ///< bytes that share a state of the history
  struct Write {
    std::uint64_t time = 0;  ///< at or before the start of the CTA: never
    int warp = 0;
  };

  explicit SharedMemory(std::size_t bytes)
      : AlignedMemory(bytes), writes(bytes / kGranule), states(bytes / kUnit) {}

  std::vector<Write> writes;           ///< the last one to each granule
  std::vector<History::State> states;  ///< of each unit: clocks.h
  std::uint64_t time = 0;  ///< counts writes and fences of all CTAs that have used the memory
};

/// Unused objects of T, by their size.
template <class T>
class Pool {
 public:
  struct GiveBack {
    std::size_t size;
    void operator()(T* object) const { pool().put(size, object); }
  };

  static Pool& pool() {
    static Pool& all = *new Pool;  // grids may run until the process ends
    return all;
  }

  /// An object of at least `bytes`.
  std::unique_ptr<T, GiveBack> take(std::size_t bytes) {
    // Few sizes, so that kernels share them.
    const std::size_t size = std::bit_ceil(std::max(bytes, AlignedMemory::kAlignment));
    const std::lock_guard lock(mutex_);
    std::vector<T*>& spare = spare_[size];
    if (spare.empty()) return {new T(size), GiveBack{size}};
    T* const object = spare.back();
    spare.pop_back();
    return {object, GiveBack{size}};
  }

 private:
  void put(std::size_t size, T* object) {
    const std::lock_guard lock(mutex_);
    spare_[size].push_back(object);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<T*>> spare_;
};

template <class T>
using Pooled = std::unique_ptr<T, typename Pool<T>::GiveBack>;

}  // namespace sonicmoe::emulator
