// The asynchronous copies and products that the lanes of a warp have issued, and their groups.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "program.h"

namespace sonicmoe::emulator {

/// An action of the hardware that happens once, at a later time.
class Copy {
 public:
  explicit Copy(std::function<void()> act) : act_(std::move(act)) {}
  void finish() {
    if (const auto act = std::exchange(act_, nullptr)) act();
  }
  bool is_finished() const { return act_ == nullptr; }

 private:
  std::function<void()> act_;
};
using CopyTask = std::shared_ptr<Copy>;

/// Each lane has copies that it has issued since its last commit, and committed groups. Lanes
/// mostly issue, commit and wait together, so a copy is stored once for all of them. The products
/// of wgmma are kept in the same way.
class LaneCopies {
 public:
  /// The copy that was issued last, of those that some lane has not waited for; null: none.
  CopyTask last() const { return issues_.empty() ? nullptr : issues_.back().task; }

  /// `number`: of the issue, ascending.
  void issue(CopyTask task, std::uint32_t lanes, std::uint32_t number) {
    issues_.push_back({std::move(task), lanes, kOpen, number});
  }

  /// The number of the oldest issue that some lane has not waited for.
  std::optional<std::uint32_t> oldest() const {
    return issues_.empty() ? std::nullopt : std::optional(issues_.front().number);
  }

  /// commit_group.
  void commit(std::uint32_t lanes) {
    for_equal_lanes(lanes, [this](std::uint32_t some) {
      const std::int64_t group = groups_[std::countr_zero(some)];
      for (std::size_t i = 0; i < issues_.size(); ++i) {
        const std::uint32_t committed = issues_[i].group == kOpen ? issues_[i].lanes & some : 0;
        if (committed == 0) continue;
        if (const std::uint32_t rest = issues_[i].lanes & ~some; rest != 0) {
          issues_.insert(issues_.begin() + static_cast<std::ptrdiff_t>(i),
                         {issues_[i].task, rest, kOpen, issues_[i].number});
          ++i;
        }
        issues_[i].lanes = committed;
        issues_[i].group = group;
      }
      for (std::uint32_t left = some; left != 0; left &= left - 1) {
        ++groups_[std::countr_zero(left)];
      }
    });
  }

  /// wait_group: finishes all committed groups but the last `keep`.
  void wait(std::uint32_t lanes, std::int64_t keep) {
    for_equal_lanes(lanes, [this, keep](std::uint32_t some) {
      const std::int64_t end = groups_[std::countr_zero(some)] - keep;
      for (Issue& issue : issues_) {
        if (issue.group == kOpen || issue.group >= end || (issue.lanes & some) == 0) continue;
        issue.lanes &= ~some;
        issue.task->finish();
      }
      std::erase_if(issues_, [](const Issue& issue) { return issue.lanes == 0; });
    });
  }

  /// All copies of the lanes. Those that are not committed leave the lists.
  std::vector<CopyTask> take(std::uint32_t lanes) {
    std::vector<CopyTask> all;
    for (Issue& issue : issues_) {
      if ((issue.lanes & lanes) == 0) continue;
      all.push_back(issue.task);
      if (issue.group == kOpen) issue.lanes &= ~lanes;
    }
    std::erase_if(issues_, [](const Issue& issue) { return issue.lanes == 0; });
    return all;
  }

 private:
  static constexpr std::int64_t kOpen = -1;

  struct Issue {
    CopyTask task;
    std::uint32_t lanes;
    std::int64_t group;  ///< its number in these lanes, or kOpen
    std::uint32_t number;
  };

  /// Calls f(lanes) once if all lanes have committed equally many groups, else once for each lane.
  template <class F>
  void for_equal_lanes(std::uint32_t lanes, const F& f) {
    const std::int64_t first = groups_[std::countr_zero(lanes)];
    std::uint32_t others = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      others |= static_cast<std::uint32_t>(groups_[lane] != first) << lane;
    }
    if ((lanes & others) == 0) return f(lanes);
    for (; lanes != 0; lanes &= lanes - 1) f(lanes & -lanes);
  }

  std::vector<Issue> issues_;  // oldest first
  std::array<std::int64_t, kLanes> groups_{};
};

}  // namespace sonicmoe::emulator
