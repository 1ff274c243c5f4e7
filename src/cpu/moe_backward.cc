// Kernels dH, dW2, dW1, dX~ and dX, with the bias gradients.
#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {
namespace {

struct Backward {
  const Problem& problem;
  const BackwardArgs& args;
  const Kernels& kernels;
  const Isa isa;
  const Metadata metadata;
  std::span<const RowTask> tasks;
  void* dh;
  void* shared;  ///< A', later dX~

  std::int64_t gates() const { return gate_factor(problem.activation.kind); }
  bool wants_dh() const {
    const Weights& g = args.grads;
    return args.dx.data != nullptr || g.gate.data != nullptr || g.up.data != nullptr ||
           g.b_gate.data != nullptr || g.b_up.data != nullptr;
  }
};

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

/// What a task of kernel dH keeps per row while it walks the columns.
struct RowScores {
  std::vector<double> scores;
  std::vector<double> dscores;
};

void finish_dscores(const Backward& b, const RowTask& rows, std::vector<double>& dscores) {
  const Problem& p = b.problem;
  const Kernels& k = b.kernels;
  const Tensor& bias = b.args.weights.b_down;
  if (bias.data != nullptr) {
    const Panel wide(p.hidden * k.acc_bytes);
    k.widen(at_element(bias.data, rows.expert * bias.stride[0], k.element_bytes), bias.stride[1],
            p.hidden, wide.data());
    const Operand dout = rows_of(b.args.dout, b.metadata.row_token);
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      const void* row = at_element(dout.data, element_offset(dout, r, 0), k.element_bytes);
      dscores[r - rows.begin] += k.dot(row, dout.col_stride, wide.data(), p.hidden);
    }
  }
  for (std::int64_t r = rows.begin; r < rows.end; ++r) {
    store_dweight(b, b.metadata.row_source[r], dscores[r - rows.begin]);
  }
}

/// dA' = dO W2 in accumulators; dH, A' and dS in its epilogue.
void kernel_dh(Team& team, const Backward& b) {
  const Problem& p = b.problem;
  const Kernels& k = b.kernels;
  const std::int64_t gates = b.gates();
  const bool wants_dh = b.wants_dh();
  const bool wants_dscores = b.args.dweights.data != nullptr;
  const bool wants_scaled = b.args.grads.down.data != nullptr;
  if (!wants_dh && !wants_dscores && !wants_scaled) return;
  RowGemm gemm{&k, rows_of(b.args.dout, b.metadata.row_token), {}, 1, 1, p.width, p.hidden};
  gemm.matrices[0] = transposed_expert_matrix(b.args.weights.down);
  Workers<RowGemmWorker, RowGemm> workers(team, gemm);
  team.run(std::ssize(b.tasks), [&](std::int64_t task, std::int32_t worker) {
    const RowTask& rows = b.tasks[task];
    RowScores s;
    load_scores(p, b.metadata, b.args.routing.weights, rows.begin, rows.end, s.scores);
    s.dscores.assign(s.scores.size(), 0.0);
    const auto prepare = [&](const RowTile& tile) {
      const Tile& da = tile.acc[0];
      const std::int64_t bytes = da.cols * k.element_bytes;
      const std::int64_t stride = p.width * k.element_bytes;
      const std::int64_t at = tile.row * gates * p.width + tile.col;
      for (std::int64_t g = 0; g < gates; ++g) {
        const std::int64_t offset = at + g * p.width;
        prefetch_rows(at_element(b.args.h.data, offset, k.element_bytes), da.rows, gates * stride,
                      bytes);
        if (!wants_dh) continue;
        prefetch_rows(at_element(b.dh, offset, k.element_bytes), da.rows, gates * stride, bytes);
      }
      if (!wants_scaled) return;
      prefetch_rows(at_element(b.shared, tile.row * p.width + tile.col, k.element_bytes), da.rows,
                    stride, bytes);
    };
    workers[worker].run(rows, prepare, [&](const RowTile& tile) {
      const std::int64_t gate_at = tile.row * gates * p.width + tile.col;
      const std::int64_t up_at = gate_at + (gates - 1) * p.width;
      BackwardTile t{.activation = p.activation, .da = tile.acc[0]};
      t.h_gate = at_element(b.args.h.data, gate_at, k.element_bytes);
      t.h_up = at_element(b.args.h.data, up_at, k.element_bytes);
      t.h_stride = t.dh_stride = gates * p.width;
      t.scores = s.scores.data() + (tile.row - rows.begin);
      if (wants_dh) {
        t.dh_gate = at_element(b.dh, gate_at, k.element_bytes);
        t.dh_up = at_element(b.dh, up_at, k.element_bytes);
      }
      if (wants_scaled) {
        t.scaled = at_element(b.shared, tile.row * p.width + tile.col, k.element_bytes);
        t.scaled_stride = p.width;
      }
      if (wants_dscores) t.dscores = s.dscores.data() + (tile.row - rows.begin);
      k.backward_tile(t);
    });
    if (wants_dscores) finish_dscores(b, rows, s.dscores);
  });
}

