// tcgen05.cp: the copy of scale factors from shared to tensor memory.
#include "ops_tensor.h"
#include "umma.h"

namespace sonicmoe::emulator {
namespace {

constexpr std::uint32_t kRows = TensorMemory::kLanes / TensorMemory::kQuarters;  // of a quarter
constexpr std::uint32_t kRowBytes = 16;
constexpr std::uint32_t kRowColumns = kRowBytes / 4;

// The list of tcgen05.cp.
constexpr std::size_t kTarget = 0;  // an address
constexpr std::size_t kSource = kTarget + kAddressEntries;

/// Bits of Instruction::detail.
constexpr std::uint32_t kIsPair = 1;
constexpr std::uint32_t kHasHalves = 2;  // 64x128b.warpx2::01_23; else 32x128b.warpx4

/// A copy to the tensor memory of one CTA.
struct ScaleCopy {
  Cta* cta;
  SharedMatrix source;
  Columns target;
  bool has_halves;
  Stamp stamp;
  ClockCopy known;

  void run() const {
    if (cta->is_done()) throw Fault("tcgen05.cp reads shared memory of a CTA that has ended");
    SharedPass pass(*cta, stamp, *known);
    for (std::uint32_t q = 0; q < TensorMemory::kQuarters; ++q) {
      const std::uint32_t first = has_halves ? q / 2 * kRows : 0;
      for (std::uint32_t r = 0; r < kRows; ++r) {
        read_row_begin(source, pass, static_cast<int>(first + r),
                       &cta->tensor().cell(q * kRows + r, target.first));
      }
    }
  }
};

/// Shared memory is read and tensor memory is written later, before the products that the thread
/// issues later. PTX does not say that it is written behind earlier products or copies, so the
/// thread must have waited for those that access the columns.
Next run_scale_copy(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const int lane = single_lane(lanes, "tcgen05.cp");
  const int group = (i.detail & kIsPair) != 0 ? 2 : 1;
  const Slot* list = list_of(warp, i);
  check_cta_group(warp, group);
  check_issuer(warp, lane, group, "tcgen05.cp");
  const std::uint32_t at = shared_address_at(warp, list + kTarget, lane);
  if (at >> 16 != 0) throw Fault("the target of tcgen05.cp does not begin at lane 0");
  const Columns target{at, kRowColumns};
  const MatrixDescriptor source =
      decode_umma_matrix(warp.lanes_of<std::uint64_t>(list[kSource])[lane]);
  if (source.span != 0) throw Fault("a swizzle of the source of tcgen05.cp is not emulated");
  const Stamp stamp = warp.clock().issue(Agent::kTensorCopies);
  const ClockCopy known = warp.clock().release();
  const VectorClock order = warp.clock().tensor_order();
  for (int c = 0; c < group; ++c) {
    Cta& cta = c == 0 ? warp.cta() : other_of_pair(warp);
    cta.tensor().check_allocated(target);
    for (std::uint32_t q = 0; q < TensorMemory::kQuarters; ++q) {
      History::Pass(cta.tensor().history(), stamp, order)
          .write(TensorMemory::unit(q, target.first), target.count);
    }
    const SharedMatrix matrix{
        &cta,      cta.own_shared(0, 0), cta.shared_bytes(), reader_in(warp, cta), source,
        Major::kK, ElementType::kE4M3};
    const ScaleCopy copy{&cta, matrix, target, (i.detail & kHasHalves) != 0, stamp, known};
    warp.tensor.last_issued = defer(warp, i, [previous = warp.tensor.last_issued, copy] {
      if (previous != nullptr) previous->finish();
      copy.run();
    });
  }
  return Next::kAdvance;
}

}  // namespace

/// [target], source
void decode_scale_copy(const Statement& s, Builder& b, Instruction* i) {
  const bool has_halves = s.has("64x128b") && s.has("warpx2::01_23");
  constexpr std::size_t kParts = 5;  // tcgen05.cp.cta_group::2.32x128b.warpx4
  const bool has_form =
      s.parts.size() == kParts && (has_halves || (s.has("32x128b") && s.has("warpx4")));
  if (!has_form) return decode_unknown(s, b, i);
  std::vector<Slot> list;
  append_address(b, s.operands.at(0), &list);
  list.push_back(b.source(s.operands.at(1), 8));
  b.set_list(i, list);
  i->detail = (s.has("cta_group::2") ? kIsPair : 0) | (has_halves ? kHasHalves : 0);
  i->run = &run_scale_copy;
}

}  // namespace sonicmoe::emulator
