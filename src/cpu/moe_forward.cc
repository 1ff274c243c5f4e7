// The forward pass: kernels A, Y and O of docs/method.md.
#include <algorithm>
#include <optional>

#include "core/fp8_layout.h"
#include "cpu/fp8.h"
#include "cpu/low_rank.h"
#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {
namespace {

struct Forward {
  const Problem& problem;
  const ForwardArgs& args;
  const Kernels& kernels;
  const Metadata metadata;
  // Operands of the products. kTensors: those of `args`. kFp8: the same tensors quantised and
  // restored to bf16, in scratch.
  Tensor x;
  Weights weights;
  void* h;  ///< null: inference, H is not kept
  void* a;  ///< A of the current group of experts
  void* y;
  Lora lora;  ///< factors in the dtype
  void* p;    ///< P of all groups
  void* u;    ///< U of the current group of experts

  std::int64_t gates() const { return gate_factor(problem.activation.kind); }
};

/// H = r(X W1^T + b1) and A = r(act(H)). Gate and up are two outputs of one product.
class KernelA {
 public:
  KernelA(Team& team, const Forward& f)
      : team_(team), f_(f), gemm_(describe(f)), workers_(team, gemm_) {}

  void run(const ExpertGroup& group) {
    team_.run(std::ssize(group.tasks), [&](std::int64_t task, std::int32_t worker) {
      const std::int64_t origin = group.begin;
      workers_[worker].run(
          group.tasks[task], [&](const RowTile& tile) { prepare(tile, origin); },
          [&](const RowTile& tile) { finish(tile, origin); });
    });
  }

 private:
  static RowGemm describe(const Forward& f) {
    const Problem& p = f.problem;
    const Weights& w = f.weights;
    RowGemm gemm{&f.kernels, rows_of(f.x, f.metadata.row_token), {}, f.gates(), 1, p.width,
                 p.hidden};
    gemm.matrices[0] = expert_matrix(f.gates() == 2 ? w.gate : w.up);
    gemm.matrices[1] = expert_matrix(w.up);
    if (p.up_rank == 0) return gemm;
    const LowRank& up = f.lora.up;
    gemm.term = {inner_rows(f.p, p.up_rank, true),
                 {expert_matrix(f.gates() == 2 ? up.gate_b : up.b), expert_matrix(up.b)},
                 p.up_rank};
    return gemm;
  }

  void* a_at(const RowTile& tile, std::int64_t origin) const {
    return at_element(f_.a, (tile.row - origin) * f_.problem.width + tile.col,
                      f_.kernels.element_bytes);
  }
  /// The address in H of the tile's gate columns (half 0) or up columns (the last half).
  void* h_at(const RowTile& tile, std::int64_t half) const {
    const std::int64_t n = f_.problem.width;
    return at_element(f_.h, (tile.row * f_.gates() + half) * n + tile.col,
                      f_.kernels.element_bytes);
  }

  void prepare(const RowTile& tile, std::int64_t origin) const {
    const Tile& acc = tile.acc[0];
    const std::int64_t bytes = acc.cols * f_.kernels.element_bytes;
    const std::int64_t stride = f_.problem.width * f_.kernels.element_bytes;
    prefetch_rows(a_at(tile, origin), acc.rows, stride, bytes);
    if (f_.h == nullptr) return;
    for (std::int64_t half = 0; half < f_.gates(); ++half) {
      prefetch_rows(h_at(tile, half), acc.rows, f_.gates() * stride, bytes);
    }
  }

  void finish(const RowTile& tile, std::int64_t origin) const {
    const Weights& w = f_.weights;
    const Tile& up = tile.acc[f_.gates() - 1];
    BiasTile gate_bias;
    BiasTile up_bias;
    ForwardTile t{.activation = f_.problem.activation, .gate = tile.acc[0], .up = up};
    t.up_bias = up_bias.load(f_.kernels, w.b_up, tile.expert, tile.col, up.cols);
    if (f_.gates() == 2) {
      t.gate_bias = gate_bias.load(f_.kernels, w.b_gate, tile.expert, tile.col, up.cols);
    }
    if (f_.h != nullptr) {
      t.h_gate = h_at(tile, 0);
      t.h_up = h_at(tile, f_.gates() - 1);
    }
    t.h_stride = f_.gates() * f_.problem.width;
    t.a = a_at(tile, origin);
    t.a_stride = f_.problem.width;
    f_.kernels.forward_tile(t);
  }

