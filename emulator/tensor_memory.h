// Tensor memory of a CTA (sm_100): 128 lanes of 512 columns of 32 bits. An address is lane << 16 |
// column.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "clocks.h"
#include "lane_copies.h"

namespace sonicmoe::emulator {

/// Columns [first, first + count).
struct Columns {
  std::uint32_t first = 0, count = 0;
  bool overlaps(const Columns& other) const {
    return first < other.first + other.count && other.first < first + count;
  }
  bool operator==(const Columns&) const = default;
  std::string text() const;  ///< "columns 0 to 31 of tensor memory"
};

class TensorMemory {
 public:
  static constexpr std::uint32_t kLanes = 128, kColumns = 512;
  static constexpr std::uint32_t kLeastColumns = 32;  ///< of an allocation
  static constexpr std::uint32_t kQuarters = 4;       ///< of the lanes; a warp accesses one

  explicit TensorMemory(const Agents& agents);
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  std::uint32_t& cell(std::uint32_t lane, std::uint32_t column) {
    return cells_[std::size_t{lane} * kColumns + column];
  }
  History& history() { return history_; }
  /// The unit of the history that has a column of a quarter. Columns are neighbours.
  static std::size_t unit(std::uint32_t quarter, std::uint32_t column) {
    return std::size_t{quarter} * kColumns + column;
  }
  /// Throws Fault unless all columns of the quarter have been written since they were allocated.
  void check_written(std::uint32_t quarter, const Columns& columns) const;

  bool is_free(const Columns& columns) const;
  void allocate(const Columns& columns, Stamp by);
  /// Throws Fault unless it was allocated so, and `known` has all accesses to it.
  void deallocate(const Columns& columns, Stamp by, const VectorClock& known);
  void check_allocated(const Columns& columns) const;
  bool is_empty() const { return allocations_.empty(); }

  bool is_relinquished = false;  ///< the right to allocate
  int cta_group = 0;             ///< that the CTA's instructions have; 0: none yet

  /// An allocation that one CTA of a pair has made for both.
  struct PairAllocation {
    Columns columns;
    bool is_taken = false;  ///< by the other CTA
  };
  std::shared_ptr<PairAllocation> offered;  ///< by the other CTA

 private:
  std::vector<std::uint32_t> cells_;
  std::vector<History::State> states_;
  History history_;
  std::map<std::uint32_t, std::uint32_t> allocations_;  // first column, columns
};

/// The kinds of tcgen05.mma: kind::f16, and kind::mxf8f6f4 with 8-bit elements.
enum class UmmaKind { kF16, kMxf8 };

/// What a warp has done with tensor memory.
struct TensorWarp {
  /// Registers that tcgen05.ld writes, in wait::ld: until then a program may not read them.
  std::vector<CopyTask> loads;
  std::shared_ptr<TensorMemory::PairAllocation> offer;  ///< that waits for the other CTA
  CopyTask last_issued;   ///< of its products and copies, which happen in the order of their issue
  int issuing_lane = -1;  ///< that issues tcgen05.mma and .cp
  /// Products that may not be complete, the last one for each place of D.
  struct Product {
    Columns d;
    UmmaKind kind;
    int m, n;
    std::vector<Columns> scales;  ///< of all of them with this D
    Stamp stamp;
  };
  std::vector<Product> products;
};

}  // namespace sonicmoe::emulator
