#include "stand_in.h"

#include <algorithm>
#include <vector>

namespace sonicmoe::testing {
namespace {

using namespace cuda;  // NOLINT: this file is about its names

float& at(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t k = 0) {
  const std::int64_t strides[3] = {t.stride[0], t.stride[1], t.rank == 3 ? t.stride[2] : 0};
  return static_cast<float*>(t.data)[i * strides[0] + j * strides[1] + k * strides[2]];
}

/// Calls visit(expert, row) for every grouped row.
template <class F>
void for_rows(const Metadata& lists, std::int64_t experts, F visit) {
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int32_t i = 0; i < lists.expert_rows[e]; ++i) visit(e, lists.expert_begin[e] + i);
  }
}

std::int64_t source_row(const RowOperand& operand, std::int64_t p) {
  return operand.index == nullptr ? p : operand.index[p];
}

/// <part of the row of p, matrix[e][column]>.
float dot(const RowOperand& operand, std::int64_t p, std::int64_t part, const Tensor& matrix,
          std::int64_t e, std::int64_t column) {
  const std::int64_t row = source_row(operand, p);
  float sum = 0.0f;
  for (std::int64_t k = 0; k < matrix.shape[2]; ++k) {
    const float value =
        operand.rows.rank == 3 ? at(operand.rows, row, part, k) : at(operand.rows, row, k);
    sum += value * at(matrix, e, column, k);
  }
  return sum;
}

float bias_at(const Tensor& bias, std::int64_t e, std::int64_t column) {
  return bias.data == nullptr ? 0.0f : at(bias, e, column);
}

/// Gate and up of column j in H or dH.
struct GateUp {
  float* gate;  // null without one
  float* up;
};
GateUp gate_up(const Tensor& h, GateLayout layout, std::int64_t p, std::int64_t j) {
  if (layout == GateLayout::kInterleaved) return {&at(h, p, 2 * j), &at(h, p, 2 * j + 1)};
  if (layout == GateLayout::kSplit) return {&at(h, p, 0, j), &at(h, p, 1, j)};
  return {nullptr, &at(h, p, 0, j)};
}

float relu(float x) { return std::max(x, 0.0f); }

void multiply(const RowProduct& product, std::int64_t e, std::int64_t p, const StoreOutput& out) {
  const WeightOperand& w = product.weights;
  for (std::int64_t j = 0; j < w.first.shape[1]; ++j) {
    float sum = dot(product.rows, p, 0, w.first, e, j);
    if (w.parts == WeightParts::kOneAfterOther) sum += dot(product.rows, p, 1, w.second, e, j);
    sum += bias_at(out.bias, e, j);
    if (out.scale.data != nullptr) sum *= at(out.scale, p, 0);
    at(out.out, p, j) = sum;
  }
}

/// reglu where there is a gate, else relu.
void multiply(const RowProduct& product, std::int64_t e, std::int64_t p, const Activate& out) {
  const WeightOperand& w = product.weights;
  for (std::int64_t j = 0; j < out.a.shape[1]; ++j) {
    float gate = 0.0f;
    float up = 0.0f;
    if (out.layout == GateLayout::kInterleaved) {
      gate = dot(product.rows, p, 0, w.first, e, 2 * j) + bias_at(out.bias_gate, e, j);
      up = dot(product.rows, p, 0, w.first, e, 2 * j + 1) + bias_at(out.bias_up, e, j);
    } else if (out.layout == GateLayout::kSplit) {
      gate = dot(product.rows, p, 0, w.first, e, j) + bias_at(out.bias_gate, e, j);
      up = dot(product.rows, p, 0, w.second, e, j) + bias_at(out.bias_up, e, j);
    } else {
      up = dot(product.rows, p, 0, w.first, e, j) + bias_at(out.bias_up, e, j);
    }
    const GateUp h = gate_up(out.h, out.layout, p, j);
    if (h.gate != nullptr) *h.gate = gate;
    *h.up = up;
    at(out.a, p, j) = h.gate != nullptr ? relu(gate) * up : relu(up);
  }
}

