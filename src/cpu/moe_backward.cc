// The backward pass: kernels dH, dW2, dW1, dX~ and dX of docs/method.md, and the bias gradients.
#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "core/fp8_layout.h"
#include "cpu/fp8.h"
#include "cpu/low_rank_backward.h"

namespace sonicmoe::cpu {
namespace {

void store_dweight(const Backward& b, std::int64_t source, double value) {
  const Tensor& t = b.args.dweights;
  const std::int64_t k = b.problem.top_k;
  const std::int64_t at = b.problem.form == RoutingForm::kIds
                              ? source / k * t.stride[0] + source % k * t.stride[1]
                              : source * t.stride[0];
  if (t.dtype == DType::kF64) {
    static_cast<double*>(t.data)[at] = value;
  } else {
    static_cast<float*>(t.data)[at] = static_cast<float>(value);
  }
}

void finish_dscores(const Backward& b, const RowTask& rows, const RowBuffers& buffers) {
  const Problem& p = b.problem;
  const Kernels& k = b.kernels;
  const Tensor& bias = b.args.weights.b_down;
  double* dscores = buffers.score_gradients();
  if (bias.data != nullptr) {
    k.widen(at_element(bias.data, rows.expert * bias.stride[0], k.element_bytes), bias.stride[1],
            p.hidden, buffers.sums());
    const Operand dout = b.dout_rows();
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      const void* row = at_element(dout.data, element_offset(dout, r, 0), k.element_bytes);
      dscores[r - rows.begin] += k.dot(row, dout.col_stride, buffers.sums(), p.hidden);
    }
  }
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    store_dweight(b, b.metadata.row_source[r], dscores[r - rows.begin]);
  }
}

/// dA' = dO W2, which stays in the accumulators; its epilogue computes dH, A' and dS.
class KernelDh {
 public:
  KernelDh(Team& team, PerWorker<RowBuffers>& buffers, const Backward& b)
      : team_(team),
        buffers_(buffers),
        b_(b),
        dh_(b.wants_dh() ? b.dh : nullptr),
        scaled_(b.wants_scaled() ? b.scaled : nullptr),
        gemm_{&b.kernels,
              rows_of(b.da_rows, b.metadata.row_token),
              {transposed_expert_matrix(b.weights.down), {}},
              1,
              1,
              b.problem.width,
              b.problem.hidden,
              {inner_rows(b.q, b.problem.down_rank),
               {transposed_expert_matrix(b.lora.down.a), {}},
               b.problem.down_rank}},
        workers_(team, gemm_) {}

  void run(const ExpertGroup& group) {
    const bool wants_dscores = b_.args.dweights.data != nullptr;
    team_.run(std::ssize(group.tasks), [&](std::int64_t task, std::int32_t worker) {
      const RowTask& rows = group.tasks[task];
      const RowBuffers& buffers = buffers_[worker];
      double* scores = buffers.scores();
      double* dscores = buffers.score_gradients();
      load_scores(b_.problem, b_.metadata, b_.args.routing.weights, rows.begin, rows.end, scores);
      std::fill_n(dscores, rows.end - rows.begin, 0.0);
      workers_[worker].run(
          rows, [&](const RowTile& tile) { prepare(tile, rows); },
          [&](const RowTile& tile) {
            BackwardTile t = describe(tile, rows.origin);
            t.scores = scores + (tile.row - rows.begin);
            if (wants_dscores) t.dscores = dscores + (tile.row - rows.begin);
            b_.kernels.backward_tile(t);
          });
      if (wants_dscores) finish_dscores(b_, rows, buffers);
    });
  }

 private:
  /// The address of (row, col) in the gate columns (half 0) or up columns (the last half) of a
  /// matrix with H's shape; null if the matrix is null.
  template <class T>
  T* half_at(T* data, std::int64_t row, std::int64_t half, std::int64_t col) const {
    const std::int64_t n = b_.problem.width;
    return data == nullptr
               ? data
               : at_element(data, (row * b_.gates() + half) * n + col, b_.kernels.element_bytes);
  }
  void* scaled_at(std::int64_t row, std::int64_t col) const {
    return scaled_ == nullptr
               ? nullptr
               : at_element(scaled_, row * b_.problem.width + col, b_.kernels.element_bytes);
  }

