#include "core/plan.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe {
Problem problem_of(const LayerShape& shape, DType dtype, const Activation& activation) {
  Problem p;
  p.tokens = shape.tokens;
  p.hidden = shape.hidden;
  p.width = shape.width;
  p.experts = shape.experts;
  p.top_k = shape.top_k;
  p.dtype = dtype;
  p.activation = activation;
  checks::problem(p);
  if (p.top_k > p.experts) {
    checks::refuse("top_k is " + std::to_string(p.top_k) +
                   ", must be at most E = " + std::to_string(p.experts));
  }
  return p;
}

namespace {

/// Bytes of operands in the tensors' dtype; `element` is the size of one element.
struct Operands {
  double x, row_n, row_h, w_up, w_down, element;

  /// How many of `bytes` quantisation saves. Quantised, an element takes 1 byte, and 128 elements
  /// share a scale of 4 bytes.
  double saved(double bytes) const { return bytes * (1.0 - (1.0 + 4.0 / 128.0) / element); }
  /// How many bytes remain of `bytes` after quantisation.
  double coded(double bytes) const { return bytes - saved(bytes); }
};

bool is_fp8_product(const KernelCost& c) {
  const std::string_view name = c.name;
  return name == "A" || name == "Y" || name == "dH" || name == "dX~";
}

double rate_of(const Problem& p, const KernelCost& c) {
  return p.precision == Precision::kFp8 && is_fp8_product(c) ? kFp8Rate : 1.0;
}

/// Changes the costs of a bf16 layer to those of an fp8 layer: products read and write codes and
/// scales, and two more kernels quantise X and dO.
void to_fp8(const Operands& o, const Problem& p, std::vector<KernelCost>& costs) {
  const double kept_h = p.kept_h == KeptH::kPrecision ? o.saved(o.row_h) : 0.0;
  for (KernelCost& c : costs) {
    const std::string_view name = c.name;
    if (name == "A") c.bytes -= o.saved(o.x + o.w_up + o.row_n) + kept_h;
    if (name == "Y") c.bytes -= o.saved(o.row_n + o.w_down);
    // dH is written twice, for dW1 and for dX~.
    if (name == "dH") c.bytes += o.coded(o.row_h) - o.saved(o.x + o.w_down) - kept_h;
    if (name == "dX~") c.bytes -= o.saved(o.row_h + o.w_up);
  }
  const double pass = o.x + o.coded(o.x);
  const auto backward =
      std::find_if(costs.begin(), costs.end(), [](const KernelCost& c) { return c.backward; });
  costs.insert(backward, {"q(dO)", true, 0.0, pass});
  costs.insert(costs.begin(), {"q(X)", false, 0.0, pass});
}

}  // namespace

std::vector<KernelCost> kernel_costs(const Problem& p, const Machine& machine) {
  const auto T = static_cast<double>(p.tokens);
  return load_costs(p, {T, T * static_cast<double>(p.top_k), static_cast<double>(p.experts)},
                    machine);
}

std::vector<KernelCost> load_costs(const Problem& p, const LayerLoad& load,
                                   const Machine& machine) {
  const double T = load.tokens, rows = load.rows, E = load.experts;
  const auto d = static_cast<double>(p.hidden), n = static_cast<double>(p.width);
  const auto G = static_cast<double>(gate_factor(p.activation.kind));
  const auto element = static_cast<double>(dtype_bytes(p.dtype));
  const double score = p.dtype == DType::kF64 ? 8 : 4, index = 4;
  // Tensors in bytes: x is X or dO; row_d and row_n are tensors with a row for each routed row.
  const double x = T * d * element, row_d = rows * d * element, row_n = rows * n * element;
  const double row_h = G * row_n, w_down = E * n * d * element, w_up = G * w_down;
  const double up = 2 * rows * d * G * n, down = 2 * rows * d * n;
  const double dscore_partials = score * rows * std::ceil(n / 128);
  std::vector<KernelCost> costs = {
      {"A", false, up, x + w_up + row_h + row_n + index * rows},
      {"Y", false, down, row_n + w_down + row_d},
      {"O", false, 2 * rows * d, row_d + x + (index + score) * rows},
      {"dH", true, down,
       x + w_down + 2 * row_h + row_n + index * rows + dscore_partials + 2 * score * rows},
      {"dW2", true, down, x + row_n + w_down + index * rows},
      {"dX~", true, up, row_h + w_up + row_d},
      {"dW1", true, up, x + row_h + w_up + index * rows},
      {"dX", true, rows * d, row_d + x + index * rows},
  };
  if (p.precision == Precision::kFp8) to_fp8({x, row_n, row_h, w_up, w_down, element}, p, costs);
  for (KernelCost& c : costs) {
    const double compute = c.flops / (machine.flops_per_second * rate_of(p, c));
    const double memory = c.bytes / machine.bytes_per_second;
    c.memory_bound = memory > compute;
    c.seconds = std::max(compute, memory);
  }
  return costs;
}