void multiply(const RowProduct& product, std::int64_t e, std::int64_t p, const ActivateGrad& out) {
  float* parts = out.weight_grad_parts + p * out.parts;
  std::fill_n(parts, out.parts, 0.0f);
  const std::int64_t columns = product.weights.first.shape[1];
  const float weight = out.row_weight[p];
  for (std::int64_t j = 0; j < columns; ++j) {
    const float da = dot(product.rows, p, 0, product.weights.first, e, j);
    const GateUp h = gate_up(out.h, out.layout, p, j);
    const GateUp dh = gate_up(out.dh, out.layout, p, j);
    const float a = h.gate != nullptr ? relu(*h.gate) * *h.up : relu(*h.up);
    if (h.gate != nullptr) {
      *dh.gate = *h.gate > 0.0f ? weight * da * *h.up : 0.0f;
      *dh.up = weight * da * relu(*h.gate);
    } else {
      *dh.up = *h.up > 0.0f ? weight * da : 0.0f;
    }
    at(out.a, p, j) = weight * a;
    parts[j * out.parts / columns] += a * da;
  }
}

void multiply_rows(const Device&, const RowProduct& product, cudaStream_t) {
  for_rows(*product.groups.lists, product.groups.experts, [&](std::int64_t e, std::int64_t p) {
    std::visit([&](const auto& epilogue) { multiply(product, e, p, epilogue); }, product.epilogue);
  });
}

/// Where column j of a weight gradient goes: which output, and its column there.
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

void multiply_depth(const Device&, const DepthProduct& product, cudaStream_t) {
  const std::int64_t columns = product.right.shape[product.right.rank - 1];
  const auto each = [&](std::int64_t e, auto value) {
    for (std::int64_t m = 0; m < product.left.rows.shape[1]; ++m) {
      for (std::int64_t j = 0; j < columns; ++j) {
        const Target to = target_of(product, j, columns);
        if (to.out.data != nullptr) value(at(to.out, e, m, to.column), m, j);
      }
    }
  };
  if (product.mode == GradMode::kWrite) {
    for (std::int64_t e = 0; e < product.groups.experts; ++e) {
      each(e, [](float& out, std::int64_t, std::int64_t) { out = 0.0f; });
    }
  }
  for_rows(*product.groups.lists, product.groups.experts, [&](std::int64_t e, std::int64_t p) {
    const std::int64_t row = source_row(product.left, p);
    each(e, [&](float& out, std::int64_t m, std::int64_t j) {
      out += at(product.left.rows, row, m) * (product.right.rank == 3
                                                  ? at(product.right, p, product.right_part, j)
                                                  : at(product.right, p, j));
    });
  });
}

/// The lists and sums of a pass; routing by ids (i32).
struct HostRooms {
  const PassContext& pass;
  const Engine& engine;
  const Device device{};

  void operator()(const RowProduct& w) const { engine.multiply_rows(device, w, nullptr); }
  void operator()(const DepthProduct& w) const { engine.multiply_depth(device, w, nullptr); }