/// One weight gradient: grads[s] (E, m, n) from a's columns [s*m, (s+1)*m) and b.
void weight_gradient(Team& team, const Backward& b, const ColGemm& gemm,
                     std::span<const Tensor> grads) {
  const auto tasks = split_cols(gemm, b.problem.experts);
  const bool adds = b.args.grad_mode == GradMode::kAccumulate;
  Workers<ColGemmWorker, ColGemm> workers(team, gemm);
  team.run(std::ssize(tasks), [&](std::int64_t task, std::int32_t worker) {
    const ColTask& c = tasks[task];
    const std::int64_t begin = b.metadata.offsets[c.expert];
    const std::int64_t end = b.metadata.offsets[c.expert + 1];
    if (adds && begin == end) return;
    const auto place = [&](const ColTile& tile) {
      const Tensor& out = grads[tile.segment];
      const std::int64_t at =
          c.expert * out.stride[0] + tile.row * out.stride[1] + tile.col * out.stride[2];
      return at_element(out.data, at, dtype_bytes(out.dtype));
    };
    const auto prepare = [&](const ColTile& tile) {
      const Tensor& out = grads[tile.segment];
      if (out.data == nullptr || out.stride[2] != 1) return;
      prefetch_rows(place(tile), tile.acc.rows, out.stride[1] * dtype_bytes(out.dtype),
                    tile.acc.cols * dtype_bytes(out.dtype));
    };
    workers[worker].run(c, {c.expert, begin, end}, prepare, [&](const ColTile& tile) {
      const Tensor& out = grads[tile.segment];
      if (out.data == nullptr) return;
      StoreTile t{.tile = tile.acc};
      t.out = place(tile);
      t.row_stride = out.stride[1];
      t.col_stride = out.stride[2];
      t.mode = adds ? StoreMode::kAdd : StoreMode::kWrite;
      kernels(out.dtype, b.isa).store_tile(t);
    });
  });
}

/// A bias gradient (E, cols): column sums of `rows`, scaled by the scores where `scaled` says so.
enum class Scaled { kNo, kYes };
void bias_gradient(Team& team, const Backward& b, const Operand& rows, Scaled scaled,
                   const Tensor& out) {
  if (out.data == nullptr) return;
  const Kernels& k = b.kernels;
  const std::int64_t cols = out.shape[1];
  const bool adds = b.args.grad_mode == GradMode::kAccumulate;
  team.run(b.problem.experts, [&](std::int64_t e, std::int32_t) {
    const std::int64_t begin = b.metadata.offsets[e];
    const std::int64_t end = b.metadata.offsets[e + 1];
    if (adds && begin == end) return;
    const Panel sum(cols * k.acc_bytes);
    std::fill_n(sum.data(), cols * k.acc_bytes, std::byte{0});
    std::vector<double> scores;
    if (scaled == Scaled::kYes) {
      load_scores(b.problem, b.metadata, b.args.routing.weights, begin, end, scores);
    }
    k.column_sum(
        {rows, begin, end - begin, cols, scores.empty() ? nullptr : scores.data(), sum.data()});
    StoreTile t{.tile = {sum.data(), cols, 1, cols}};
    t.out = at_element(out.data, e * out.stride[0], dtype_bytes(out.dtype));
    t.col_stride = out.stride[1];
    t.mode = adds ? StoreMode::kAdd : StoreMode::kWrite;
    kernels(out.dtype, b.isa).store_tile(t);
  });
}

