#include "cpu/threads.h"

#include <algorithm>
#include <utility>
#if defined(__linux__)
#include <sched.h>
#endif

namespace sonicmoe::cpu {
namespace {

// Starting a thread costs some 20 us: below this share of work it does not pay.
constexpr double kFlopsPerThread = 4e6;

std::int32_t usable_cores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<std::int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace

std::int32_t thread_count(const Exec& exec, double flops) {
  const std::int32_t wanted = exec.num_threads > 0 ? exec.num_threads : usable_cores();
  const double worth = 1.0 + flops / kFlopsPerThread;
  return worth < wanted ? static_cast<std::int32_t>(worth) : wanted;
}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  begin_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::start() {
  threads_.reserve(static_cast<std::size_t>(size_ - 1));
  for (std::int32_t worker = 1; worker < size_; ++worker) {
    threads_.emplace_back([this, worker] { serve(worker); });
  }
}

void Team::work(std::int32_t worker) {
  try {
    while (true) {
      const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= phase_.tasks) return;
      phase_.call(phase_.context, task, worker);
    }
  } catch (...) {
    next_.store(phase_.tasks, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void Team::serve(std::int32_t worker) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    begin_.wait(lock, [&] { return closing_ || generation_ != seen; });
    if (closing_) return;
    seen = generation_;
    lock.unlock();
    work(worker);
    lock.lock();
    if (--busy_ == 0) end_.notify_one();
  }
}

void Team::run_phase(const Phase& phase) {
  if (size_ == 1 || phase.tasks <= 1) {
    for (std::int64_t task = 0; task < phase.tasks; ++task) phase.call(phase.context, task, 0);
    return;
  }
  if (threads_.empty()) start();
  {
    const std::lock_guard lock(mutex_);
    phase_ = phase;
    next_.store(0, std::memory_order_relaxed);
    busy_ = static_cast<std::int32_t>(threads_.size());
    ++generation_;
  }
  begin_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  end_.wait(lock, [&] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace sonicmoe::cpu
