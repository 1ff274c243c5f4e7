// tcgen05.mma.
#include <algorithm>
#include <optional>

#include "ops_tensor.h"
#include "umma.h"

namespace sonicmoe::emulator {
namespace {

// The list of tcgen05.mma.
constexpr std::size_t kD = 0;  // an address
constexpr std::size_t kA = kD + kAddressEntries;
constexpr std::size_t kB = kA + 1;
constexpr std::size_t kShape = kB + 1;
constexpr std::size_t kAccumulates = kShape + 1;
constexpr std::size_t kScalesA = kAccumulates + 1;  // addresses, of kMxf8
constexpr std::size_t kScalesB = kScalesA + kAddressEntries;

/// Bits of Instruction::detail.
constexpr std::uint32_t kIsPair = 1;
constexpr std::uint32_t kNegates = 2;  // the predicate
constexpr std::uint32_t kIsMxf8 = 4;

Umma::Part part_of(Warp& warp, Cta& cta, const UmmaShape& shape, std::uint64_t a, std::uint64_t b) {
  const int reader = reader_in(warp, cta);
  const auto matrix = [&](std::uint64_t bits, Major major, ElementType type) {
    return SharedMatrix{&cta,   cta.own_shared(0, 0),     cta.shared_bytes(),
                        reader, decode_umma_matrix(bits), major,
                        type};
  };
  return {&cta, matrix(a, shape.major_a, shape.type_a), matrix(b, shape.major_b, shape.type_b)};
}

bool overlap(const std::vector<Columns>& some, const Columns& columns) {
  return std::any_of(some.begin(), some.end(),
                     [&](const Columns& c) { return c.overlaps(columns); });
}

std::vector<Columns> scales_of(const Umma& product) {
  if (product.shape.kind == UmmaKind::kF16) return {};
  return {product.scales_a(), product.scales_b()};
}

/// Products with the same kind, D and shape run in the order of their issue. Others must have
/// waited.
void check_pipeline(Warp& warp, const Umma& product, const VectorClock& order) {
  std::vector<TensorWarp::Product>& products = warp.tensor.products;
  const Columns d = product.columns();
  const UmmaShape& shape = product.shape;
  TensorWarp::Product now{d, shape.kind, shape.m, shape.n, scales_of(product), product.stamp};
  std::erase_if(products, [&](const auto& p) { return order.has(p.stamp); });
  if (overlap(now.scales, d))
    throw Fault("tcgen05.mma writes " + d.text() + ", where its scales lie");
  for (const TensorWarp::Product& p : products) {
    const bool is_same =
        p.d.first == d.first && p.m == shape.m && p.n == shape.n && p.kind == shape.kind;
    if (!is_same && p.d.overlaps(d)) {
      throw Fault("tcgen05.mma writes " + d.text() +
                  ", which a product of another shape or place writes and has not been waited for");
    }
    if (overlap(p.scales, d)) {
      throw Fault("tcgen05.mma writes " + d.text() +
                  ", which have scales of a product that has not been waited for");
    }
    if (overlap(now.scales, p.d)) {
      throw Fault("tcgen05.mma has scales in " + p.d.text() +
                  ", which a product writes that has not been waited for");
    }
  }
  const auto same = std::find_if(products.begin(), products.end(),
                                 [&](const auto& p) { return p.d.first == d.first; });
  if (same == products.end()) return products.push_back(std::move(now));
  for (const Columns& s : same->scales) {
    if (std::find(now.scales.begin(), now.scales.end(), s) == now.scales.end()) {
      now.scales.push_back(s);
    }
  }
  *same = std::move(now);
}

/// Notes the write of D and the reads of scales. What the thread has copied before is there.
void note_product(Warp& warp, const Umma& product) {
  VectorClock order = warp.clock().tensor_order();
  check_pipeline(warp, product, order);
  order.add(product.stamp);
  order.add(warp.clock().last(Agent::kTensorCopies));
  const Columns d = product.columns();
  const std::vector<Columns> scales = scales_of(product);
  for (int c = 0; c < product.ctas; ++c) {
    TensorMemory& memory = product.parts[c].cta->tensor();
    memory.check_allocated(d);
    for (const Columns& s : scales) memory.check_allocated(s);
    for (std::uint32_t q = 0; q < TensorMemory::kQuarters; ++q) {
      if (product.accumulates) memory.check_written(q, d);
      History::Pass(memory.history(), product.stamp, order)
          .write(TensorMemory::unit(q, d.first), d.count);
      for (const Columns& s : scales) {
        memory.check_written(q, s);
        History::Pass(memory.history(), product.stamp, order)
            .read(TensorMemory::unit(q, s.first), s.count);
      }
    }
  }
}

/// The column at the address that begins at `entries` of the list.
std::uint32_t column_at(Warp& warp, const Slot* entries, int lane, const char* what) {
  const std::uint32_t at = shared_address_at(warp, entries, lane);
  if (at >> 16 != 0) throw Fault(std::string(what) + " of tcgen05.mma does not begin at lane 0");
  return at;
}

/// Shared memory is read and D is written later, at the latest when tcgen05.commit arrives.
Next run_umma(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const int lane = single_lane(lanes, "tcgen05.mma");
  const UmmaKind kind = (i.detail & kIsMxf8) != 0 ? UmmaKind::kMxf8 : UmmaKind::kF16;
  const Slot* list = list_of(warp, i);
  Umma product;
  product.ctas = (i.detail & kIsPair) != 0 ? 2 : 1;
  check_cta_group(warp, product.ctas);
  check_issuer(warp, lane, product.ctas, "tcgen05.mma");
  product.column = column_at(warp, list + kD, lane, "D");
  if (kind == UmmaKind::kMxf8) {
    product.column_a = column_at(warp, list + kScalesA, lane, "the scales of A");
    product.column_b = column_at(warp, list + kScalesB, lane, "the scales of B");
  }
  product.shape =
      UmmaShape::decode(warp.lanes_of<std::uint32_t>(list[kShape])[lane], kind, product.ctas);
  const bool predicate = (warp.predicate(list[kAccumulates]) >> lane & 1) != 0;
  product.accumulates = predicate != ((i.detail & kNegates) != 0);
  const std::uint64_t a = warp.lanes_of<std::uint64_t>(list[kA])[lane];
  const std::uint64_t b = warp.lanes_of<std::uint64_t>(list[kB])[lane];
  product.parts[0] = part_of(warp, warp.cta(), product.shape, a, b);
  if (product.ctas == 2) {
    product.parts[1] = part_of(warp, other_of_pair(warp), product.shape, a, b);
  }
  product.stamp = warp.clock().issue(Agent::kTensorProducts);
  product.known = warp.clock().release();
  note_product(warp, product);
  warp.tensor.last_issued = defer(warp, i, [previous = warp.tensor.last_issued, product] {
    if (previous != nullptr) previous->finish();
    for (int c = 0; c < product.ctas; ++c) {
      if (product.parts[c].cta->is_done()) {
        throw Fault("tcgen05.mma reads shared memory of a CTA that has ended");
      }
    }
    product.run();
  });
  return Next::kAdvance;
}

/// The kind of a statement whose form the emulator knows.
std::optional<UmmaKind> kind_of(const Statement& s) {
  constexpr std::size_t kParts = 4;  // tcgen05.mma.cta_group::2.kind::f16
  const std::size_t more = s.parts.size() - kParts;
  if (s.has("kind::f16") && more == 0 && s.operands.size() == 5) return UmmaKind::kF16;
  const bool has_size = s.has("block32") || s.has("scale_vec::1X");
  if (s.has("kind::mxf8f6f4") && s.has("block_scale") && more == (has_size ? 2 : 1) &&
      s.operands.size() == 7) {
    return UmmaKind::kMxf8;
  }
  return std::nullopt;
}

}  // namespace

/// [D], A, B, shape {, [scales of A], [scales of B]}, accumulates
void decode_umma(const Statement& s, Builder& b, Instruction* i) {
  const std::optional<UmmaKind> kind = kind_of(s);
  if (!kind || s.operands[1].kind == Operand::Kind::kAddress) return decode_unknown(s, b, i);
  std::vector<Slot> list;
  append_address(b, s.operands[0], &list);
  list.push_back(b.source(s.operands[1], 8));
  list.push_back(b.source(s.operands[2], 8));
  list.push_back(b.source(s.operands[3], 4));
  list.push_back(b.source(s.operands.back(), 0));
  if (kind == UmmaKind::kMxf8) {
    append_address(b, s.operands[4], &list);
    append_address(b, s.operands[5], &list);
  }
  b.set_list(i, list);
  i->detail = (s.has("cta_group::2") ? kIsPair : 0) | (s.operands.back().negated ? kNegates : 0) |
              (kind == UmmaKind::kMxf8 ? kIsMxf8 : 0);
  i->run = &run_umma;
}

}  // namespace sonicmoe::emulator
