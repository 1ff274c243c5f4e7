// tcgen05.mma.
#include <algorithm>
#include <bit>

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

/// Bits of Instruction::detail.
constexpr std::uint32_t kIsPair = 1;
constexpr std::uint32_t kNegates = 2;  // the predicate

void check_issuer(Warp& warp, int lane, bool is_pair) {
  if (warp.tensor.product_lane != -1 && warp.tensor.product_lane != lane) {
    throw Fault("two lanes of a warp issue tcgen05.mma, whose order is not known");
  }
  warp.tensor.product_lane = lane;
  if (!is_pair) return;
  if (warp.cta().rank() % 2 != 0) throw Fault("the odd CTA of a pair issues tcgen05.mma");
  if (other_of_pair(warp).is_done()) {
    throw Fault("tcgen05.mma of a pair is issued when its other CTA has ended");
  }
}

Umma::Part part_of(Warp& warp, Cta& cta, const UmmaShape& shape, std::uint64_t a, std::uint64_t b) {
  // A fence of the issuing warp orders writes to its own CTA only.
  const int reader = &cta == &warp.cta() ? warp.index() : kNoReader;
  const auto matrix = [&](std::uint64_t bits, Major major, ElementType type) {
    return SharedMatrix{&cta,   cta.own_shared(0, 0),     cta.shared_bytes(),
                        reader, decode_umma_matrix(bits), major,
                        type};
  };
  return {&cta, matrix(a, shape.major_a, shape.type_a), matrix(b, shape.major_b, shape.type_b)};
}

/// Products with the same D and shape run in the order of their issue. Others must have waited.
void check_pipeline(Warp& warp, const Umma& product, const VectorClock& order) {
  std::vector<TensorWarp::Product>& products = warp.tensor.products;
  const Columns d = product.columns();
  std::erase_if(products, [&](const auto& p) { return order.has(p.stamp); });
  for (const TensorWarp::Product& p : products) {
    const bool is_same = p.d.first == d.first && p.m == product.shape.m && p.n == product.shape.n;
    if (!is_same && p.d.overlaps(d)) {
      throw Fault("tcgen05.mma writes " + d.text() +
                  ", which a product of another shape or place writes and has not been waited for");
    }
  }
  std::erase_if(products, [&](const auto& p) { return p.d.first == d.first; });
  products.push_back({d, product.shape.m, product.shape.n, product.stamp});
}

/// Notes the write of D.
void note_product(Warp& warp, const Umma& product) {
  VectorClock order = warp.clock().tensor_order();
  check_pipeline(warp, product, order);
  order.add(product.stamp);
  const Columns d = product.columns();
  for (int c = 0; c < product.ctas; ++c) {
    TensorMemory& memory = product.parts[c].cta->tensor();
    memory.check_allocated(d);
    for (std::uint32_t q = 0; q < TensorMemory::kQuarters; ++q) {
      if (product.accumulates) memory.check_written(q, d);
      History::Pass(memory.history(), product.stamp, order)
          .write(TensorMemory::unit(q, d.first), d.count);
    }
  }
}

/// Shared memory is read and D is written later, at the latest when tcgen05.commit arrives.
Next run_umma(Warp& warp, const Instruction& i, std::uint32_t lanes) {
  const int lane = single_lane(lanes, "tcgen05.mma");
  const bool is_pair = (i.detail & kIsPair) != 0;
  const Slot* list = list_of(warp, i);
  check_cta_group(warp, is_pair ? 2 : 1);
  check_issuer(warp, lane, is_pair);
  const std::uint32_t d = shared_address_at(warp, list + kD, lane);
  if (d >> 16 != 0) throw Fault("D of tcgen05.mma does not begin at lane 0");
  Umma product;
  product.ctas = is_pair ? 2 : 1;
  product.shape = UmmaShape::decode(warp.lanes_of<std::uint32_t>(list[kShape])[lane], product.ctas);
  product.column = d;
  const bool predicate = (warp.predicate(list[kAccumulates]) >> lane & 1) != 0;
  product.accumulates = predicate != ((i.detail & kNegates) != 0);
  const std::uint64_t a = warp.lanes_of<std::uint64_t>(list[kA])[lane];
  const std::uint64_t b = warp.lanes_of<std::uint64_t>(list[kB])[lane];
  product.parts[0] = part_of(warp, warp.cta(), product.shape, a, b);
  if (is_pair) product.parts[1] = part_of(warp, other_of_pair(warp), product.shape, a, b);
  product.stamp = warp.clock().issue(Agent::kTensorProducts);
  product.known = warp.clock().release();
  note_product(warp, product);
  warp.tensor.last_product = defer(warp, i, [previous = warp.tensor.last_product, product] {
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

}  // namespace

/// [D], A, B, shape, accumulates
void decode_umma(const Statement& s, Builder& b, Instruction* i) {
  constexpr std::size_t kParts = 4;
  const bool has_form = s.parts.size() == kParts && s.has("kind::f16") && s.operands.size() == 5 &&
                        s.operands[1].kind != Operand::Kind::kAddress;
  if (!has_form) return decode_unknown(s, b, i);
  std::vector<Slot> list;
  append_address(b, s.operands[0], &list);
  list.push_back(b.source(s.operands[1], 8));
  list.push_back(b.source(s.operands[2], 8));
  list.push_back(b.source(s.operands[3], 4));
  list.push_back(b.source(s.operands[4], 0));
  b.set_list(i, list);
  i->detail = (s.has("cta_group::2") ? kIsPair : 0) | (s.operands[4].negated ? kNegates : 0);
  i->run = &run_umma;
}

}  // namespace sonicmoe::emulator
