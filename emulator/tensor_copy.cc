#include "tensor_copy.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sonicmoe::emulator {
namespace {

constexpr std::uint32_t kChunk = 16;  // bytes that a swizzle moves together
constexpr std::size_t kMostRowBytes = 256 * 8;

}  // namespace

TensorBox::TensorBox(const TensorMap& map, const Coordinates& at) : map_(map), at_(at) {
  row_bytes_ = std::uint32_t{map.boxes[0]} * map.element_bytes;
  rows_ = 1;
  for (int d = 1; d < map.rank; ++d) rows_ *= map.boxes[d];
  const std::int64_t first = at[0];
  const std::int64_t box = map.boxes[0];
  const std::int64_t begin = std::clamp<std::int64_t>(-first, 0, box);
  const std::int64_t end = std::clamp<std::int64_t>(map.sizes[0] - first, begin, box);
  begin_ = static_cast<std::uint32_t>(begin) * map.element_bytes;
  end_ = static_cast<std::uint32_t>(end) * map.element_bytes;
}

template <class F>
void TensorBox::for_each_row(F f) const {
  // The base of a map may lie before its allocation, so addresses wrap around.
  const std::uint64_t base =
      map_.base + static_cast<std::uint64_t>(std::int64_t{at_[0]} * map_.element_bytes) + begin_;
  std::array<std::uint32_t, 5> in_box{};
  for (std::uint32_t number = 0; number < rows_; ++number) {
    std::uint64_t address = base;
    bool is_inside = begin_ < end_;
    for (int d = 1; d < map_.rank; ++d) {
      const std::int64_t position = std::int64_t{at_[d]} + in_box[d];
      is_inside = is_inside && position >= 0 && position < map_.sizes[d];
      address += static_cast<std::uint64_t>(position) * map_.strides[d - 1];
    }
    f(number, is_inside, address);
    for (int d = 1; d < map_.rank && ++in_box[d] == map_.boxes[d]; ++d) in_box[d] = 0;
  }
}

void TensorBox::check(const GlobalMemory& memory) const {
  std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t last = 0;
  for_each_row([&](std::uint32_t, bool is_inside, std::uint64_t address) {
    if (!is_inside) return;
    first = std::min(first, address);
    last = std::max(last, address);
  });
  if (first > last) return;
  const std::size_t bytes = end_ - begin_;
  try {
    memory.check(first, last - first + bytes);
  } catch (const Fault&) {  // not one allocation: each row may have its own
    for_each_row([&](std::uint32_t, bool is_inside, std::uint64_t address) {
      if (is_inside) memory.check(address, bytes);
    });
  }
}

void TensorBox::load(std::byte* shared, std::uint32_t address) const {
  for_each_row([&](std::uint32_t number, bool is_inside, std::uint64_t global) {
    alignas(64) std::byte row[kMostRowBytes];
    if (!is_inside || end_ - begin_ < row_bytes_) std::memset(row, 0, row_bytes_);
    if (is_inside) {
      std::memcpy(row + begin_, reinterpret_cast<const std::byte*>(global), end_ - begin_);
    }
    for (std::uint32_t i = 0; i < row_bytes_; i += kChunk) {
      const std::uint32_t at = swizzled(address + number * row_bytes_ + i, map_.swizzle_bytes);
      std::memcpy(shared + (at - address), row + i, kChunk);
    }
  });
}

void TensorBox::store(const std::byte* shared, std::uint32_t address) const {
  for_each_row([&](std::uint32_t number, bool is_inside, std::uint64_t global) {
    if (!is_inside) return;
    alignas(64) std::byte row[kMostRowBytes];
    for (std::uint32_t i = 0; i < row_bytes_; i += kChunk) {
      const std::uint32_t at = swizzled(address + number * row_bytes_ + i, map_.swizzle_bytes);
      std::memcpy(row + i, shared + (at - address), kChunk);
    }
    std::memcpy(reinterpret_cast<std::byte*>(global), row + begin_, end_ - begin_);
  });
}

}  // namespace sonicmoe::emulator
