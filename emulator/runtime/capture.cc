#include "runtime/capture.h"

#include <algorithm>
#include <utility>

#include "runtime/device.h"
#include "runtime/error.h"

namespace sonicmoe::emulator {
namespace {

/// Captures that have not ended.
std::vector<Capture*>& open_captures() {
  static auto& captures = *new std::vector<Capture*>;  // destructors of a program may call CUDA
  return captures;
}

}  // namespace

Capture::Capture(std::shared_ptr<Stream> origin, cudaStreamCaptureMode mode) : mode_(mode) {
  streams_.push_back(std::move(origin));
}

void Capture::add(Stream& stream, Action action) {
  require(is_valid_, cudaErrorStreamCaptureInvalidated);
  graph_.actions.push_back(std::move(action));
  ++stream.clock[&stream];
}

void Capture::join(const std::shared_ptr<Stream>& stream, const Clock& clock) {
  require(is_valid_, cudaErrorStreamCaptureInvalidated);
  if (stream->capture == nullptr) {
    stream->capture = streams_.front()->capture;
    streams_.push_back(stream);
  }
  for (const auto& [other, count] : clock) {
    std::int64_t& known = stream->clock[other];
    known = std::max(known, count);
  }
}

bool Capture::is_joined() const {
  const Clock& known = streams_.front()->clock;
  return std::all_of(streams_.begin(), streams_.end(), [&](const auto& stream) {
    const auto own = stream->clock.find(stream.get());
    const auto joined = known.find(stream.get());
    return own == stream->clock.end() || own->second == 0 ||
           (joined != known.end() && joined->second == own->second);
  });
}

Graph Capture::end(const Stream& stream) {
  require(&stream == streams_.front().get(), cudaErrorStreamCaptureUnmatched);
  require(mode_ == cudaStreamCaptureModeRelaxed || thread_ == std::this_thread::get_id(),
          cudaErrorStreamCaptureWrongThread);
  const bool joined = is_joined();
  for (const auto& captured : streams_) {
    captured->capture.reset();
    captured->clock.clear();
  }
  std::erase(open_captures(), this);
  require(is_valid_, cudaErrorStreamCaptureInvalidated);
  require(joined, cudaErrorStreamCaptureUnjoined);
  return std::move(graph_);
}

void Capture::refuse_default_stream(const Device& device) {
  for (const auto& stream : streams_) {
    if (&stream->device() == &device && stream->kind() == Stream::Kind::kBlocking) {
      refuse_capture(*stream, cudaErrorStreamCaptureImplicit);
    }
  }
}

bool Capture::forbids_unsafe_calls() const {
  return mode_ == cudaStreamCaptureModeGlobal ||
         (mode_ == cudaStreamCaptureModeThreadLocal && thread_ == std::this_thread::get_id());
}

void begin_capture(const std::shared_ptr<Stream>& stream, cudaStreamCaptureMode mode) {
  require(stream->kind() != Stream::Kind::kLegacy, cudaErrorStreamCaptureUnsupported);
  require(stream->capture == nullptr, cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>(stream, mode);
  open_captures().push_back(stream->capture.get());
}

MomentPtr issue(Stream& stream, Work work, std::vector<MomentPtr> after) {
  if (stream.capture != nullptr) {
    // The kernels of a graph run one after the other.
    if (work.kernel) work.action = [kernel = std::move(work.kernel)] { kernel({}); };
    stream.capture->add(stream, std::move(work.action));
    return nullptr;
  }
  if (stream.kind() == Stream::Kind::kLegacy) {
    for (Capture* capture : open_captures()) capture->refuse_default_stream(stream.device());
  }
  return stream.device().issue(stream, std::move(work), std::move(after));
}

void record(Event& event, Stream& stream) {
  event.capture = stream.capture;
  event.clock = stream.clock;
  event.moment = stream.capture != nullptr ? nullptr : issue(stream, {});
}

void wait_for(const Event& event, const std::shared_ptr<Stream>& stream) {
  if (event.capture == nullptr) {
    if (event.moment == nullptr) return;
    refuse_capture(*stream, cudaErrorStreamCaptureIsolation);
    issue(*stream, {}, {event.moment});
    return;
  }
  const bool is_open =
      std::count(open_captures().begin(), open_captures().end(), event.capture.get()) != 0;
  require(is_open, cudaErrorCapturedEvent);
  if (stream->capture != nullptr && stream->capture != event.capture) {
    stream->capture->invalidate();
    event.capture->invalidate();
    throw ApiError{cudaErrorStreamCaptureMerge};
  }
  require(stream->kind() != Stream::Kind::kLegacy, cudaErrorStreamCaptureImplicit);
  event.capture->join(stream, event.clock);
}

void refuse_capture(const Stream& stream, cudaError_t status) {
  if (stream.capture == nullptr) return;
  stream.capture->invalidate();
  throw ApiError{status};
}

void refuse_capture_of_thread() {
  for (Capture* capture : open_captures()) {
    if (!capture->forbids_unsafe_calls()) continue;
    capture->invalidate();
    throw ApiError{cudaErrorStreamCaptureUnsupported};
  }
}

}  // namespace sonicmoe::emulator
