#include "cpu/threads.h"

#include <algorithm>
#include <thread>
#if defined(__linux__)
#include <sched.h>
#endif

namespace sonicmoe::cpu {
namespace {

// Starting a thread costs about 20 us. A thread with fewer flops costs more than it saves.
constexpr double kFlopsPerThread = 4e6;
// More threads than this do not run at the same time.
constexpr std::int32_t kThreadsPerCore = 4;

std::int32_t usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<std::int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace

std::int32_t thread_count(const Exec& exec, double flops) {
  const std::int32_t cores = usable_cores();
  const std::int32_t wanted =
      exec.num_threads > 0 ? std::min(exec.num_threads, kThreadsPerCore * cores) : cores;
  const double worth = 1.0 + flops / kFlopsPerThread;
  return worth < wanted ? static_cast<std::int32_t>(worth) : wanted;
}

Team::Team(std::int32_t size, std::int64_t tasks)
    : size_(static_cast<std::int32_t>(
          std::clamp<std::int64_t>(tasks, 1, std::max<std::int32_t>(size, 1)))) {
  threads_.reserve(static_cast<std::size_t>(size_ - 1));
}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  pthread_cond_broadcast(&begin_);
  for (const Thread& thread : threads_) pthread_join(thread.handle, nullptr);
  pthread_cond_destroy(&begin_);
  pthread_cond_destroy(&end_);
}

// pthreads rather than std::thread: std::thread allocates and reports a refusal by an exception.
void Team::start_threads(std::int64_t wanted) noexcept {
  while (!refused_ && std::ssize(threads_) < wanted) {
    const auto worker = static_cast<std::int32_t>(threads_.size()) + 1;
    Thread& thread = threads_.emplace_back(Thread{this, worker, phases_, {}});
    const auto body = [](void* argument) -> void* {
      const Thread& self = *static_cast<const Thread*>(argument);
      self.team->serve(self.worker, self.seen);
      return nullptr;
    };
    if (pthread_create(&thread.handle, nullptr, body, &thread) != 0) {
      threads_.pop_back();
      refused_ = true;
    }
  }
}

void Team::work(std::int32_t worker) noexcept {
  while (true) {
    const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= phase_.tasks) return;
    phase_.call(phase_.context, task, worker);
  }
}

// The caller holds mutex_. May return without a signal, so callers repeat it in a loop.
void Team::wait(pthread_cond_t& condition) noexcept {
  pthread_cond_wait(&condition, mutex_.native_handle());
}

void Team::serve(std::int32_t worker, std::uint64_t seen) noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    while (!closing_ && phases_ == seen) wait(begin_);
    if (closing_) return;
    seen = phases_;
    lock.unlock();
    work(worker);
    lock.lock();
    if (--busy_ == 0) pthread_cond_signal(&end_);
  }
}

void Team::run_phase(const Phase& phase) noexcept {
  start_threads(std::min<std::int64_t>(size_, phase.tasks) - 1);
  if (threads_.empty() || phase.tasks <= 1) {
    for (std::int64_t task = 0; task < phase.tasks; ++task) phase.call(phase.context, task, 0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    phase_ = phase;
    next_.store(0, std::memory_order_relaxed);
    busy_ = static_cast<std::int32_t>(threads_.size());
    ++phases_;
  }
  pthread_cond_broadcast(&begin_);
  work(0);
  const std::lock_guard lock(mutex_);
  while (busy_ > 0) wait(end_);
}

}  // namespace sonicmoe::cpu
