// The threads of one call: phases of numbered tasks with a barrier after each phase.
//
// Tasks never throw and never allocate. A call obtains all its memory on the calling thread, before
// its first write to the caller's buffers, for two reasons:
// - A call that is refused for want of memory has then written nothing, so it may be repeated.
// - A thread's first throw makes the C++ runtime allocate thread-local storage. If that allocation
//   fails, glibc ends the process.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <type_traits>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Threads worth starting for `flops` of work: Exec's number (0: every core this process may use),
/// at most four per core, and fewer where a thread would do less work than its start costs.
std::int32_t thread_count(const Exec& exec, double flops);

/// Up to `size` workers; worker 0 is the calling thread. A phase starts the threads that it has
/// tasks for, and the team joins them when it ends. If the system refuses a thread, the workers
/// that run do its tasks, so a task's result must not depend on its worker.
class Team {
 public:
  /// `tasks`: the largest number of tasks in any phase, where it is known. Allocates.
  explicit Team(std::int32_t size, std::int64_t tasks = std::numeric_limits<std::int64_t>::max());
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// Every worker number is below this.
  std::int32_t size() const { return size_; }

  /// Calls body(task, worker) once for every task and returns when all are done. Ends the process
  /// if a task throws.
  template <class Body>
  void run(std::int64_t tasks, Body&& body) noexcept {
    using Plain = std::remove_reference_t<Body>;
    run_phase({tasks, &body, [](const void* context, std::int64_t task, std::int32_t worker) {
                 (*static_cast<Plain*>(const_cast<void*>(context)))(task, worker);
               }});
  }

 private:
  struct Phase {
    std::int64_t tasks = 0;
    const void* context = nullptr;
    void (*call)(const void* context, std::int64_t task, std::int32_t worker) = nullptr;
  };
  struct Thread {
    Team* team;
    std::int32_t worker;
    std::uint64_t seen;  ///< the last phase that began before the thread did
    pthread_t handle;
  };
  void run_phase(const Phase& phase) noexcept;
  void start_threads(std::int64_t wanted) noexcept;
  void work(std::int32_t worker) noexcept;
  void serve(std::int32_t worker, std::uint64_t seen) noexcept;
  void wait(pthread_cond_t& condition) noexcept;

  const std::int32_t size_;
  std::vector<Thread> threads_;  ///< the running ones; its capacity is fixed
  bool refused_ = false;         ///< the system refused a thread: the team asks for no more
  std::atomic<std::int64_t> next_{0};
  Phase phase_;
  std::mutex mutex_;
  // Not std::condition_variable: from GCC 12 on its wait() is the symbol GLIBCXX_3.4.30, which the
  // libstdc++ of RHEL 9 lacks, and the Python wheel would not load there.
  pthread_cond_t begin_ = PTHREAD_COND_INITIALIZER;
  pthread_cond_t end_ = PTHREAD_COND_INITIALIZER;
  std::uint64_t phases_ = 0;  ///< begun so far
  std::int32_t busy_ = 0;
  bool closing_ = false;
};

/// One T for each worker of a team, made before the first phase.
template <class T>
class PerWorker {
 public:
  template <class... Args>
  explicit PerWorker(const Team& team, const Args&... args) {
    items_.reserve(static_cast<std::size_t>(team.size()));
    for (std::int32_t i = 0; i < team.size(); ++i) items_.emplace_back(args...);
  }
  T& operator[](std::int32_t worker) { return items_[static_cast<std::size_t>(worker)]; }

 private:
  std::vector<T> items_;
};

}  // namespace sonicmoe::cpu
