#include "stopwatch.h"

#include <algorithm>
#include <chrono>

namespace sonicmoe::cli {
namespace {

class HostClock final : public verify::Clock {
 public:
  std::size_t mark() override {
    moments_.push_back(std::chrono::steady_clock::now());
    return moments_.size() - 1;
  }
  double seconds(std::size_t from, std::size_t to) override {
    return std::chrono::duration<double>(moments_[to] - moments_[from]).count();
  }
  void restart() override { moments_.clear(); }

 private:
  std::vector<std::chrono::steady_clock::time_point> moments_;
};

}  // namespace

std::unique_ptr<verify::Clock> clock_of(const Target& target) {
  if (target.on_cuda()) return verify::stream_clock(target.exec.stream);
  return std::make_unique<HostClock>();
}

double seconds_of(verify::Clock& clock, const std::function<void()>& work) {
  clock.restart();
  const std::size_t from = clock.mark();
  work();
  return clock.seconds(from, clock.mark());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

void KernelTimes::begin(const char* kernel) { spans_.push_back({kernel, clock_.mark(), 0}); }

void KernelTimes::end() { spans_.back().to = clock_.mark(); }

void KernelTimes::finish_call() {
  std::map<std::string, double> sums;
  for (const Span& span : spans_) {
    sums[span.kernel] += clock_.seconds(span.from, span.to);
    if (std::find(names_.begin(), names_.end(), span.kernel) == names_.end()) {
      names_.push_back(span.kernel);
    }
  }
  for (const auto& [kernel, sum] : sums) seconds_[kernel].push_back(sum);
  spans_.clear();
  clock_.restart();
}

double KernelTimes::median_seconds(const std::string& kernel) const {
  const auto found = seconds_.find(kernel);
  return found == seconds_.end() ? 0.0 : median(found->second);
}

}  // namespace sonicmoe::cli
