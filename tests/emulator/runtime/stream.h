// Streams: queues of operations, each with a thread of the host that runs them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace sonicmoe::emulator {

/// What an operation does. A graph runs it several times. Throws DeviceFault.
using Action = std::function<void()>;

/// The end of an operation.
class Moment {
 public:
  void wait() const;
  bool is_past() const;
  std::chrono::steady_clock::time_point time() const;  ///< once it is past
  void pass();

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<std::chrono::steady_clock::time_point> time_;
};
using MomentPtr = std::shared_ptr<const Moment>;

class Capture;
class Device;
class Stream;

/// How many operations of each captured stream come before a point of a capture.
using Clock = std::map<const Stream*, std::int64_t>;

class Stream {
 public:
  enum class Kind {
    kLegacy,       ///< the default stream of a device
    kBlocking,     ///< waits for the default stream, which waits for it
    kNonBlocking,  ///< does not
  };
  Stream(Device& device, Kind kind) : device_(device), kind_(kind) {}
  ~Stream();

  Device& device() const { return device_; }
  Kind kind() const { return kind_; }

  /// Runs the action after the earlier ones and after these moments.
  MomentPtr append(Action action, std::vector<MomentPtr> after);
  /// The end of the operation that was appended last; null if there is none.
  MomentPtr last() const;
  /// Nothing more will be appended.
  void close();
  /// Whether it is closed and has done everything.
  bool has_ended() const;

  // Held by issue_mutex().
  std::shared_ptr<Capture> capture;  ///< into which operations go instead
  Clock clock;                       ///< of the capture

 private:
  struct Operation {
    Action action;
    std::vector<MomentPtr> after;
    std::shared_ptr<Moment> end;
  };
  void work();

  Device& device_;
  const Kind kind_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> waiting_;
  MomentPtr last_;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace sonicmoe::emulator
