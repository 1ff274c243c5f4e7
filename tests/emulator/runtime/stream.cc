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
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

Stream::~Stream() {
  close();
  if (worker_.joinable()) worker_.join();
}

MomentPtr Stream::append(Action action, std::vector<MomentPtr> after) {
  const std::lock_guard lock(mutex_);
  auto end = std::make_shared<Moment>();
  last_ = end;
  waiting_.push_back({std::move(action), std::move(after), std::move(end)});
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

void Stream::work() {
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closed_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const Operation operation = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    for (const MomentPtr& moment : operation.after) moment->wait();
    device_.run(operation.action);
    operation.end->pass();
  }
}

}  // namespace sonicmoe::emulator