  BackwardTile describe(const RowTile& tile, std::int64_t origin) const {
    const std::int64_t up = b_.gates() - 1;
    BackwardTile t{.activation = b_.problem.activation, .da = tile.acc[0]};
    t.h_gate = half_at(b_.h, tile.row, 0, tile.col);
    t.h_up = half_at(b_.h, tile.row, up, tile.col);
    t.dh_gate = half_at(dh_, tile.row - origin, 0, tile.col);
    t.dh_up = half_at(dh_, tile.row - origin, up, tile.col);
    t.h_stride = t.dh_stride = b_.gates() * b_.problem.width;
    t.scaled = scaled_at(tile.row - origin, tile.col);
    t.scaled_stride = b_.problem.width;
    return t;
  }

  void prepare(const RowTile& tile, const RowTask& task) const {
    const BackwardTile t = describe(tile, task.origin);
    const std::int64_t element = b_.kernels.element_bytes;
    const std::int64_t bytes = t.da.cols * element;
    // H is not in the caches, so it is prefetched early: not for this tile, but for the tile of the
    // next mr rows and the same columns, which is multiplied after the other columns of these rows.
    const std::int64_t below = std::min(t.da.rows, task.end - tile.row - t.da.rows);
    const std::int64_t step = t.da.rows * t.h_stride;
    for (const void* h : {t.h_gate, t.h_up}) {
      prefetch_rows(at_element(h, step, element), below, t.h_stride * element, bytes);
    }
    for (const void* dh : {t.dh_gate, t.dh_up}) {
      if (dh != nullptr) prefetch_rows(dh, t.da.rows, t.dh_stride * element, bytes);
    }
    if (t.scaled != nullptr) {
      prefetch_rows(t.scaled, t.da.rows, t.scaled_stride * element, bytes);
    }
  }

  Team& team_;
  PerWorker<RowBuffers>& buffers_;
  const Backward& b_;
  void* const dh_;
  void* const scaled_;
  const RowGemm gemm_;
  PerWorker<RowGemmWorker> workers_;
};

/// A bias gradient (E, cols): the sums of the columns of `rows`, whose rows may be scaled by
/// scores.
enum class Scaled { kNo, kYes };
struct BiasGradient {
  Operand rows;
  Scaled scaled;
  Tensor out;
};

void bias_gradient(Team& team, PerWorker<RowBuffers>& buffers, const Backward& b,
                   const ExpertGroup& group, const BiasGradient& bias) {
  const Tensor& out = bias.out;
  if (out.data == nullptr) return;
  const Kernels& k = b.kernels;
  const std::int64_t cols = out.shape[1];
  const std::int64_t origin = bias.rows.index == nullptr ? group.begin : 0;
  team.run(group.last - group.first, [&](std::int64_t task, std::int32_t worker) {
    const std::int64_t e = group.first + task;
    const std::int64_t begin = b.metadata.offsets[e];
    const std::int64_t end = b.metadata.offsets[e + 1];
    if (b.adds() && begin == end) return;
    void* sums = buffers[worker].sums();
    double* scores = bias.scaled == Scaled::kYes ? buffers[worker].scores() : nullptr;
    std::memset(sums, 0, static_cast<std::size_t>(cols * k.acc_bytes));
    for (std::int64_t p = begin; p < end; p += kTaskRows) {
      const std::int64_t rows = std::min(kTaskRows, end - p);
      if (scores != nullptr) {
        load_scores(b.problem, b.metadata, b.args.routing.weights, p, p + rows, scores);
      }
      k.column_sum({bias.rows, p - origin, rows, cols, scores, sums});
    }
    StoreTile t{.tile = {sums, cols, 1, cols}};
    t.out = at_element(out.data, e * out.stride[0], dtype_bytes(out.dtype));
    t.col_stride = out.stride[1];
    t.mode = b.adds() ? StoreMode::kAdd : StoreMode::kWrite;
    kernels(out.dtype, b.isa).store_tile(t);
  });
}

void bias_gradients(Team& team, PerWorker<RowBuffers>& buffers, const Backward& b,
                    const ExpertGroup& group) {
  const Weights& g = b.args.grads;
  const std::int64_t stride = b.gates() * b.problem.width;
  const void* up =
      at_element(static_cast<const void*>(b.dh), stride - b.problem.width, b.kernels.element_bytes);
  bias_gradient(team, buffers, b, group, {b.dout_rows(), Scaled::kYes, g.b_down});
  bias_gradient(team, buffers, b, group, {dense_rows(up, stride), Scaled::kNo, g.b_up});
  if (b.gates() == 1) return;
  bias_gradient(team, buffers, b, group, {dense_rows(b.dh, stride), Scaled::kNo, g.b_gate});
}

