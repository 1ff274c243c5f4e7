#include "verify/batch_part.h"

#include <algorithm>
#include <numeric>

#include "verify/convert.h"

namespace sonicmoe::verify {
namespace {

using Values = std::vector<std::int64_t>;

BlockView rows_of(const BlockView& tensor, const TokenRange& range) {
  if (tensor.block == nullptr) return tensor;
  BlockView part = tensor;
  part.view.shape[0] = range.end - range.begin;
  part.offset += range.begin * tensor.view.stride[0];
  return part;
}

Values integers(const BlockView& tensor) {
  const Tensor t = tensor.on_host();
  Values values(static_cast<std::size_t>(oracle::element_count(t)));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = oracle::load_integer(t, static_cast<std::int64_t>(i));
  }
  return values;
}

// Drops the entries of other tokens. Entries whose token is out of range stay, as empty slots.
void cut_pairs(const TokenRange& range, const RoutingViews& whole, Blocks& blocks,
               BatchPart& part) {
  const std::int64_t tokens = part.problem.tokens;
  const Values all_tokens = integers(whole.token), all_experts = integers(whole.expert);
  Values token, expert;
  Values& kept = part.dweights_rows;
  kept.clear();
  for (std::size_t i = 0; i < all_tokens.size(); ++i) {
    const std::int64_t t = all_tokens[i];
    const bool in_part = t >= range.begin && t < range.end;
    if (!in_part && t >= 0 && t < tokens) continue;
    token.push_back(in_part ? t - range.begin : -1);
    expert.push_back(all_experts[i]);
    kept.push_back(static_cast<std::int64_t>(i));
  }
  const auto line = [&](DType dtype) {
    return tensor1(nullptr, dtype, static_cast<std::int64_t>(kept.size()));
  };
  part.problem.capacity = static_cast<std::int64_t>(kept.size());
  RoutingViews& routing = part.tensors.routing;
  routing.token = add_integers("token", line(whole.token.view.dtype), token, blocks);
  routing.expert = add_integers("expert", line(whole.expert.view.dtype), expert, blocks);
  routing.weights = blocks.add_view("routing weights", line(whole.weights.view.dtype));
  part.tensors.dweights = blocks.add_view("dweights", line(whole.weights.view.dtype));
  const Tensor from = whole.weights.on_host(), to = routing.weights.on_host();
  for (std::size_t i = 0; i < kept.size(); ++i) {
    oracle::store(to.data, to.dtype, static_cast<std::int64_t>(i),
                  oracle::load(from.data, from.dtype, oracle::element_offset(from, kept[i])));
  }
}

// The parts of the experts' ranges that lie in the rows of `range`.
void cut_groups(const TokenRange& range, const RoutingViews& whole, Blocks& blocks,
                RoutingViews& routing) {
  Values begin = integers(whole.row_begin), count = integers(whole.row_count);
  for (std::size_t e = 0; e < begin.size(); ++e) {
    const std::int64_t first = std::clamp(begin[e], range.begin, range.end);
    const std::int64_t last = std::clamp(begin[e] + count[e], first, range.end);
    begin[e] = first - range.begin;
    count[e] = last - first;
  }
  routing.row_begin = add_integers("row_begin", whole.row_begin.view, begin, blocks);
  routing.row_count = add_integers("row_count", whole.row_count.view, count, blocks);
}

}  // namespace

BatchPart part_of(const Case& c, const Tensors& whole, const TokenRange& range, Blocks& blocks) {
  BatchPart part{c.problem, whole, Values(static_cast<std::size_t>(range.end - range.begin))};
  std::iota(part.dweights_rows.begin(), part.dweights_rows.end(), range.begin);
  Tensors& t = part.tensors;
  for (BlockView* rows : {&t.x, &t.dout, &t.out, &t.dx}) *rows = rows_of(*rows, range);
  if (c.problem.form == RoutingForm::kPairs) {
    cut_pairs(range, whole.routing, blocks, part);
  } else {
    t.dweights = rows_of(t.dweights, range);
    t.routing.weights = rows_of(t.routing.weights, range);
  }
  t.routing.ids = rows_of(t.routing.ids, range);
  if (c.problem.form == RoutingForm::kGrouped) {
    cut_groups(range, whole.routing, blocks, t.routing);
  }
  part.problem.tokens = range.end - range.begin;
  return part;
}

std::vector<std::uint8_t> row_bytes(const BlockView& tensor, std::int64_t row) {
  const Tensor t = tensor.on_host();
  const std::int64_t width = t.rank == 1 ? 1 : t.shape[1];
  const std::int64_t size = dtype_bytes(t.dtype);
  std::vector<std::uint8_t> bytes;
  for (std::int64_t j = 0; j < width; ++j) {
    const auto* element = static_cast<const std::uint8_t*>(t.data) +
                          oracle::element_offset(t, row * width + j) * size;
    bytes.insert(bytes.end(), element, element + size);
  }
  return bytes;
}

}  // namespace sonicmoe::verify
