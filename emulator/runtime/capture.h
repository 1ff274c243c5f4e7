// Stream capture: operations of a stream, and of those that join it by events, become a graph.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <thread>
#include <vector>

#include "runtime/stream.h"

namespace sonicmoe::emulator {

/// Operations in the order in which they were issued. A launch of the graph keeps this order.
struct Graph {
  std::vector<Action> actions;
};

/// An event. It marks a moment, or a point of a capture.
struct Event {
  int device = 0;
  bool is_timed = true;
  // Held by issue_mutex().
  MomentPtr moment;                  ///< null: never recorded
  std::shared_ptr<Capture> capture;  ///< null: the event marks a moment
  Clock clock;                       ///< of the capture
};

// The caller of everything below holds issue_mutex().

class Capture {
 public:
  Capture(std::shared_ptr<Stream> origin, cudaStreamCaptureMode mode);

  void add(Stream& stream, Action action);
  /// The stream goes on behind the point that the event marks.
  void join(const std::shared_ptr<Stream>& stream, const Clock& clock);
  /// A call was not allowed: cudaStreamEndCapture will return an error.
  void invalidate() { is_valid_ = false; }
  /// Ends the capture of all streams. Throws ApiError if it was invalid.
  Graph end(const Stream& stream);

  bool forbids_unsafe_calls() const;
  /// Throws ApiError if the device's default stream would have to wait for a captured one.
  void refuse_default_stream(const Device& device);

 private:
  bool is_joined() const;

  const cudaStreamCaptureMode mode_;
  const std::thread::id thread_ = std::this_thread::get_id();
  bool is_valid_ = true;
  std::vector<std::shared_ptr<Stream>> streams_;  ///< the origin first
  Graph graph_;
};

void begin_capture(const std::shared_ptr<Stream>& stream, cudaStreamCaptureMode mode);

/// Issues the work, or adds it to the capture of the stream and returns null.
MomentPtr issue(Stream& stream, Work work, std::vector<MomentPtr> after = {});
void record(Event& event, Stream& stream);
/// Work that is issued to the stream from now on waits for the event.
void wait_for(const Event& event, const std::shared_ptr<Stream>& stream);

/// Throws ApiError if the stream is being captured.
void refuse_capture(const Stream& stream, cudaError_t status = cudaErrorStreamCaptureUnsupported);
/// For calls that CUDA counts as unsafe while a stream is captured.
void refuse_capture_of_thread();

}  // namespace sonicmoe::emulator
