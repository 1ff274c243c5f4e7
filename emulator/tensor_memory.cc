#include "tensor_memory.h"

#include <algorithm>

#include "program.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::uint32_t kGarbage = ~0u;  // a NaN

std::string place_of_unit(std::size_t unit) {
  const std::size_t lane = unit / TensorMemory::kColumns * kLanes;
  return "column " + std::to_string(unit % TensorMemory::kColumns) + " of tensor memory, lanes " +
         std::to_string(lane) + " to " + std::to_string(lane + kLanes - 1) + ",";
}

}  // namespace

std::string Columns::text() const {
  return "columns " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
         " of tensor memory";
}

TensorMemory::TensorMemory(const Agents& agents)
    : cells_(std::size_t{kLanes} * kColumns, kGarbage),
      states_(std::size_t{kQuarters} * kColumns),
      history_(states_.data(), states_.size(), &place_of_unit, agents) {}

/// The last write of a column that nobody has written is its allocation, the only one that a warp
/// does not make asynchronously.
void TensorMemory::check_written(std::uint32_t quarter, const Columns& columns) const {
  for (std::uint32_t c = columns.first; c < columns.first + columns.count; ++c) {
    const Stamp last = history_.last_write(unit(quarter, c));
    if (last.agent % kWarpAgents == static_cast<std::uint32_t>(Agent::kInstructions)) {
      throw Fault(place_of_unit(unit(quarter, c)) + " is read, and nobody has written it");
    }
  }
}

bool TensorMemory::is_free(const Columns& columns) const {
  return std::none_of(allocations_.begin(), allocations_.end(),
                      [&](const auto& a) { return columns.overlaps({a.first, a.second}); });
}

/// What was there before has been freed, so the accesses to it are known.
void TensorMemory::allocate(const Columns& columns, Stamp by) {
  VectorClock freed;
  allocations_[columns.first] = columns.count;
  for (std::uint32_t q = 0; q < kQuarters; ++q) {
    history_.forget(unit(q, columns.first), columns.count);
    History::Pass(history_, by, freed).write(unit(q, columns.first), columns.count);
    for (std::uint32_t lane = q * kLanes / kQuarters; lane < (q + 1) * kLanes / kQuarters; ++lane) {
      std::fill_n(&cell(lane, columns.first), columns.count, kGarbage);
    }
  }
}

void TensorMemory::deallocate(const Columns& columns, Stamp by, const VectorClock& known) {
  const auto found = allocations_.find(columns.first);
  if (found == allocations_.end() || found->second != columns.count) {
    throw Fault(columns.text() + " are freed, which are no allocation");
  }
  for (std::uint32_t q = 0; q < kQuarters; ++q) {
    History::Pass(history_, by, known).write(unit(q, columns.first), columns.count);
  }
  allocations_.erase(found);
}

void TensorMemory::check_allocated(const Columns& columns) const {
  const auto holds = [&](const auto& a) {
    return a.first <= columns.first && columns.first + columns.count <= a.first + a.second;
  };
  if (std::any_of(allocations_.begin(), allocations_.end(), holds)) return;
  throw Fault(columns.text() + " are accessed and are not allocated");
}

}  // namespace sonicmoe::emulator