/// dX~ = r(dH W1), one sum over gate and up. For grouped rows this is dx.
class KernelDxRows {
 public:
  KernelDxRows(Team& team, const Backward& b)
      : team_(team),
        b_(b),
        grouped_(b.problem.form == RoutingForm::kGrouped),
        dx_(grouped_
                ? b.args.dx
                : tensor2(b.dx_rows, b.problem.dtype, row_capacity(b.problem), b.problem.hidden)),
        gemm_(describe(b)),
        workers_(team, gemm_) {}

  void run(const ExpertGroup& group) {
    const Kernels& k = b_.kernels;
    team_.run(std::ssize(group.tasks), [&](std::int64_t task, std::int32_t worker) {
      workers_[worker].run(
          group.tasks[task], [&](const RowTile& tile) { prefetch_row_tile(k, dx_, tile); },
          [&](const RowTile& tile) {
            StoreTile t = row_store(k, dx_, tile);
            if (grouped_) scatter(k, dx_, b_.metadata.row_token, tile, t);
            k.store_tile(t);
          });
    });
  }

 private:
  static RowGemm describe(const Backward& b) {
    const Problem& p = b.problem;
    const Weights& w = b.weights;
    RowGemm gemm{
        &b.kernels, dense_rows(b.dx_operand, b.gates() * p.width), {}, 1, b.gates(), p.hidden,
        p.width};
    gemm.matrices[0] = transposed_expert_matrix(b.gates() == 2 ? w.gate : w.up);
    gemm.matrices[1] = transposed_expert_matrix(w.up);
    if (p.up_rank == 0) return gemm;
    gemm.term = {
        inner_rows(b.v, p.up_rank), {transposed_expert_matrix(b.lora.up.a), {}}, p.up_rank};
    return gemm;
  }

  Team& team_;
  const Backward& b_;
  const bool grouped_;
  const Tensor dx_;
  const RowGemm gemm_;
  PerWorker<RowGemmWorker> workers_;
};

/// Precision::kFp8: quantises and restores (cpu/fp8.h) the operands of the products.
class Fp8Backward {
 public:
  Fp8Backward(Team& team, const Backward& b) : team_(team), b_(b) {}

  /// Before all products: writes the restored dO, weights and, if codes of H are kept, H to
  /// Backward::da_rows, weights and h.
  void before() {
    const Problem& p = b_.problem;
    quantise_rows(team_, {.source = rows_of(b_.args.dout, nullptr),
                          .rows = p.tokens,
                          .width = p.hidden,
                          .restored = b_.da_rows.data});
    restore_weights(team_, p, b_.args.fp8_weights, b_.weights);
    if (!fp8::keeps_codes(p)) return;
    restore_rows(team_, kept_h_rows(p, b_.args.h), b_.metadata.offsets[p.experts], b_.gates(),
                 p.width, b_.h);
  }
  /// Before dX~ of a group of experts: writes the group's rows of dH, quantised and restored, to
  /// Backward::dx_operand.
  void between(const ExpertGroup& group) {
    const std::int64_t depth = b_.gates() * b_.problem.width;
    quantise_rows(team_, {.source = dense_rows(b_.dh, depth),
                          .rows = group.end - group.begin,
                          .width = b_.problem.width,
                          .parts = b_.gates(),
                          .restored = b_.dx_operand});
  }

 private:
  Team& team_;
  const Backward& b_;
};

Backward backward_of(Isa isa, const Problem& p, const BackwardArgs& args) {
  const BackwardScratch at = backward_scratch(p);
  const auto scratch = [&](std::int64_t offset) { return at_byte(args.scratch, offset); };
  Backward b{p,
             args,
             kernels(p.dtype, isa),
             isa,
             metadata_at(p, args.saved.data),
             args.dout,
             args.weights,
             args.h.data,
             scratch(at.dh),
             scratch(at.dh),
             scratch(at.scaled),
             scratch(at.dx_rows),
             rounded_factors(p, args.lora, scratch(at.factors)),
             at_byte(args.saved, saved_p(p)),
             scratch(at.q),
             scratch(at.u),
             scratch(at.v)};
  if (p.precision == Precision::kTensors) return b;
  b.da_rows = tensor2(scratch(at.dout), p.dtype, p.tokens, p.hidden);
  b.weights = restored_weights(p, args.weights, scratch(at.weights));
  b.dx_operand = scratch(at.dh_coded);
  if (fp8::keeps_codes(p)) b.h = scratch(at.h);
  return b;
}

