#include <algorithm>
#include <bit>
#include <cstring>

#include "machine.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::size_t kGranule = SharedMemory::kGranule;
/// Each byte of shared memory when a CTA starts. It gives a NaN in every format.
constexpr int kGarbage = 0xff;

/// By which one CTA of each cluster starts later: its warps' turns.
constexpr std::uint64_t kLateTurns = 30;

std::string place_of_unit(std::size_t unit) {
  return "byte " + std::to_string(unit * SharedMemory::kUnit) + " of shared memory";
}

}  // namespace

Cta::Cta(Cluster& cluster, std::uint32_t rank, Dim index)
    : cluster_(cluster),
      rank_(rank),
      index_(index),
      shared_bytes_(cluster.grid().launch().program->static_shared +
                    cluster.grid().launch().dynamic_shared),
      shared_(Pool<SharedMemory>::pool().take(shared_bytes_)),
      start_(shared_->time),
      history_(shared_->states.data(),
               (shared_bytes_ + SharedMemory::kUnit - 1) / SharedMemory::kUnit, &place_of_unit,
               cluster.agents) {
  const Launch& launch = cluster.grid().launch();
  std::memset(shared_->bytes(), kGarbage, shared_bytes_);
  const std::uint32_t threads = launch.block.count();
  for (std::uint32_t first = 0; first < threads; first += kLanes) {
    const std::uint32_t count = std::min<std::uint32_t>(threads - first, kLanes);
    const std::uint32_t lanes = count == kLanes ? kAllLanes : (1u << count) - 1;
    warps.push_back(std::make_unique<Warp>(*this, static_cast<int>(first / kLanes), lanes));
  }
  fences_.resize(warps.size());
}

TensorMemory& Cta::tensor() {
  if (tensor_ == nullptr) tensor_ = std::make_unique<TensorMemory>(cluster_.agents);
  return *tensor_;
}

/// A commit may arrive late. If no warp waits for it, the CTA may have ended by then.
void Cta::check_commits() {
  cluster_.agents.for_each_barrier(
      shared_->bytes(), shared_bytes_, [&](const std::byte* at, const BarrierClock& clock) {
        const bool has_waited = std::any_of(warps.begin(), warps.end(), [&](const auto& warp) {
          return warp->clock().known().has(clock.committed);
        });
        if (has_waited) return;
        throw Fault("a CTA ends and has not waited for tcgen05.commit at the mbarrier at byte " +
                    std::to_string(at - shared_->bytes()) + " of its shared memory");
      });
}

void Cta::check_end() {
  check_commits();
  if (tensor_ == nullptr) return;
  if (!tensor_->is_empty()) throw Fault("a CTA ends and has not freed its tensor memory");
  if (!tensor_->is_relinquished) {
    throw Fault("a CTA ends without tcgen05.relinquish_alloc_permit, for which others may wait");
  }
  for (const auto& warp : warps) {
    if (!warp->tensor.loads.empty()) throw Fault("a warp ends without tcgen05.wait::ld");
  }
}

void Cta::refuse_shared(std::uint32_t offset) const {
  throw Fault("shared memory is accessed at byte " + std::to_string(offset) + " of " +
              std::to_string(shared_bytes_));
}

/// `name`: rank + 1.
Cta& Cta::other_owner(std::uint32_t name) {
  if (name > cluster_.ctas.size()) throw Fault("a shared address names no CTA of the cluster");
  Cta& owner = *cluster_.ctas[name - 1];
  if (owner.is_done()) throw Fault("shared memory of a CTA that has ended is accessed");
  return owner;
}

void Cta::note_async_write(std::uint32_t offset, std::size_t bytes) {
  const std::size_t last = (offset + bytes - 1) / kGranule;
  for (std::size_t i = offset / kGranule; i <= last; ++i) shared_->writes[i] = {};
}

void Cta::note_proxy_fence(int warp) { fences_[static_cast<std::size_t>(warp)] = ++shared_->time; }

void Cta::check_async_read(std::uint32_t offset, std::size_t bytes, int warp) const {
  const std::size_t last = (offset + bytes - 1) / kGranule;
  for (std::size_t i = offset / kGranule; i <= last; ++i) {
    const SharedMemory::Write& w = shared_->writes[i];
    if (w.time <= start_ || fences_[static_cast<std::size_t>(w.warp)] > w.time ||
        (warp >= 0 && fences_[static_cast<std::size_t>(warp)] > w.time)) {
      continue;
    }
    throw Fault("byte " + std::to_string(i * kGranule) + " of shared memory, written by warp " +
                std::to_string(w.warp) + ", is read asynchronously without a fence.proxy.async");
  }
}

void Cta::check_global_read(int warp) const {
  if (!cluster_.grid().may_overlap() || has_waited ||
      fences_[static_cast<std::size_t>(warp)] > start_) {
    return;
  }
  throw Fault(
      "global memory is read asynchronously before griddepcontrol.wait and without a "
      "fence.proxy.async");
}

std::uint32_t Cta::threads_alive() const {
  std::uint32_t threads = 0;
  for (const auto& warp : warps) threads += static_cast<std::uint32_t>(std::popcount(warp->live()));
  return threads;
}

bool Cta::is_done() const {
  return std::all_of(warps.begin(), warps.end(), [](const auto& w) { return w->is_done(); });
}

Cluster::Cluster(Grid& grid, Dim first)
    : index(first),
      agents((grid.launch().block.count() + kLanes - 1) / kLanes, grid.launch().cluster.count()),
      grid_(grid) {
  const Dim size = grid.launch().cluster;
  for (std::uint32_t rank = 0; rank < size.count(); ++rank) {
    const Dim cta{index.x * size.x + rank % size.x, index.y * size.y + rank / size.x % size.y,
                  index.z * size.z + rank / size.x / size.y};
    ctas.push_back(std::make_unique<Cta>(*this, rank, cta));
  }
  if (ctas.size() > 1) ctas[grid.random()() % ctas.size()]->late_turns = kLateTurns;
}

bool Cluster::is_done() const {
  return std::all_of(ctas.begin(), ctas.end(), [](const auto& c) { return c->is_done(); });
}

}  // namespace sonicmoe::emulator