double expected_padding(const LayerShape& s, std::int64_t tile) {
  checks::at_least("tile", tile, 1);
  const auto T = static_cast<double>(s.tokens);
  const double p = static_cast<double>(s.top_k) / static_cast<double>(s.experts);
  const double mean = T * p;
  if (s.tokens == 0) return 0.0;
  // Rows that fill up the last tile of f rows, without an overflow for a huge tile.
  const auto padding = [tile](std::int64_t f) {
    return static_cast<double>(f % tile == 0 ? 0 : tile - f % tile);
  };
  if (p >= 1.0) return padding(s.tokens) / T;
  // Beyond twelve standard deviations the mass is too small to change a sum in double.
  const double reach = 12.0 * std::sqrt(mean * (1.0 - p)) + 16.0;
  const auto first = static_cast<std::int64_t>(std::max(0.0, std::floor(mean - reach)));
  const auto last = static_cast<std::int64_t>(std::min(T, std::ceil(mean + reach)));
  double rows = 0.0;
  for (std::int64_t f = first; f <= last; ++f) {
    const auto k = static_cast<double>(f);
    const double log_mass = std::lgamma(T + 1) - std::lgamma(k + 1) - std::lgamma(T - k + 1) +
                            k * std::log(p) + (T - k) * std::log1p(-p);
    rows += std::exp(log_mass) * padding(f);
  }
  return rows / mean;
}

MemoryCost memory_cost(const Problem& p) {
  const std::int64_t element = dtype_bytes(p.dtype), G = gate_factor(p.activation.kind);
  const std::int64_t rows = p.tokens * p.top_k;
  checks::array_bytes("tokens * experts in bytes", {p.tokens, p.experts, element});
  const Sizes sizes = moe_sizes(p, Pass::kForward);
  MemoryCost m;
  m.x = p.tokens * p.hidden * element;
  m.h = sizes.h_bytes;
  m.metadata = sizes.saved_bytes;
  m.fp8_weights = fp8_weights_bytes(p);
  m.callers = rows * (8 + 4) + p.tokens * p.experts * element;
  m.cache_everything = rows * (2 * p.hidden + (G + 1) * p.width) * element;
  m.scatter_style = rows * (p.hidden + 2 * G * p.width) * element;
  return m;
}

WorkspaceCost workspace_cost(const Problem& p, const Exec& exec) {
  const BackendTable& table = backend_table(exec.backend);
  const auto scratch = [&](Pass pass) { return table.moe_sizes(p, pass, exec).scratch_bytes; };
  return {scratch(Pass::kForward), scratch(Pass::kBackward), scratch(Pass::kInference)};
}

std::map<std::string, std::string> chosen_tiles(const Problem& p, const Exec& exec) {
  std::map<std::string, std::string> tiles;
  const BackendTable& table = backend_table(exec.backend);
  if (table.layer_tiles == nullptr) return tiles;
  for (const TileChoice& c : table.layer_tiles(p, exec)) tiles[c.kernel] = c.tile;
  return tiles;
}

std::vector<LayerShape> granularity_sweep(const LayerShape& s) {
  std::vector<LayerShape> sweep;
  for (std::int64_t k = 1; k <= 64; k *= 2) {
    const bool whole = s.top_k * s.width % k == 0 && s.experts * k % s.top_k == 0;
    const LayerShape at{s.tokens, s.hidden, s.top_k * s.width / k, s.experts * k / s.top_k, k};
    if (whole && at.width >= 1 && at.experts >= k) sweep.push_back(at);
  }
  return sweep;
}

}  // namespace sonicmoe