  void operator()(const BuildMetadata& w) const {
    const Problem& p = pass.problem;
    const Metadata& lists = pass.metadata;
    const auto* ids = static_cast<const std::int32_t*>(w.routing.ids.data);
    std::int32_t row = 0;
    for (std::int32_t e = 0; e < p.experts; ++e) {
      lists.expert_begin[e] = row;
      for (std::int64_t slot = 0; slot < p.tokens * p.top_k; ++slot) {
        if (ids[slot] != e) continue;
        lists.row_token[row] = static_cast<std::int32_t>(slot / p.top_k);
        lists.row_slot[row] = static_cast<std::int32_t>(slot);
        lists.position_row[slot] = row++;
      }
      lists.expert_rows[e] = row - lists.expert_begin[e];
    }
  }
  void operator()(const BuildRowLists& w) const {
    const auto* weights = static_cast<const float*>(w.weights.data);
    for_rows(pass.metadata, pass.problem.experts, [&](std::int64_t, std::int64_t p) {
      w.lists.weights[p] = weights[pass.metadata.row_slot[p]];
    });
  }
  void operator()(const TokenSum& w) const {
    const Problem& p = pass.problem;
    const auto* weights = static_cast<const float*>(w.weights.data);
    for (std::int64_t t = w.tokens.first; t < w.tokens.first + w.tokens.count; ++t) {
      for (std::int64_t j = 0; j < p.hidden; ++j) {
        float sum = 0.0f;
        for (std::int64_t slot = t * p.top_k; slot < (t + 1) * p.top_k; ++slot) {
          const std::int64_t row = pass.metadata.position_row[slot];
          sum += (weights == nullptr ? 1.0f : weights[slot]) *
                 static_cast<const float*>(w.rows)[row * p.hidden + j];
        }
        at(w.out, t, j) = sum;
      }
    }
  }
  void operator()(const ScoreGrad& w) const {
    for_rows(pass.metadata, pass.problem.experts, [&](std::int64_t e, std::int64_t p) {
      const float* parts = w.parts + p * w.tiles;
      float sum = 0.0f;
      for (std::int32_t i = 0; i < w.tiles; ++i) sum += parts[i];
      for (std::int64_t j = 0; w.b_down.data != nullptr && j < pass.problem.hidden; ++j) {
        sum += at(w.dout, pass.metadata.row_token[p], j) * at(w.b_down, e, j);
      }
      static_cast<float*>(w.out.data)[pass.metadata.row_slot[p]] = sum;
    });
  }
  void operator()(const ColumnSum& w) const {
    const auto add = [&](const Tensor& out, std::int64_t first, std::int64_t step) {
      if (out.data == nullptr) return;
      for (std::int64_t e = 0; e < pass.problem.experts; ++e) {
        for (std::int64_t j = 0; j < out.shape[1]; ++j) at(out, e, j) = 0.0f;
      }
      for_rows(pass.metadata, pass.problem.experts, [&](std::int64_t e, std::int64_t p) {
        const auto* row = static_cast<const float*>(w.source) +
                          (w.index == nullptr ? p : w.index[p]) * w.row_stride;
        for (std::int64_t j = 0; j < out.shape[1]; ++j) {
          at(out, e, j) += (w.weights == nullptr ? 1.0f : w.weights[p]) * row[first + j * step];
        }
      });
    };
    add(w.out, 0, w.odd == nullptr ? 1 : 2);
    if (w.odd != nullptr) add(*w.odd, 1, 2);
  }
  void operator()(const ClearRows& w) const {
    for (std::int64_t i = 0; i < w.out.shape[0]; ++i) {
      for (std::int64_t j = 0; j < w.out.shape[1]; ++j) at(w.out, i, j) = 0.0f;
    }
  }
};

}  // namespace

const Engine& stand_in_engine() {
  static const Engine engine = {
      .name = "stand-in",
      .service = {.capabilities = {7, 7}, .dtypes = {DType::kF32}, .multiple = 1},
      .weight_grad_columns = 16,
      .open = [](int) { return std::shared_ptr<void>(); },
      .backward_order = [](const Problem&, const BackwardArgs&) { return BackwardOrder{}; },
      .multiply_rows = &multiply_rows,
      .multiply_depth = &multiply_depth,
      .describe = [](const Problem&) { return std::vector<TileChoice>{{"A", "one row"}}; },
  };
  return engine;
}

void run_on_host(const Steps& steps, const PassContext& pass, const Engine& engine) {
  const HostRooms rooms{pass, engine};
  for (std::size_t i = 0; i < steps.size(); ++i) std::visit(rooms, steps[i].work);
}

}  // namespace sonicmoe::testing
