#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "machine.h"

namespace sonicmoe::emulator {
namespace {

using Clock = std::chrono::steady_clock;

/// Rounds without progress after which a grid gives its core to others.
constexpr int kIdleRounds = 8;
/// After a warp's turn, the grid runs a deferred copy with probability 1 / kCopyTurns.
constexpr std::uint64_t kCopyTurns = 4;
/// With probability 1 / kHeadStartGrids a grid sleeps for kHeadStart after it has launched the next
/// kernel, so that work which the next kernel does too early becomes visible.
constexpr std::uint64_t kHeadStartGrids = 4;
constexpr std::chrono::milliseconds kHeadStart{2};

std::uint32_t resident_clusters(const Launch& launch, const Settings& settings) {
  const std::size_t shared = launch.program->static_shared + launch.dynamic_shared;
  std::size_t ctas = settings.multiprocessor_threads / launch.block.count();
  if (shared > 0) ctas = std::min(ctas, settings.shared_bytes / shared);
  ctas = std::max<std::size_t>(ctas, 1) * settings.multiprocessors;
  return std::max<std::uint32_t>(static_cast<std::uint32_t>(ctas) / launch.cluster.count(), 1);
}

}  // namespace

Grid::Grid(const Launch& launch, const Settings& settings, const GlobalMemory& memory,
           Neighbours neighbours)
    : launch_(launch),
      settings_(settings),
      memory_(memory),
      neighbours_(std::move(neighbours)),
      random_(settings.seed) {}

void Grid::start_clusters() {
  const Dim cluster = launch_.cluster;
  const Dim clusters{launch_.grid.x / cluster.x, launch_.grid.y / cluster.y,
                     launch_.grid.z / cluster.z};
  while (next_cluster_ < clusters.count() &&
         resident_.size() < resident_clusters(launch_, settings_)) {
    const std::uint32_t i = next_cluster_++;
    const Dim index{i % clusters.x, i / clusters.x % clusters.y, i / clusters.x / clusters.y};
    resident_.push_back(std::make_unique<Cluster>(*this, index));
    note_progress();
  }
}

bool Grid::previous_is_complete() const {
  return !may_overlap() || neighbours_.previous_is_complete();
}

void Grid::launch_next(Cta& cta) {
  if (std::exchange(cta.has_launched_next, true)) return;
  if (++launched_next_ < launch_.grid.count() || !neighbours_.launch_next) return;
  neighbours_.launch_next();
  const bool has_ended = next_cluster_ * launch_.cluster.count() == launched_next_ &&
                         std::all_of(resident_.begin(), resident_.end(),
                                     [](const auto& cluster) { return cluster->is_done(); });
  if (!has_ended && random_() % kHeadStartGrids == 0) std::this_thread::sleep_for(kHeadStart);
}

void Grid::finish_pending() {
  for (const CopyTask& copy : pending_) copy->finish();
  pending_.clear();
}

void Grid::retire_clusters() {
  const auto is_done = [](const auto& cluster) { return cluster->is_done(); };
  if (std::none_of(resident_.begin(), resident_.end(), is_done)) return;
  finish_pending();  // copies that nobody waited for still use the cluster's memory
  for (const auto& cluster : resident_) {
    if (!cluster->is_done()) continue;
    for (const auto& cta : cluster->ctas) {
      cta->check_end();
      launch_next(*cta);
      has_waited_ = has_waited_ || cta->has_waited;
    }
  }
  std::erase_if(resident_, is_done);
}

void Grid::run_some_pending() {
  if (pending_.empty() || random_() % kCopyTurns != 0) return;
  const std::size_t chosen = random_() % pending_.size();
  std::swap(pending_[chosen], pending_.back());
  const CopyTask copy = std::move(pending_.back());
  pending_.pop_back();
  if (copy->is_finished()) return;
  copy->finish();
  note_progress();
}

void Grid::report_deadlock() {
  std::string text = "deadlock: no warp can go on";
  for (const auto& cluster : resident_) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        if (!warp->is_done()) text += "\n  " + warp->where();
      }
    }
  }
  throw Fault(text);
}

void Grid::run() {
  const auto patience = std::chrono::duration<double>(settings_.patience_s);
  Clock::time_point changed = Clock::now();
  std::uint64_t seen = 0;
  int idle = 0;
  std::vector<Warp*> warps;
  while (true) {
    retire_clusters();
    start_clusters();
    if (resident_.empty()) break;
    warps.clear();
    for (const auto& cluster : resident_) {
      for (const auto& cta : cluster->ctas) {
        for (const auto& warp : cta->warps) warps.push_back(warp.get());
      }
    }
    std::shuffle(warps.begin(), warps.end(), random_);
    // Asked before the turns: if the previous kernel was complete then, no warp waits for it after
    // them.
    const bool previous_was_complete = previous_is_complete();
    Turn most = Turn::kNothing;
    for (Warp* warp : warps) {
      if (!warp->is_done()) most = std::max(most, warp->run_turn());
      run_some_pending();
    }
    if (progress_ != seen) {
      seen = progress_;
      changed = Clock::now();
      idle = 0;
      continue;
    }
    if (most == Turn::kNothing && pending_.empty() && previous_was_complete) report_deadlock();
    if (Clock::now() - changed > patience) report_deadlock();
    if (most == Turn::kBusy) continue;
    if (++idle > kIdleRounds) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  finish_pending();
  // The next kernel may begin before the previous one is complete. It waits for this grid only.
  if (may_overlap() && !has_waited_) {
    throw Fault("a grid that may overlap with the previous one ends without griddepcontrol.wait");
  }
}

}  // namespace sonicmoe::emulator
