#include "verify/blocks.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "verify/convert.h"

namespace sonicmoe::verify {

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

void Block::poison(std::uint8_t filling) {
  for (std::size_t i = 0; i < allowed_.size(); ++i) {
    if (allowed_[i] != 0) image_[kGuard + i] = filling;
  }
}

void Block::upload() {
  memory_.upload(device_, image_.data(), static_cast<std::int64_t>(image_.size()));
}

std::optional<std::int64_t> Block::download() {
  std::vector<std::uint8_t> now(image_.size());
  memory_.download(now.data(), device_, static_cast<std::int64_t>(now.size()));
  std::optional<std::int64_t> changed;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(now.size()) && !changed; ++i) {
    const std::int64_t at = i - kGuard;
    const bool may_change = at >= 0 && at < bytes_ && allowed_[at] != 0;
    if (now[i] != image_[i] && !may_change) changed = at;
  }
  image_ = std::move(now);
  return changed;
}

void BlockView::allow() const {
  const std::int64_t size = dtype_bytes(view.dtype);
  const std::int64_t count = oracle::element_count(view);
  for (std::int64_t i = 0; i < count; ++i) {
    block->allow((offset + oracle::element_offset(view, i)) * size, size);
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
