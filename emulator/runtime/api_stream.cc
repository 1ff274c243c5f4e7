// Streams and events.
#include "runtime/api.h"

namespace sonicmoe::emulator {

Handles<Stream, cudaStream_t>& streams() {
  static auto& all = *new Handles<Stream, cudaStream_t>;
  return all;
}

Handles<Event, cudaEvent_t>& events() {
  static auto& all = *new Handles<Event, cudaEvent_t>;
  return all;
}

std::shared_ptr<Stream> stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return current_device().legacy();
  return streams().find(handle);
}

void wait_on(const Device& device, const MomentPtr& end) {
  if (end != nullptr) end->wait();
  require(device.fault() == cudaSuccess, device.fault());
}

namespace {

cudaError_t create_stream(cudaStream_t* handle, unsigned flags) {
  return device_call([&] {
    require((flags & ~cudaStreamNonBlocking) == 0, cudaErrorInvalidValue);
    *handle = streams().add(current_device().open_stream(
        flags == cudaStreamNonBlocking ? Stream::Kind::kNonBlocking : Stream::Kind::kBlocking));
  });
}

/// The moment that an event marks; null if it was never recorded.
MomentPtr moment_of(const Event& event) {
  const std::lock_guard lock(issue_mutex());
  require(event.capture == nullptr, cudaErrorCapturedEvent);
  return event.moment;
}

}  // namespace
}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create_stream(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return create_stream(stream, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return create_stream(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return status_of([&] {
    const auto stream = streams().remove(handle);
    stream->device().close_stream(stream);
  });
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  bool is_ready = true;
  const cudaError_t status = device_call([&] {
    const auto stream = stream_of(handle);
    const std::lock_guard lock(issue_mutex());
    refuse_capture(*stream);
    const MomentPtr end = stream->last();
    is_ready = end == nullptr || end->is_past();
    if (is_ready) wait_on(stream->device(), end);
  });
  return status == cudaSuccess && !is_ready ? cudaErrorNotReady : status;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return device_call([&] {
    const auto stream = stream_of(handle);
    MomentPtr end;
    {
      const std::lock_guard lock(issue_mutex());
      refuse_capture(*stream);
      // The default stream waits for the blocking ones.
      const bool is_default = stream->kind() == Stream::Kind::kLegacy;
      end = is_default ? issue(*stream, {}) : stream->last();
    }
    wait_on(stream->device(), end);
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  return device_call([&] {
    require(flags == cudaEventWaitDefault, cudaErrorInvalidValue);
    const auto stream = stream_of(handle);
    const auto waited = events().find(event);
    const std::lock_guard lock(issue_mutex());
    wait_for(*waited, stream);
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return device_call([&] {
    require((flags & ~(cudaEventDisableTiming | cudaEventBlockingSync)) == 0,
            cudaErrorInvalidValue);
    auto made = std::make_shared<Event>();
    made->device = current_device().ordinal();
    made->is_timed = (flags & cudaEventDisableTiming) == 0;
    *event = events().add(std::move(made));
  });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return status_of([&] { events().remove(event); });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return device_call([&] {
    const auto stream = stream_of(handle);
    const auto recorded = events().find(event);
    require(recorded->device == stream->device().ordinal(), cudaErrorInvalidResourceHandle);
    const std::lock_guard lock(issue_mutex());
    record(*recorded, *stream);
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return device_call([&] {
    const auto waited = events().find(event);
    wait_on(device_of(waited->device), moment_of(*waited));
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return device_call([&] {
    const auto first = events().find(from), last = events().find(to);
    require(first->is_timed && last->is_timed, cudaErrorInvalidResourceHandle);
    const MomentPtr begin = moment_of(*first), end = moment_of(*last);
    require(begin != nullptr && end != nullptr, cudaErrorInvalidResourceHandle);
    require(begin->is_past() && end->is_past(), cudaErrorNotReady);
    *milliseconds = std::chrono::duration<float, std::milli>(end->time() - begin->time()).count();
  });
}
