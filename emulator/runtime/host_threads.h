// Threads of the host that run kernels. They are reused: memory that a new thread allocates is new
// to the process, and its first use takes longer than many kernels.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace sonicmoe::emulator {

class HostThreads {
 public:
  ~HostThreads() { finish(); }

  /// Runs the task at once, on an idle thread or on a new one.
  void run(std::function<void()> task);
  /// Ends the threads, after their tasks.
  void finish();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::size_t idle_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace sonicmoe::emulator
