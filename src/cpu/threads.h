// A team of threads for the duration of one call: phases of numbered tasks with a barrier between.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Threads worth starting for `flops` of work: Exec's number (0: every core this process may use),
/// fewer where a thread would start for less work than starting it costs.
std::int32_t thread_count(const Exec& exec, double flops);

/// `size` workers, the caller among them (worker 0). Threads start with the first phase that has
/// more than one task and end with the team. Tasks go to whoever is free, so a task's result must
/// not depend on its worker.
class Team {
 public:
  explicit Team(std::int32_t size) : size_(size < 1 ? 1 : size) {}
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::int32_t size() const { return size_; }

  /// Calls body(task, worker) once for every task and returns when all are done. The first
  /// exception of a task is thrown here; tasks not yet begun are then skipped.
  template <class Body>
  void run(std::int64_t tasks, Body&& body) {
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
  void run_phase(const Phase& phase);
  void start();
  void work(std::int32_t worker);
  void serve(std::int32_t worker);

  const std::int32_t size_;
  std::vector<std::thread> threads_;
  std::atomic<std::int64_t> next_{0};
  Phase phase_;
  std::mutex mutex_;
  std::condition_variable begin_;
  std::condition_variable end_;
  std::uint64_t generation_ = 0;
  std::int32_t busy_ = 0;
  bool closing_ = false;
  std::exception_ptr error_;
};

}  // namespace sonicmoe::cpu
