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
#include <utility>
#include <vector>

#include "dependent_launch.h"

namespace sonicmoe::emulator {

/// The work of an operation. A graph may run it several times. Throws DeviceFault.
using Action = std::function<void()>;

/// Runs a kernel.
using KernelAction = std::function<void(const Neighbours&)>;

/// An action, or a kernel instead.
struct Work {
  Work() = default;
  Work(Action does) : action(std::move(does)) {}  // NOLINT(google-explicit-constructor)
  Work(KernelAction runs, bool overlaps) : kernel(std::move(runs)), may_overlap(overlaps) {}

  Action action;
  KernelAction kernel;
  /// The kernel may start before the previous kernel of the stream has ended.
  bool may_overlap = false;
};

/// The end of an operation.
class Moment {
 public:
  void wait() const;
  bool is_past() const;
  std::chrono::steady_clock::time_point time() const;  ///< once it is past
  void pass();                                         ///< nothing happens if it is past

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

  /// Runs the work after all earlier work of the stream and after the moments `after`.
  MomentPtr append(Work work, std::vector<MomentPtr> after);
  /// The end of the operation that was appended last; null if there is none.
  MomentPtr last() const;
  /// Nothing more will be appended.
  void close();
  /// Whether the stream is closed and all its work is done.
  bool has_ended() const;

  // Held by issue_mutex().
  std::shared_ptr<Capture> capture;  ///< into which operations go instead
  Clock clock;                       ///< of the capture

 private:
  struct Operation {
    Work work;
    std::vector<MomentPtr> after;
    std::shared_ptr<Moment> end;
  };
  /// A kernel that was started. At its end all kernels before it have ended too.
  struct Running {
    MomentPtr launched_next, done, end;
  };
  void work();
  void start(const Operation& operation, Running& running);

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