void clear_dweights(const Backward& b) {
  if (b.args.dweights.data == nullptr) return;
  const std::int64_t sources = row_capacity(b.problem);
  for (std::int64_t s = 0; s < sources; ++s) store_dweight(b, s, 0.0);
}

ColGemm describe_dw2(const Backward& b) {
  const Problem& p = b.problem;
  return {&b.kernels, b.dout_rows(), dense_rows(b.scaled, p.width), 1, p.hidden, p.width};
}
ColGemm describe_dw1(const Backward& b) {
  const Problem& p = b.problem;
  return {&b.kernels, dense_rows(b.dh, b.gates() * p.width), b.x_rows(), b.gates(), p.width,
          p.hidden};
}

/// The largest number of tasks of any phase.
std::int64_t most_tasks(const Backward& b, std::int64_t rows) {
  const std::int64_t tiles =
      std::max({col_tasks(describe_dw2(b)), col_tasks(describe_dw1(b)), LowRankBackward::tiles(b)});
  return std::max(
      {most_row_tasks(rows, b.problem.experts), b.problem.experts * tiles, token_tasks(b.problem)});
}

}  // namespace

void moe_backward_on(Isa isa, const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  const Backward b = backward_of(isa, problem, args);
  check_metadata(problem, b.metadata);

  // Everything that allocates. The caller's buffers are written only after this: in accumulate
  // mode, repeating a call that was refused later would add some gradients twice.
  const std::int64_t rows = b.metadata.offsets[problem.experts];
  const double flops =
      12.0 * static_cast<double>(rows) * static_cast<double>(problem.hidden * problem.width);
  Team team(thread_count(exec, flops), most_tasks(b, rows));
  PerWorker<RowBuffers> buffers(team, problem, b.kernels);
  const Weights& g = args.grads;
  std::optional<KernelDh> dh;
  if (b.wants_dh() || b.wants_scaled() || args.dweights.data != nullptr) {
    dh.emplace(team, buffers, b);
  }
  std::optional<WeightGradient> dw2;
  if (g.down.data != nullptr) {
    dw2.emplace(team, b, describe_dw2(b), std::array<Tensor, 2>{g.down, {}});
  }
  std::optional<WeightGradient> dw1;
  if (g.gate.data != nullptr || g.up.data != nullptr) {
    dw1.emplace(team, b, describe_dw1(b),
                std::array<Tensor, 2>{b.gates() == 2 ? g.gate : g.up, g.up});
  }
  std::optional<KernelDxRows> dx_rows;
  if (args.dx.data != nullptr) dx_rows.emplace(team, b);
  LowRankBackward low_rank(team, b);
  ExpertGroups groups = expert_groups(problem, rows, team.size());
  const bool fp8 = problem.precision == Precision::kFp8;
  Fp8Backward quantised(team, b);

  clear_dweights(b);
  prefer_large_pages(args.scratch);
  for (const Tensor& out : {args.dx, g.gate, g.up, g.down}) prefer_large_pages(out);
  const auto run = [&](const char* name, auto& kernel, const ExpertGroup& group) {
    observed(exec, name, [&] {
      if (kernel) kernel->run(group);
    });
  };
  if (fp8) observed(exec, "quantise", [&] { quantised.before(); });
  const bool has_factors = problem.up_rank > 0 || problem.down_rank > 0;
  if (has_factors) round_factors(team, problem, args.lora, b.lora);
  while (const ExpertGroup* group = groups.next(b.metadata.expert_offsets(problem))) {
    if (has_factors) observed(exec, "Q", [&] { low_rank.before_dh(*group); });
    run("dH", dh, *group);
    if (has_factors) observed(exec, "factors", [&] { low_rank.after_dh(*group); });
    run("dW2", dw2, *group);
    run("dW1", dw1, *group);
    observed(exec, "biases", [&] { bias_gradients(team, buffers, b, *group); });
    if (fp8 && dx_rows) observed(exec, "quantise", [&] { quantised.between(*group); });
    run("dX~", dx_rows, *group);
  }
  if (args.dx.data == nullptr) return;
  observed(exec, "dX", [&] {
    if (problem.form == RoutingForm::kGrouped) {
      zero_unowned(problem, b.kernels, b.metadata, args.dx);
    } else {
      sum_tokens(team, buffers, {&problem, &b.kernels, &b.metadata, b.dx_rows, nullptr, args.dx});
    }
  });
}

}  // namespace sonicmoe::cpu