  Team& team_;
  const Forward& f_;
  const RowGemm gemm_;
  PerWorker<RowGemmWorker> workers_;
};

/// Y = r(A W2^T + b2). Grouped rows are scaled before the rounding and go to the output.
class KernelY {
 public:
  KernelY(Team& team, PerWorker<RowBuffers>& buffers, const Forward& f)
      : team_(team),
        buffers_(buffers),
        f_(f),
        grouped_(f.problem.form == RoutingForm::kGrouped),
        y_(grouped_ ? f.args.out
                    : tensor2(f.y, f.problem.dtype, row_capacity(f.problem), f.problem.hidden)),
        gemm_{&f.kernels,
              dense_rows(f.a, f.problem.width),
              {expert_matrix(f.weights.down), {}},
              1,
              1,
              f.problem.hidden,
              f.problem.width,
              {inner_rows(f.u, f.problem.down_rank),
               {expert_matrix(f.lora.down.b), {}},
               f.problem.down_rank}},
        workers_(team, gemm_) {}

  void run(const ExpertGroup& group) {
    team_.run(std::ssize(group.tasks), [&](std::int64_t task, std::int32_t worker) {
      const RowTask& rows = group.tasks[task];
      const Tensor& weights = f_.args.routing.weights;
      const double* scores = nullptr;
      if (grouped_ && weights.data != nullptr) {
        double* memory = buffers_[worker].scores();
        load_scores(f_.problem, f_.metadata, weights, rows.begin, rows.end, memory);
        scores = memory;
      }
      workers_[worker].run(
          rows, [&](const RowTile& tile) { prefetch_row_tile(f_.kernels, y_, tile); },
          [&](const RowTile& tile) {
            finish(tile, scores == nullptr ? nullptr : scores + (tile.row - rows.begin));
          });
    });
  }

 private:
  void finish(const RowTile& tile, const double* scale) const {
    BiasTile bias;
    StoreTile t = row_store(f_.kernels, y_, tile);
    t.bias = bias.load(f_.kernels, f_.args.weights.b_down, tile.expert, tile.col, t.tile.cols);
    t.scale = scale;
    if (grouped_) scatter(f_.kernels, y_, f_.metadata.row_token, tile, t);
    f_.kernels.store_tile(t);
  }

  Team& team_;
  PerWorker<RowBuffers>& buffers_;
  const Forward& f_;
  const bool grouped_;
  const Tensor y_;
  const RowGemm gemm_;
  PerWorker<RowGemmWorker> workers_;
};

/// P = r(scale X A_u^T), from x as the caller gave it, also in fp8.
InnerRowsJob describe_p(const Forward& f) {
  const Problem& p = f.problem;
  const LowRank& up = f.lora.up;
  return {{&f.kernels,
           rows_of(f.args.x, f.metadata.row_token),
           {expert_matrix(up.a), {}},
           1,
           1,
           p.up_rank,
           p.hidden},
          up.scale,
          f.p,
          true};
}
/// U = r(scale A A_d^T), from A before it is quantised.
InnerRowsJob describe_u(const Forward& f) {
  const Problem& p = f.problem;
  const LowRank& down = f.lora.down;
  return {{&f.kernels,
           dense_rows(f.a, p.width),
           {expert_matrix(down.a), {}},
           1,
           1,
           p.down_rank,
           p.width},
          down.scale,
          f.u};
}

/// Precision::kFp8: quantises and restores (cpu/fp8.h) the operands of the products, and quantises
/// the kept H.
class Fp8Forward {
 public:
  Fp8Forward(Team& team, const Forward& f) : team_(team), f_(f) {}