/// dX~ = r(dH W1), one sum over gate and up. Grouped rows are their tokens' gradient.
void kernel_dx_rows(Team& team, const Backward& b) {
  const Problem& p = b.problem;
  const Weights& w = b.args.weights;
  const Kernels& k = b.kernels;
  const std::int64_t gates = b.gates();
  const bool grouped = p.form == RoutingForm::kGrouped;
  const Tensor dx = grouped ? b.args.dx : tensor2(b.shared, p.dtype, row_capacity(p), p.hidden);
  RowGemm gemm{&k, dense_rows(b.dh, gates * p.width), {}, 1, gates, p.hidden, p.width};
  gemm.matrices[0] = transposed_expert_matrix(gates == 2 ? w.gate : w.up);
  gemm.matrices[1] = transposed_expert_matrix(w.up);
  Workers<RowGemmWorker, RowGemm> workers(team, gemm);
  team.run(std::ssize(b.tasks), [&](std::int64_t task, std::int32_t worker) {
    const auto prepare = [&](const RowTile& tile) {
      if (grouped) return;
      prefetch_rows(at_element(b.shared, tile.row * p.hidden + tile.col, k.element_bytes),
                    tile.acc[0].rows, p.hidden * k.element_bytes,
                    tile.acc[0].cols * k.element_bytes);
    };
    workers[worker].run(b.tasks[task], prepare, [&](const RowTile& tile) {
      StoreTile t{.tile = tile.acc[0]};
      t.index = grouped ? b.metadata.row_token + tile.row : nullptr;
      const std::int64_t row = grouped ? 0 : tile.row;
      t.out = at_element(dx.data, row * dx.stride[0] + tile.col * dx.stride[1], k.element_bytes);
      t.row_stride = dx.stride[0];
      t.col_stride = dx.stride[1];
      k.store_tile(t);
    });
  });
}

void clear_dweights(const Backward& b) {
  if (b.args.dweights.data == nullptr) return;
  const std::int64_t sources = row_capacity(b.problem);
  for (std::int64_t s = 0; s < sources; ++s) store_dweight(b, s, 0.0);
}

void weight_gradients(Team& team, const Backward& b) {
  const Problem& p = b.problem;
  const Weights& g = b.args.grads;
  const std::int64_t gates = b.gates();
  const Operand dout = rows_of(b.args.dout, b.metadata.row_token);
  const Operand x = rows_of(b.args.x, b.metadata.row_token);
  const Operand dh = dense_rows(b.dh, gates * p.width);
  const void* dh_up = at_element(b.dh, (gates - 1) * p.width, b.kernels.element_bytes);
  if (g.down.data != nullptr) {
    const ColGemm gemm{&b.kernels, dout, dense_rows(b.shared, p.width), 1, p.hidden, p.width};
    weight_gradient(team, b, gemm, std::span(&g.down, 1));
  }
  if (g.gate.data != nullptr || g.up.data != nullptr) {
    const ColGemm gemm{&b.kernels, dh, x, gates, p.width, p.hidden};
    const Tensor both[2] = {gates == 2 ? g.gate : g.up, g.up};
    weight_gradient(team, b, gemm, both);
  }
  bias_gradient(team, b, dout, Scaled::kYes, g.b_down);
  bias_gradient(team, b, dense_rows(dh_up, gates * p.width), Scaled::kNo, g.b_up);
  if (gates == 2) bias_gradient(team, b, dh, Scaled::kNo, g.b_gate);
}

}  // namespace

void moe_backward_on(Isa isa, const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  const BackwardScratch scratch = backward_scratch(problem);
  const Metadata metadata = metadata_at(problem, args.saved.data);
  const double rows = static_cast<double>(metadata.offsets[problem.experts]);
  const double flops = 12.0 * rows * static_cast<double>(problem.hidden * problem.width);
  Team team(thread_count(exec, flops));
  const auto tasks =
      split_rows({metadata.offsets, static_cast<std::size_t>(problem.experts) + 1}, team.size());
  const Backward b{
      problem,  args,  kernels(problem.dtype, isa),       isa,
      metadata, tasks, at_byte(args.scratch, scratch.dh), at_byte(args.scratch, scratch.shared)};
  clear_dweights(b);
  kernel_dh(team, b);
  weight_gradients(team, b);
  if (args.dx.data == nullptr) return;
  kernel_dx_rows(team, b);
  if (problem.form == RoutingForm::kGrouped) {
    zero_unowned(problem, b.kernels, metadata, args.dx);
  } else {
    sum_tokens(team, {&problem, &b.kernels, &metadata, b.shared, nullptr, args.dx});
  }
}

}  // namespace sonicmoe::cpu
