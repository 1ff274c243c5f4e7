#include "verify/blocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "verify/convert.h"

namespace sonicmoe::verify {
namespace {

// Byte by byte, the loops of these functions take a fifth of a test's time, and most of it if
// sanitizers check each byte.
#define SONICMOE_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

constexpr std::int64_t kWord = sizeof(std::uint64_t);
constexpr std::uint64_t kOnes = 0x0101010101010101;  // each byte is 1: all bytes are allowed

SONICMOE_UNCHECKED std::uint64_t word(const std::uint8_t* bytes) {
  std::uint64_t value;
  std::memcpy(&value, bytes, kWord);
  return value;
}

SONICMOE_UNCHECKED void fill_allowed(const std::uint8_t* allowed, std::int64_t count,
                                     std::uint8_t filling, std::uint8_t* bytes) {
  std::int64_t i = 0;
  for (; i + kWord <= count; i += kWord) {
    const std::uint64_t mask = word(allowed + i) * 0xff;
    const std::uint64_t value = (word(bytes + i) & ~mask) | (kOnes * filling & mask);
    std::memcpy(bytes + i, &value, kWord);
  }
  for (; i < count; ++i) bytes[i] = allowed[i] != 0 ? filling : bytes[i];
}

// The first byte that differs and is not allowed to, or `count`.
SONICMOE_UNCHECKED std::int64_t first_forbidden(const std::uint8_t* allowed,
                                                const std::uint8_t* before, const std::uint8_t* now,
                                                std::int64_t count) {
  std::int64_t i = 0;
  while (i < count) {
    const bool whole = i + kWord <= count;
    if (whole && (word(now + i) == word(before + i) || word(allowed + i) == kOnes)) {
      i += kWord;
    } else if (now[i] == before[i] || allowed[i] != 0) {
      ++i;
    } else {
      return i;
    }
  }
  return count;
}

#undef SONICMOE_UNCHECKED

}  // namespace

Memory host_memory() {
  Memory m;
  m.allocate = [](std::int64_t bytes) -> void* {
    return std::aligned_alloc(256, static_cast<std::size_t>((bytes + 255) / 256 * 256));
  };
  m.release = [](void* address) { std::free(address); };
  const auto copy = [](void* to, const void* from, std::int64_t bytes) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  };
  m.upload = copy;
  m.download = copy;
  return m;
}

Block::Block(const Memory& memory, std::string what, std::int64_t bytes)
    : memory_(memory),
      what_(std::move(what)),
      bytes_(bytes),
      image_(static_cast<std::size_t>(bytes + 2 * kGuard), kPoison),
      allowed_(static_cast<std::size_t>(bytes), 0),
      device_(static_cast<std::uint8_t*>(memory.allocate(bytes + 2 * kGuard))) {
  if (device_ == nullptr) {
    throw Error(Status::kInternal,
                "the harness could not allocate " + std::to_string(bytes) + " bytes for " + what_);
  }
}

Block::~Block() { memory_.release(device_); }

void Block::allow(std::int64_t offset, std::int64_t bytes) {
  std::fill_n(allowed_.begin() + offset, bytes, std::uint8_t{1});
}
void Block::allow_all() { std::fill(allowed_.begin(), allowed_.end(), std::uint8_t{1}); }
void Block::allow_none() { std::fill(allowed_.begin(), allowed_.end(), std::uint8_t{0}); }

void Block::poison(std::uint8_t filling) { fill_allowed(allowed_.data(), bytes_, filling, host()); }

void Block::upload() {
  memory_.upload(device_, image_.data(), static_cast<std::int64_t>(image_.size()));
}

std::optional<std::int64_t> Block::download() {
  const std::vector<std::uint8_t> before = image_;
  memory_.download(image_.data(), device_, static_cast<std::int64_t>(image_.size()));
  const auto in_guard = [&](std::int64_t begin) {
    const auto first = image_.begin() + begin;
    return std::mismatch(first, first + kGuard, before.begin() + begin).first - first;
  };
  if (const std::int64_t at = in_guard(0); at < kGuard) return at - kGuard;
  const std::int64_t at = first_forbidden(allowed_.data(), before.data() + kGuard, host(), bytes_);
  if (at < bytes_) return at;
  if (const std::int64_t behind = in_guard(kGuard + bytes_); behind < kGuard) {
    return bytes_ + behind;
  }
  return std::nullopt;
}

void BlockView::allow() const {
  const std::int64_t size = dtype_bytes(view.dtype);
  const std::int64_t count = oracle::element_count(view);
  if (count == 0) return;
  // Elements along the last axis often lie side by side.
  const std::int32_t last = view.rank - 1;
  const std::int64_t run = last >= 0 && view.stride[last] == 1 ? view.shape[last] : 1;
  for (std::int64_t i = 0; i < count; i += run) {
    block->allow((offset + oracle::element_offset(view, i)) * size, run * size);
  }
}

BlockView Blocks::add_view(const std::string& what, const Tensor& view) {
  return {&add(what, extent(view) * dtype_bytes(view.dtype)), view, 0};
}

std::int64_t extent(const Tensor& view) {
  std::int64_t last = 0;
  for (std::int32_t i = 0; i < view.rank; ++i) {
    if (view.shape[i] == 0) return 0;
    last += (view.shape[i] - 1) * view.stride[i];
  }
  return last + 1;
}

}  // namespace sonicmoe::verify
