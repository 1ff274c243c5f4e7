// Guarded memory: a buffer between two guards. It records which of its bytes may change, and finds
// every other byte that has changed.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "verify/implementation.h"

namespace sonicmoe::verify {

/// All bits set: NaN in every float type, -1 in integers. Guards and unwritten memory hold it.
inline constexpr std::uint8_t kPoison = 0xff;
/// A second filling, finite and large: a result that depends on the filling differs between runs.
inline constexpr std::uint8_t kOtherPoison = 0x55;

/// Bytes on the device with a guard before and after, and a copy of all of them on the host.
class Block {
 public:
  Block(const Memory& memory, std::string what, std::int64_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const std::string& what() const { return what_; }
  std::int64_t bytes() const { return bytes_; }
  std::uint8_t* host() { return image_.data() + kGuard; }
  std::uint8_t* device() { return device_ + kGuard; }

  /// Lets the implementation write these bytes; all others must stay as they are.
  void allow(std::int64_t offset, std::int64_t bytes);
  void allow_all();
  void allow_none();
  /// Fills the bytes that may be written.
  void poison(std::uint8_t filling);
  /// Host copy to device.
  void upload();
  /// Device to host copy. Returns the offset of the first byte that changed without permission;
  /// negative offsets lie in the guard before the buffer.
  std::optional<std::int64_t> download();

 private:
  static constexpr std::int64_t kGuard = 1024;
  const Memory& memory_;
  std::string what_;
  std::int64_t bytes_;
  std::vector<std::uint8_t> image_;    // guards and buffer
  std::vector<std::uint8_t> allowed_;  // 1: may change
  std::uint8_t* device_;
};

/// A strided view into a block; an absent tensor has no block.
struct BlockView {
  Block* block = nullptr;
  Tensor view;  ///< data is null
  std::int64_t offset = 0;

  Tensor on_host() const { return at(block == nullptr ? nullptr : block->host()); }
  Tensor on_device() const { return at(block == nullptr ? nullptr : block->device()); }
  /// Allows exactly the elements of this view to be written.
  void allow() const;

 private:
  Tensor at(std::uint8_t* base) const {
    Tensor t = view;
    if (base != nullptr) t.data = base + offset * dtype_bytes(view.dtype);
    return t;
  }
};

/// Owns the blocks of one case.
class Blocks {
 public:
  explicit Blocks(const Memory& memory) : memory_(memory) {}
  Block& add(const std::string& what, std::int64_t bytes) {
    return blocks_.emplace_back(memory_, what, bytes);
  }
  /// A block that holds exactly this view.
  BlockView add_view(const std::string& what, const Tensor& view);
  std::deque<Block>& all() { return blocks_; }

 private:
  const Memory& memory_;
  std::deque<Block> blocks_;
};

/// Elements from the first to the last one of a view, gaps included; 0 for an empty view.
std::int64_t extent(const Tensor& view);

}  // namespace sonicmoe::verify