  /// Before all products: writes the restored X and weights to Forward::x and Forward::weights.
  void before() {
    const Problem& p = f_.problem;
    quantise_rows(team_, {.source = rows_of(f_.args.x, nullptr),
                          .rows = p.tokens,
                          .width = p.hidden,
                          .restored = f_.x.data});
    restore_weights(team_, p, f_.args.fp8_weights, f_.weights);
  }
  /// Between A and Y of a group of experts: quantises and restores A in place. If codes of H are
  /// kept, it also quantises the group's H into the caller's buffer.
  void between(const ExpertGroup& group) {
    const Problem& p = f_.problem;
    const std::int64_t rows = group.end - group.begin;
    quantise_rows(
        team_,
        {.source = dense_rows(f_.a, p.width), .rows = rows, .width = p.width, .restored = f_.a});
    if (f_.h == nullptr || !fp8::keeps_codes(p)) return;
    const std::int64_t depth = f_.gates() * p.width;
    const void* first = at_element(f_.h, group.begin * depth, f_.kernels.element_bytes);
    quantise_rows(team_, {.source = dense_rows(first, depth),
                          .rows = rows,
                          .width = p.width,
                          .parts = f_.gates(),
                          .coded = kept_h_rows(p, f_.args.h),
                          .coded_row = group.begin});
  }

 private:
  Team& team_;
  const Forward& f_;
};

Forward forward_of(Isa isa, const Problem& p, const ForwardArgs& args) {
  const bool training = args.saved.data != nullptr;
  const ForwardScratch at = forward_scratch(p, training ? Pass::kForward : Pass::kInference);
  Forward f{p,
            args,
            kernels(p.dtype, isa),
            metadata_at(p, training ? args.saved.data : at_byte(args.scratch, at.metadata)),
            args.x,
            args.weights,
            args.h.data,
            at_byte(args.scratch, at.a),
            at_byte(args.scratch, at.y),
            rounded_factors(p, args.lora, at_byte(args.scratch, at.factors)),
            training ? at_byte(args.saved, saved_p(p)) : at_byte(args.scratch, at.p),
            at_byte(args.scratch, at.u)};
  if (p.precision == Precision::kTensors) return f;
  f.x = tensor2(at_byte(args.scratch, at.x), p.dtype, p.tokens, p.hidden);
  f.weights = restored_weights(p, args.weights, at_byte(args.scratch, at.weights));
  if (training && fp8::keeps_codes(p)) f.h = at_byte(args.scratch, at.h);
  return f;
}

}  // namespace

void moe_forward_on(Isa isa, const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  const Forward f = forward_of(isa, problem, args);
  const Kernels& k = f.kernels;

  // Everything that allocates. The caller's buffers are written only after this.
  const std::int64_t rows = count_rows(problem, args.routing);
  const double flops =
      6.0 * static_cast<double>(rows) * static_cast<double>(problem.hidden * problem.width);
  Team team(thread_count(exec, flops),
            std::max(most_row_tasks(rows, problem.experts), token_tasks(problem)));
  PerWorker<RowBuffers> buffers(team, problem, k);
  KernelA up(team, f);
  KernelY down(team, buffers, f);
  std::optional<InnerRows> inner_p, inner_u;
  if (problem.up_rank > 0) inner_p.emplace(team, describe_p(f));
  if (problem.down_rank > 0) inner_u.emplace(team, describe_u(f));
  ExpertGroups groups = expert_groups(problem, rows, team.size());
  const bool fp8 = problem.precision == Precision::kFp8;
  Fp8Forward quantised(team, f);

  observed(exec, "metadata", [&] { build_metadata(problem, args.routing, f.metadata); });
  prefer_large_pages(args.h);
  prefer_large_pages(args.scratch);
  prefer_large_pages(args.out);
  if (fp8) observed(exec, "quantise", [&] { quantised.before(); });
  round_factors(team, problem, args.lora, f.lora);
  const auto run = [&](const char* name, auto& kernel, const ExpertGroup& group) {
    if (kernel) observed(exec, name, [&] { kernel->run(group); });
  };
  while (const ExpertGroup* group = groups.next(f.metadata.expert_offsets(problem))) {
    run("P", inner_p, *group);
    observed(exec, "A", [&] { up.run(*group); });
    run("U", inner_u, *group);
    if (fp8) observed(exec, "quantise", [&] { quantised.between(*group); });
    observed(exec, "Y", [&] { down.run(*group); });
  }
  observed(exec, "O", [&] {
    if (problem.form == RoutingForm::kGrouped) {
      zero_unowned(problem, k, f.metadata, args.out);
    } else {
      sum_tokens(team, buffers, {&problem, &k, &f.metadata, f.y, &args.routing.weights, args.out});
    }
  });
}

}  // namespace sonicmoe::cpu
