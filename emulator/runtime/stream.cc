#include "runtime/stream.h"

#include <utility>

#include "runtime/device.h"

namespace sonicmoe::emulator {

void Moment::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return time_.has_value(); });
}

bool Moment::is_past() const {
  const std::lock_guard lock(mutex_);
  return time_.has_value();
}

std::chrono::steady_clock::time_point Moment::time() const {
  const std::lock_guard lock(mutex_);
  return *time_;
}

void Moment::pass() {
  const std::lock_guard lock(mutex_);
  if (time_.has_value()) return;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

Stream::~Stream() {
  close();
  if (worker_.joinable()) worker_.join();
}

MomentPtr Stream::append(Work work, std::vector<MomentPtr> after) {
  const std::lock_guard lock(mutex_);
  auto end = std::make_shared<Moment>();
  last_ = end;
  waiting_.push_back({std::move(work), std::move(after), std::move(end)});
  if (!worker_.joinable()) worker_ = std::thread(&Stream::work, this);
  changed_.notify_one();
  return last_;
}

MomentPtr Stream::last() const {
  const std::lock_guard lock(mutex_);
  return last_;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

bool Stream::has_ended() const {
  const std::lock_guard lock(mutex_);
  return closed_ && (last_ == nullptr || last_->is_past());
}

/// Starts the kernel. `running` is first the previous kernel, then this kernel.
void Stream::start(const Operation& operation, Running& running) {
  const Running previous = running;
  if (previous.end != nullptr) {
    (operation.work.may_overlap ? previous.launched_next : previous.end)->wait();
  }
  const auto launched_next = std::make_shared<Moment>();
  const auto done = std::make_shared<Moment>();
  device_.threads().run([this, kernel = operation.work.kernel,
                         may_overlap = operation.work.may_overlap, end = operation.end, previous,
                         launched_next, done] {
    Neighbours neighbours;
    if (may_overlap) {
      neighbours.previous_is_complete = [&] {
        return previous.done == nullptr || previous.done->is_past();
      };
    }
    neighbours.launch_next = [&] { launched_next->pass(); };
    device_.run([&] { kernel(neighbours); });
    launched_next->pass();  // also if the kernel failed, or did not run after an earlier fault
    done->pass();
    if (previous.end != nullptr) previous.end->wait();
    end->pass();
  });
  running = {launched_next, done, operation.end};
}

void Stream::work() {
  Running running;
  const auto finish = [&] {
    if (running.end != nullptr) running.end->wait();
    running = {};
  };
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) break;
    const Operation operation = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    for (const MomentPtr& moment : operation.after) moment->wait();
    if (operation.work.kernel) {
      start(operation, running);
      continue;
    }
    finish();
    device_.run(operation.work.action);
    operation.end->pass();
  }
  finish();
}

}  // namespace sonicmoe::emulator
