// Kernels A, Y and O.
#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {
namespace {

struct Forward {
  const Problem& problem;
  const ForwardArgs& args;
  const Kernels& kernels;
  const Metadata metadata;
  std::span<const RowTask> tasks;
  void* a;
  void* y;
};

/// H = r(X W1^T + b1), A = r(act(H)), gate and up side by side.
void kernel_a(Team& team, const Forward& f) {
  const Problem& p = f.problem;
  const Weights& w = f.args.weights;
  const Kernels& k = f.kernels;
  const std::int64_t gates = gate_factor(p.activation.kind);
  RowGemm gemm{&k, rows_of(f.args.x, f.metadata.row_token), {}, gates, 1, p.width, p.hidden};
  gemm.matrices[0] = expert_matrix(gates == 2 ? w.gate : w.up);
  gemm.matrices[1] = expert_matrix(w.up);
  Workers<RowGemmWorker, RowGemm> workers(team, gemm);
  team.run(std::ssize(f.tasks), [&](std::int64_t task, std::int32_t worker) {
    BiasTile gate_bias;
    BiasTile up_bias;
    const auto prepare = [&](const RowTile& tile) {
      const Tile& up = tile.acc[0];
      const std::int64_t bytes = up.cols * k.element_bytes;
      const std::int64_t stride = p.width * k.element_bytes;
      prefetch_rows(at_element(f.a, tile.row * p.width + tile.col, k.element_bytes), up.rows,
                    stride, bytes);
      if (f.args.h.data == nullptr) return;
      const std::int64_t h_at = tile.row * gates * p.width + tile.col;
      for (std::int64_t g = 0; g < gates; ++g) {
        prefetch_rows(at_element(f.args.h.data, h_at + g * p.width, k.element_bytes), up.rows,
                      gates * stride, bytes);
      }
    };
    workers[worker].run(f.tasks[task], prepare, [&](const RowTile& tile) {
      const Tile& up = tile.acc[gates - 1];
      const std::int64_t h_at = tile.row * gates * p.width + tile.col;
      ForwardTile t{.activation = p.activation, .gate = tile.acc[0], .up = up};
      t.up_bias = up_bias.load(k, w.b_up, tile.expert, tile.col, up.cols);
      if (gates == 2) t.gate_bias = gate_bias.load(k, w.b_gate, tile.expert, tile.col, up.cols);
      if (f.args.h.data != nullptr) {
        t.h_gate = at_element(f.args.h.data, h_at, k.element_bytes);
        t.h_up = at_element(f.args.h.data, h_at + (gates - 1) * p.width, k.element_bytes);
      }
      t.h_stride = gates * p.width;
      t.a = at_element(f.a, tile.row * p.width + tile.col, k.element_bytes);
      t.a_stride = p.width;
      k.forward_tile(t);
    });
  });
}

/// Y = r(A W2^T + b2); grouped rows are scaled before that rounding and are the output.
void kernel_y(Team& team, const Forward& f) {
  const Problem& p = f.problem;
  const Weights& w = f.args.weights;
  const Kernels& k = f.kernels;
  const bool grouped = p.form == RoutingForm::kGrouped;
  const Tensor y = grouped ? f.args.out : tensor2(f.y, p.dtype, row_capacity(p), p.hidden);
  RowGemm gemm{&k, dense_rows(f.a, p.width), {expert_matrix(w.down), {}}, 1, 1, p.hidden, p.width};
  Workers<RowGemmWorker, RowGemm> workers(team, gemm);
  team.run(std::ssize(f.tasks), [&](std::int64_t task, std::int32_t worker) {
    BiasTile bias;
    std::vector<double> scores;
    const RowTask& rows = f.tasks[task];
    if (grouped && f.args.routing.weights.data != nullptr) {
      load_scores(p, f.metadata, f.args.routing.weights, rows.begin, rows.end, scores);
    }
    const auto prepare = [&](const RowTile& tile) {
      if (grouped) return;
      prefetch_rows(at_element(f.y, tile.row * p.hidden + tile.col, k.element_bytes),
                    tile.acc[0].rows, p.hidden * k.element_bytes,
                    tile.acc[0].cols * k.element_bytes);
    };
    workers[worker].run(rows, prepare, [&](const RowTile& tile) {
      StoreTile t{.tile = tile.acc[0]};
      t.bias = bias.load(k, w.b_down, tile.expert, tile.col, t.tile.cols);
      t.scale = scores.empty() ? nullptr : scores.data() + (tile.row - rows.begin);
      t.index = grouped ? f.metadata.row_token + tile.row : nullptr;
      const std::int64_t row = grouped ? 0 : tile.row;
      t.out = at_element(y.data, row * y.stride[0] + tile.col * y.stride[1], k.element_bytes);
      t.row_stride = y.stride[0];
      t.col_stride = y.stride[1];
      k.store_tile(t);
    });
  });
}

}  // namespace

void moe_forward_on(Isa isa, const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  const bool training = args.saved.data != nullptr;
  const ForwardScratch scratch =
      forward_scratch(problem, training ? Pass::kForward : Pass::kInference);
  const Kernels& k = kernels(problem.dtype, isa);
  const Metadata metadata =
      metadata_at(problem, training ? args.saved.data : at_byte(args.scratch, scratch.metadata));
  build_metadata(problem, args.routing, metadata);

  const double rows = static_cast<double>(metadata.offsets[problem.experts]);
  const double flops = 6.0 * rows * static_cast<double>(problem.hidden * problem.width);
  Team team(thread_count(exec, flops));
  const auto tasks =
      split_rows({metadata.offsets, static_cast<std::size_t>(problem.experts) + 1}, team.size());
  const Forward f{problem,
                  args,
                  k,
                  metadata,
                  tasks,
                  at_byte(args.scratch, scratch.a),
                  at_byte(args.scratch, scratch.y)};
  kernel_a(team, f);
  kernel_y(team, f);
  if (problem.form == RoutingForm::kGrouped) {
    zero_unowned(problem, k, metadata, args.out);
  } else {
    sum_tokens(team, {&problem, &k, &metadata, f.y, &args.routing.weights, args.out});
  }
}

}  // namespace sonicmoe::cpu
