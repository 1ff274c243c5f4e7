// The products of the stand-in engine.
#include "stand_in.h"

#include <algorithm>
#include <numeric>

#include "elements.h"
#include "verify/oracle_activation.h"

namespace sonicmoe::testing {
namespace {

using namespace cuda;  // NOLINT: this file implements their engine

using Row = std::vector<double>;

/// Dense copies of (E, columns, depth) matrices.
class Matrices {
 public:
  explicit Matrices(const Tensor& t) : columns_(t.shape[1]), depth_(t.shape[2]) {
    if (t.data != nullptr) values_ = oracle::read(t);
  }
  double dot(const Row& row, std::int64_t e, std::int64_t column) const {
    const auto begin = values_.begin() + (e * columns_ + column) * depth_;
    return std::inner_product(begin, begin + depth_, row.begin(), 0.0);
  }

 private:
  std::int64_t columns_;
  std::int64_t depth_;
  std::vector<double> values_;
};

/// Row p of an operand; part `part` of it where the operand has parts.
Row row_of(const RowOperand& operand, std::int64_t p, std::int64_t part) {
  const Tensor& t = operand.rows;
  const std::int64_t row = operand.index == nullptr ? p : operand.index[p];
  Row values(static_cast<std::size_t>(t.shape[t.rank - 1]));
  for (std::size_t k = 0; k < values.size(); ++k) {
    const auto column = static_cast<std::int64_t>(k);
    values[k] = t.rank == 3 ? get(t, row, part, column) : get(t, row, column);
  }
  return values;
}

/// 0 where there is no bias.
double bias_at(const Tensor& bias, std::int64_t e, std::int64_t column) {
  return bias.data == nullptr ? 0.0 : get(bias, e, column);
}

/// Gate and up of column j in a row of H or dH. The gate is 0 where the layer has none.
struct GateUp {
  double gate;
  double up;
};
GateUp load(const Tensor& h, GateLayout layout, std::int64_t p, std::int64_t j) {
  if (layout == GateLayout::kInterleaved) return {get(h, p, 2 * j), get(h, p, 2 * j + 1)};
  if (layout == GateLayout::kConcatenated) return {get(h, p, 0, j), get(h, p, 1, j)};
  return {0.0, get(h, p, 0, j)};
}
void store(const Tensor& h, GateLayout layout, std::int64_t p, std::int64_t j, const GateUp& v) {
  if (layout == GateLayout::kInterleaved) {
    put(h, v.gate, p, 2 * j);
    put(h, v.up, p, 2 * j + 1);
    return;
  }
  if (layout == GateLayout::kConcatenated) put(h, v.gate, p, 0, j);
  put(h, v.up, p, layout == GateLayout::kConcatenated ? 1 : 0, j);
}

/// The weights of a product, those of its low-rank term, and one of its epilogues, row by row.
struct RowMultiplier {
  const RowProduct& product;
  LowRankTerm term = product.low_rank.value_or(LowRankTerm{});
  Matrices first{product.weights.first};
  Matrices second{product.weights.second};
  Matrices outer[2] = {Matrices(term.outer[0]), Matrices(term.outer[1])};

  Row row(std::int64_t p, std::int64_t part = 0) const { return row_of(product.rows, p, part); }
  /// Row p of the low-rank term; empty without one.
  Row inner(std::int64_t p) const {
    return product.low_rank ? row_of({term.inner, nullptr}, p, 0) : Row{};
  }

  void operator()(const StoreOutput& out, std::int64_t e, std::int64_t p) const {
    const bool two = product.weights.parts == WeightParts::kOneAfterOther;
    const Row left = row(p);
    const Row right = two ? row(p, 1) : Row{};
    const Row low = inner(p);
    double scale = out.factor;
    if (out.scale.data != nullptr) {
      scale *= oracle::load(out.scale.data, out.scale.dtype, slot_offset(out.scale, p));
    }
    for (std::int64_t j = 0; j < product.weights.first.shape[1]; ++j) {
      const double sum =
          first.dot(left, e, j) + (two ? second.dot(right, e, j) : 0.0) + outer[0].dot(low, e, j);
      put(out.out, scale * (sum + bias_at(out.bias, e, j)), p, j);
    }
  }

