#include "runtime/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "runtime/configuration.h"
#include "runtime/error.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

thread_local int current_ordinal = 0;

const std::vector<std::unique_ptr<Device>>& devices() {
  static const auto& all = *[] {
    auto* made = new std::vector<std::unique_ptr<Device>>;
    for (int i = 0; i < configuration().devices; ++i) made->push_back(std::make_unique<Device>(i));
    return made;
  }();
  return all;
}

void wait_for_all() {
  for (const auto& device : devices()) device->synchronize();
}

/// Destroyed after the objects of the program, which may still call CUDA.
const struct AtExit {
  ~AtExit() {
    for (const auto& device : devices()) device->finish();
  }
} at_exit;

}  // namespace

std::mutex& issue_mutex() {
  static std::mutex mutex;
  return mutex;
}

Device& device_of(int ordinal) {
  require(!devices().empty(), cudaErrorNoDevice);
  require(ordinal >= 0 && ordinal < static_cast<int>(devices().size()), cudaErrorInvalidDevice);
  return *devices()[ordinal];
}

Device& current_device() { return device_of(current_ordinal); }

void choose_device(int ordinal) { current_ordinal = device_of(ordinal).ordinal(); }

std::shared_ptr<Stream> Device::open_stream(Stream::Kind kind) {
  const std::lock_guard lock(issue_mutex());
  std::erase_if(streams_, [](const auto& stream) { return stream->has_ended(); });
  return streams_.emplace_back(std::make_shared<Stream>(*this, kind));
}

void Device::close_stream(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(issue_mutex());
  stream->close();
  std::erase_if(streams_, [](const auto& stream) { return stream->has_ended(); });
}

MomentPtr Device::issue(Stream& stream, Work work, std::vector<MomentPtr> after) {
  const auto follow = [&](const Stream& other) {
    if (MomentPtr last = other.last(); last != nullptr && !last->is_past()) {
      after.push_back(std::move(last));
    }
  };
  if (stream.kind() == Stream::Kind::kBlocking) follow(*legacy_);
  if (stream.kind() == Stream::Kind::kLegacy) {
    for (const auto& other : streams_) {
      if (other->kind() == Stream::Kind::kBlocking) follow(*other);
    }
  }
  return stream.append(std::move(work), std::move(after));
}

void Device::synchronize() {
  std::vector<MomentPtr> ends;
  {
    const std::lock_guard lock(issue_mutex());
    ends.push_back(legacy_->last());
    for (const auto& stream : streams_) ends.push_back(stream->last());
  }
  for (const MomentPtr& end : ends) {
    if (end != nullptr) end->wait();
  }
}

void Device::finish() {
  synchronize();
  const std::lock_guard lock(issue_mutex());
  streams_.clear();
  legacy_.reset();
  threads_.finish();
}

void Device::run(const Action& action) noexcept {
  if (fault() != cudaSuccess || !action) return;
  try {
    action();
  } catch (const DeviceFault& fault) {
    note_fault(fault.status(), fault.what());
  } catch (const std::exception& error) {
    note_fault(cudaErrorLaunchFailure, error.what());
  }
  // Registered here, after the first action, so that it is called before the destructors of static
  // objects that the action has made.
  [[maybe_unused]] static const int registered = std::atexit(wait_for_all);
}

void Device::note_fault(cudaError_t status, const char* text) {
  cudaError_t none = cudaSuccess;
  if (!fault_.compare_exchange_strong(none, status)) return;
  std::fprintf(stderr, "emulator: device %d: %s\n", ordinal_, text);
}

std::size_t Device::total_memory() const {
  const auto pages = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES));
  return pages * static_cast<std::size_t>(sysconf(_SC_PAGE_SIZE)) / configuration().devices;
}

std::size_t Device::free_memory() const {
  const std::size_t total = total_memory();
  return total - std::min(total, memory().used_by(ordinal_));
}

}  // namespace sonicmoe::emulator
