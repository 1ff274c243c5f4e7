// The lists and sums of a pass on host memory, and the pass as an implementation for the harness.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "cuda/layer/checks.h"
#include "cuda/layer/moe.h"
#include "elements.h"
#include "stand_in.h"
#include "verify/cases.h"
#include "verify/oracle.h"

namespace sonicmoe::testing {
namespace {

using namespace cuda;  // NOLINT: this file computes their steps

/// Multiplications in a product of the largest case that is judged.
constexpr std::int64_t kMostTerms = 3 << 19;

/// Positions in token order: (token, slot) of each.
using Positions = std::vector<std::pair<std::int64_t, std::int64_t>>;

struct HostSteps {
  const PassContext& pass;
  const Engine& engine;
  const Device device{};

  const Problem& problem() const { return pass.problem; }
  const Metadata& lists() const { return pass.metadata; }

  void operator()(const RowProduct& w) const { engine.multiply_rows(device, w, nullptr); }
  // Only an engine with FP8 gets this step, and the stand-in has no FP8.
  void operator()(const QuantizeRows&) const { throw Error(Status::kInternal, "no FP8 here."); }
  // The tests here give no packed weights: these are unpacked by a kernel.
  void operator()(const PackedProduct&) const {
    throw Error(Status::kInternal, "no packed weights here.");
  }
  void operator()(const DepthProduct& w) const { engine.multiply_depth(device, w, nullptr); }

  /// Overwrites the scratch, as the kernels may. Rows of one expert follow each other, experts in
  /// ascending order; grouped rows keep their row numbers.
  void operator()(const BuildMetadata& w) const {
    const Problem& p = problem();
    const bool grouped = p.form == RoutingForm::kGrouped;
    const std::vector<oracle::Row> rows = oracle::routed_rows(p, w.routing);
    std::memset(w.work.scratch, 0xa5, static_cast<std::size_t>(metadata_scratch(p)));
    std::fill_n(w.work.counters, w.work.counter_words, 0u);
    std::fill_n(lists().position_row, row_capacity(p), -1);
    std::fill_n(lists().expert_begin, p.experts, 0);
    std::fill_n(lists().expert_rows, p.experts, 0);
    Positions positions;
    std::vector<std::int32_t> row_of_slot(static_cast<std::size_t>(row_capacity(p)), -1);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const oracle::Row& r = rows[i];
      const auto row = static_cast<std::int32_t>(grouped ? r.slot : static_cast<std::int64_t>(i));
      lists().row_token[row] = static_cast<std::int32_t>(r.token);
      lists().row_slot[row] = static_cast<std::int32_t>(r.slot);
      if (lists().expert_rows[r.expert]++ == 0) lists().expert_begin[r.expert] = row;
      row_of_slot[r.slot] = row;
      positions.emplace_back(r.token, r.slot);
    }
    if (p.form != RoutingForm::kPairs) {
      std::copy(row_of_slot.begin(), row_of_slot.end(), lists().position_row);
      return;
    }
    std::sort(positions.begin(), positions.end());
    std::fill_n(lists().token_offsets, p.tokens + 1, 0);
    for (std::size_t i = 0; i < positions.size(); ++i) {
      lists().position_slot[i] = static_cast<std::int32_t>(positions[i].second);
      lists().position_row[i] = row_of_slot[positions[i].second];
      ++lists().token_offsets[positions[i].first + 1];
    }
    std::partial_sum(lists().token_offsets, lists().token_offsets + p.tokens + 1,
                     lists().token_offsets);
  }

  double weight_of(const Tensor& weights, std::int64_t slot) const {
    if (weights.data == nullptr) return 1.0;
    return oracle::load(weights.data, weights.dtype, slot_offset(weights, slot));
  }

  void operator()(const BuildRowLists& w) const {
    const Problem& p = problem();
    std::fill_n(w.lists.counters, w.lists.counter_count, 0u);
    for_rows(lists(), p.experts, [&](std::int64_t, std::int64_t row) {
      w.lists.weights[row] = static_cast<float>(weight_of(w.weights, lists().row_slot[row]));
    });
    for (std::int32_t e = 0; e < p.experts; ++e) {
      w.lists.experts[e] = {e, lists().expert_begin[e], lists().expert_rows[e], 0};
    }
    std::stable_sort(w.lists.experts, w.lists.experts + p.experts,
                     [](const ExpertRecord& a, const ExpertRecord& b) { return a.rows > b.rows; });
    if (w.dweights.data == nullptr) return;
    oracle::write(w.dweights,
                  std::vector<double>(static_cast<std::size_t>(oracle::element_count(w.dweights))));
  }

  /// The first position of a token. For the token after the last one: the end of the positions.
  std::int64_t first_position(std::int64_t token) const {
    if (problem().form == RoutingForm::kPairs) return lists().token_offsets[token];
    return problem().form == RoutingForm::kIds ? token * problem().top_k : token;
  }

  void operator()(const TokenSum& w) const {
    const Problem& p = problem();
    const Tensor rows = tensor2(const_cast<void*>(w.rows), p.dtype, row_capacity(p), p.hidden);
    for (std::int64_t t = w.tokens.first; t < w.tokens.first + w.tokens.count; ++t) {
      std::vector<double> sum(static_cast<std::size_t>(p.hidden), 0.0);
      for (std::int64_t i = first_position(t); i < first_position(t + 1); ++i) {
        if (lists().position_row[i] < 0) continue;
        const std::int64_t slot = lists().position_slot == nullptr ? i : lists().position_slot[i];
        const double weight = weight_of(w.weights, slot);
        for (std::int64_t j = 0; j < p.hidden; ++j) {
          sum[j] += weight * get(rows, lists().position_row[i], j);
        }
      }
      for (std::int64_t j = 0; j < p.hidden; ++j) put(w.out, sum[j], t, j);
    }
  }