  void operator()(const Activate& out, std::int64_t e, std::int64_t p) const {
    const Row x = row(p);
    const Row low = inner(p);
    const auto by_first = [&](std::int64_t j) {
      return first.dot(x, e, j) + outer[0].dot(low, e, j);
    };
    const bool interleaved = out.layout == GateLayout::kInterleaved;
    for (std::int64_t j = 0; j < out.a.elements.shape[1]; ++j) {
      GateUp h{0.0, 0.0};
      if (out.layout != GateLayout::kNone) {
        h.gate = by_first(interleaved ? 2 * j : j) + bias_at(out.bias_gate, e, j);
      }
      h.up =
          (interleaved                               ? by_first(2 * j + 1)
           : out.layout == GateLayout::kConcatenated ? second.dot(x, e, j) + outer[1].dot(low, e, j)
                                                     : by_first(j)) +
          bias_at(out.bias_up, e, j);
      h = {oracle::round_to(product.dtype, h.gate), oracle::round_to(product.dtype, h.up)};
      if (out.h.elements.data != nullptr) store(out.h.elements, out.layout, p, j, h);
      put(out.a.elements, oracle::activate(out.activation, h.gate, h.up).value, p, j);
    }
  }

  void operator()(const ActivateGrad& out, std::int64_t e, std::int64_t p) const {
    const std::int64_t columns = product.weights.first.shape[1];
    const Row dy = row(p);
    const Row low = inner(p);
    const double weight = out.row_weight[p];
    Row parts(static_cast<std::size_t>(out.score_tiles), 0.0);
    for (std::int64_t j = 0; j < columns; ++j) {
      const double da = first.dot(dy, e, j) + outer[0].dot(low, e, j);
      const GateUp h = load(out.h.elements, out.layout, p, j);
      const auto act = oracle::activate(out.activation, h.gate, h.up);
      store(out.dh.elements, out.layout, p, j,
            {weight * da * act.by_gate, weight * da * act.by_up});
      put(out.a, weight * act.value, p, j);
      parts[j * out.score_tiles / columns] += da * oracle::round_to(product.dtype, act.value);
    }
    std::copy(parts.begin(), parts.end(), out.score_parts + p * out.score_tiles);
  }
};

/// A counter is zero when its product starts and has another value afterwards, as with a dynamic
/// tile order.
void use_counter(unsigned* counter) {
  if (counter == nullptr) return;
  require(*counter == 0, "a product found its counter used");
  *counter = 1;
}

/// Experts in the order that the product asks for.
void check_order(const RowGroups& groups) {
  if (groups.longest_first == nullptr) return;
  std::vector<int> seen(static_cast<std::size_t>(groups.experts), 0);
  for (std::int64_t i = 0; i < groups.experts; ++i) {
    const ExpertRecord& record = groups.longest_first[i];
    require(record.expert >= 0 && record.expert < groups.experts && ++seen[record.expert] == 1,
            "the list of experts does not name each expert once");
    require(record.rows == groups.lists->expert_rows[record.expert] &&
                (i == 0 || groups.longest_first[i - 1].rows >= record.rows),
            "the list of experts is not sorted by number of rows");
  }
}

/// A product with kWithRowsOf must read the dH that its source writes, and the source must have
/// counted its tiles.
void check_source(const RowProduct& product) {
  if (product.hints.start != Start::kWithRowsOf) return;
  const RowProduct* source = product.hints.source;
  require(source != nullptr && source->hints.release_counter != nullptr,
          "the source of a product does not count its tiles");
  require(*source->hints.release_counter != 0, "a product comes before its source");
  const auto* written = std::get_if<ActivateGrad>(&source->epilogue);
  require(written != nullptr && written->dh.elements.data == product.rows.rows.data,
          "a product does not read what its source writes");
}

void multiply_rows(const Device&, const RowProduct& product, cudaStream_t) {
  use_counter(product.hints.tile_counter);
  use_counter(product.hints.release_counter);
  check_order(product.groups);
  check_source(product);
  const RowMultiplier multiplier{product};
  for_rows(*product.groups.lists, product.groups.experts, [&](std::int64_t e, std::int64_t p) {
    std::visit([&](const auto& epilogue) { multiplier(epilogue, e, p); }, product.epilogue);
  });
}

/// Which output column j of D goes to, and its column there.
struct Target {
  const Tensor& out;
  std::int64_t column;
};
Target target_of(const DepthProduct& product, std::int64_t j, std::int64_t columns) {
  if (product.parts == GradParts::kAlternate) return {product.out[j % 2], j / 2};
  const std::int64_t half = columns / 2;
  if (product.parts == GradParts::kHalves && j >= half) return {product.out[1], j - half};
  return {product.out[0], j};
}

/// Stores D (rows, columns) of one expert.
void store_gradient(const DepthProduct& product, std::int64_t e, const Row& d,
                    std::int64_t columns) {
  const bool adds = product.mode == GradMode::kAccumulate;
  if (adds && product.groups.lists->expert_rows[e] == 0) return;
  for (std::size_t i = 0; i < d.size(); ++i) {
    const std::int64_t m = static_cast<std::int64_t>(i) / columns;
    const Target to = target_of(product, static_cast<std::int64_t>(i) % columns, columns);
    if (to.out.data == nullptr) continue;
    put(to.out, d[i] + (adds ? get(to.out, e, m, to.column) : 0.0), e, m, to.column);
  }
}

void multiply_depth(const Device&, const DepthProduct& product, cudaStream_t) {
  use_counter(product.hints.tile_counter);
  check_order(product.groups);
  const RowOperand right{product.right, nullptr};
  const std::int64_t columns = product.right.shape[product.right.rank - 1];
  const Metadata& lists = *product.groups.lists;
  for (std::int64_t e = 0; e < product.groups.experts; ++e) {
    Row d(static_cast<std::size_t>(product.left.rows.shape[1] * columns), 0.0);
    for (std::int32_t i = 0; i < lists.expert_rows[e]; ++i) {
      const std::int64_t p = lists.expert_begin[e] + i;
      const Row a = row_of(product.left, p, 0);
      const Row b = row_of(right, p, product.right_part);
      for (std::size_t m = 0; m < a.size(); ++m) {
        for (std::size_t j = 0; j < b.size(); ++j) d[m * b.size() + j] += a[m] * b[j];
      }
    }
    store_gradient(product, e, d, columns);
  }
}

bool has(const Tensor& t) { return t.data != nullptr; }

/// The order of the Hopper engine, for any number of rows.
BackwardOrder input_grad_first(const Problem& problem, const BackwardArgs& args) {
  const Weights& g = args.grads;
  const bool up = has(g.gate) || has(g.up);
  BackwardOrder order{};
  order.input_grad_first = has(args.dx) && (up || has(g.down));
  if (order.input_grad_first && up && has(g.down)) {
    order.tokens_beside_down_grad = problem.tokens / 3;
    order.companion = Companion::kTokenSum;
  }
  return order;
}

Engine make_engine(BackwardOrder (*order)(const Problem&, const BackwardArgs&)) {
  return {
      .name = "stand-in",
      .service = {.capabilities = {7, 7},
                  .devices = "none",
                  .dtypes = {DType::kF32, DType::kBF16, DType::kF16},
                  .multiple = 1},
      .score_columns = 16,
      .open = [](int) { return std::shared_ptr<void>(); },
      .backward_order = order,
      .multiply_rows = &multiply_rows,
      .multiply_depth = &multiply_depth,
      .describe = [](const Problem&) { return std::vector<TileChoice>{{"A", "one row"}}; },
  };
}

}  // namespace

const Engine& stand_in_engine() {
  static const Engine engine =
      make_engine([](const Problem&, const BackwardArgs&) { return BackwardOrder{}; });
  return engine;
}

const Engine& input_grad_first_engine() {
  static const Engine engine = make_engine(&input_grad_first);
  return engine;
}

}  // namespace sonicmoe::testing
