// Backward of low-rank factors: the inner rows Q, U' and V, and the gradients of the factors.
#pragma once

#include <algorithm>
#include <optional>

#include "cpu/low_rank.h"
#include "cpu/moe_backward.h"

namespace sonicmoe::cpu {

/// The inner rows and the gradients of factors. A member is empty if nothing needs it.
class LowRankBackward {
 public:
  LowRankBackward(Team& team, const Backward& b) {
    const Problem& p = b.problem;
    const LowRank& up = b.args.lora_grads.up;
    const LowRank& down = b.args.lora_grads.down;
    if (p.down_rank > 0 && (b.wants_dh() || b.wants_scaled() || b.args.dweights.data != nullptr)) {
      q_.emplace(team, describe_q(b));
    }
    if (down.b.data != nullptr) u_.emplace(team, describe_u(b));
    if (p.up_rank > 0 && (b.args.dx.data != nullptr || up.a.data != nullptr)) {
      v_.emplace(team, describe_v(b));
    }
    using Grads = std::array<Tensor, 2>;
    if (down.a.data != nullptr) down_a_.emplace(team, b, describe_down_a(b), Grads{down.a, {}});
    if (down.b.data != nullptr) down_b_.emplace(team, b, describe_down_b(b), Grads{down.b, {}});
    if (up.a.data != nullptr) up_a_.emplace(team, b, describe_up_a(b), Grads{up.a, {}});
    if (up.b.data != nullptr || up.gate_b.data != nullptr) {
      up_b_.emplace(team, b, describe_up_b(b), Grads{b.gates() == 2 ? up.gate_b : up.b, up.b});
    }
  }

  /// The most tasks of an expert in any phase.
  static std::int64_t tiles(const Backward& b) {
    std::int64_t most = 0;
    if (b.problem.down_rank > 0) {
      most = std::max(col_tasks(describe_down_a(b)), col_tasks(describe_down_b(b)));
    }
    if (b.problem.up_rank == 0) return most;
    return std::max({most, col_tasks(describe_up_a(b)), col_tasks(describe_up_b(b))});
  }
  /// Before dH of a group: Q.
  void before_dh(const ExpertGroup& group) { run(q_, group); }
  /// After dH of a group: U', V, and the gradients of the factors.
  void after_dh(const ExpertGroup& group) {
    run(u_, group);
    run(v_, group);
    run(down_a_, group);
    run(down_b_, group);
    run(up_a_, group);
    run(up_b_, group);
  }

 private:
  template <class Kernel>
  static void run(std::optional<Kernel>& kernel, const ExpertGroup& group) {
    if (kernel) kernel->run(group);
  }
  static InnerRowsJob describe_q(const Backward& b) {
    return of_down(b, b.dout_rows(), transposed_expert_matrix(b.lora.down.b), b.problem.hidden,
                   b.q);
  }
  static InnerRowsJob describe_u(const Backward& b) {
    const std::int64_t n = b.problem.width;
    return of_down(b, dense_rows(b.scaled, n), expert_matrix(b.lora.down.a), n, b.u);
  }
  /// out = r(scale * rows * factor), of the down-projection; `depth` columns of rows are summed.
  static InnerRowsJob of_down(const Backward& b, const Operand& rows, const ExpertMatrix& factor,
                              std::int64_t depth, void* out) {
    return {
        {&b.kernels, rows, {factor, {}}, 1, 1, b.problem.down_rank, depth}, b.lora.down.scale, out};
  }
  static InnerRowsJob describe_v(const Backward& b) {
    const LowRank& up = b.lora.up;
    const Problem& p = b.problem;
    return {{&b.kernels,
             dense_rows(b.dh, b.gates() * p.width),
             {transposed_expert_matrix(b.gates() == 2 ? up.gate_b : up.b),
              transposed_expert_matrix(up.b)},
             1,
             b.gates(),
             p.up_rank,
             p.width},
            up.scale,
            b.v};
  }
  static ColGemm describe_down_a(const Backward& b) {
    const Problem& p = b.problem;
    return {&b.kernels, inner_rows(b.q, p.down_rank), dense_rows(b.scaled, p.width), 1, p.down_rank,
            p.width};
  }
  static ColGemm describe_down_b(const Backward& b) {
    const Problem& p = b.problem;
    return {&b.kernels, b.dout_rows(), inner_rows(b.u, p.down_rank), 1, p.hidden, p.down_rank};
  }
  static ColGemm describe_up_a(const Backward& b) {
    const Problem& p = b.problem;
    return {&b.kernels, inner_rows(b.v, p.up_rank), b.x_rows(), 1, p.up_rank, p.hidden};
  }
  static ColGemm describe_up_b(const Backward& b) {
    const Problem& p = b.problem;
    return {&b.kernels,
            dense_rows(b.dh, b.gates() * p.width),
            inner_rows(b.p, p.up_rank, true),
            b.gates(),
            p.width,
            p.up_rank};
  }

  std::optional<InnerRows> q_, u_, v_;
  std::optional<WeightGradient> down_a_, down_b_, up_a_, up_b_;
};

}  // namespace sonicmoe::cpu