  void operator()(const ScoreGrad& w) const {
    for_rows(lists(), problem().experts, [&](std::int64_t e, std::int64_t p) {
      const float* parts = w.parts + p * w.tiles;
      double sum = std::accumulate(parts, parts + w.tiles, 0.0);
      for (std::int64_t j = 0; w.b_down.data != nullptr && j < problem().hidden; ++j) {
        sum += get(w.dout, lists().row_token[p], j) * get(w.b_down, e, j);
      }
      oracle::store(w.out.data, w.out.dtype, slot_offset(w.out, lists().row_slot[p]), sum);
    });
  }

  /// Columns first, first + step, ... of the source into `out`.
  void sum_columns(const ColumnSum& w, const Tensor& out, std::int64_t first,
                   std::int64_t step) const {
    if (out.data == nullptr) return;
    const bool adds = w.mode == GradMode::kAccumulate;
    for (std::int64_t e = 0; e < problem().experts; ++e) {
      const std::int32_t rows = lists().expert_rows[e];
      if (adds && rows == 0) continue;
      for (std::int64_t j = 0; j < out.shape[1]; ++j) {
        double sum = adds ? get(out, e, j) : 0.0;
        for (std::int64_t p = lists().expert_begin[e]; p < lists().expert_begin[e] + rows; ++p) {
          const std::int64_t row = w.index == nullptr ? p : w.index[p];
          sum += (w.weights == nullptr ? 1.0 : w.weights[p]) *
                 oracle::load(w.source, problem().dtype, row * w.row_stride + first + j * step);
        }
        put(out, sum, e, j);
      }
    }
  }
  void operator()(const ColumnSum& w) const {
    sum_columns(w, w.out, 0, w.odd == nullptr ? 1 : 2);
    if (w.odd != nullptr) sum_columns(w, *w.odd, 1, 2);
  }

  void operator()(const CopyFactors& w) const {
    for (int i = 0; i < w.count; ++i) oracle::write(w.copy[i].to, oracle::read(w.copy[i].from));
  }
  void operator()(const ClearRows& w) const {
    oracle::write(w.out,
                  std::vector<double>(static_cast<std::size_t>(oracle::element_count(w.out))));
  }
};

/// Whether a step may run at the same time as the previous step.
bool is_independent(const Step& step) {
  if (const auto* w = std::get_if<RowProduct>(&step.work)) {
    return w->hints.start == Start::kIndependent;
  }
  if (const auto* w = std::get_if<DepthProduct>(&step.work)) {
    return w->hints.start == Start::kIndependent;
  }
  if (const auto* w = std::get_if<TokenSum>(&step.work)) return w->start == Start::kIndependent;
  if (const auto* w = std::get_if<ScoreGrad>(&step.work)) return w->beside;
  return false;
}

void forward(const Device& device, Overlap overlap, const Problem& p, const ForwardArgs& args) {
  const Pass kind = args.saved.data == nullptr ? Pass::kInference : Pass::kForward;
  const ForwardScratch scratch = forward_scratch(p, kind, args.scratch.data);
  void* saved = kind == Pass::kInference ? scratch.saved : args.saved.data;
  const PassContext pass{p, metadata_layout(p, saved)};
  Steps steps;
  add_forward_steps(pass, args, scratch, steps);
  run_on_host(steps, pass, *device.engine, overlap);
}

void backward(const Device& device, Overlap overlap, const Problem& p, const BackwardArgs& args) {
  const BackwardScratch scratch = backward_scratch(p, *device.engine, args.scratch.data);
  const PassContext pass{p, metadata_layout(p, args.saved.data)};
  Steps steps;
  add_backward_steps(pass, args, scratch, *device.engine, steps);
  run_on_host(steps, pass, *device.engine, overlap);
}

}  // namespace

void run_on_host(const Steps& steps, const PassContext& pass, const Engine& engine,
                 Overlap overlap) {
  const HostSteps host{pass, engine};
  const std::size_t parity = overlap == Overlap::kOdd ? 1 : 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const bool swapped = overlap != Overlap::kNone && i % 2 == parity && i + 1 < steps.size() &&
                         is_independent(steps[i + 1]);
    if (swapped) std::visit(host, steps[i + 1].work);
    std::visit(host, steps[i].work);
    if (swapped) ++i;
  }
}

verify::Implementation implementation_of(const Engine& engine, Overlap overlap) {
  const auto device = std::make_shared<Device>();
  device->engine = &engine;
  verify::Implementation i;
  i.name = engine.name;
  i.memory = verify::host_memory();
  i.moe_sizes = [device](const Problem& p, Pass pass) {
    return cuda::moe_sizes(p, pass, *device->engine);
  };
  i.moe_forward = [device, overlap](const Problem& p, const ForwardArgs& args) {
    forward(*device, overlap, p, args);
  };
  i.moe_backward = [device, overlap](const Problem& p, const BackwardArgs& args) {
    backward(*device, overlap, p, args);
  };
  // A pass without tokens or rows has no steps. Large cases would test nothing more here.
  i.serves = [&engine](const verify::Case& c) {
    const Problem& p = c.problem;
    if (c.subject != verify::Subject::kLayer || c.cpu_only) return false;
    if (!cuda::refusal(p, engine).empty()) return false;
    const std::int64_t terms = row_capacity(p) * p.hidden * p.width;
    return p.tokens > 0 && terms > 0 && terms <= kMostTerms &&
           engine.service.dtypes.contains(p.dtype);
  };
  return i;
}

}  // namespace sonicmoe::testing
