// The operands of the backward pass and its products over the rows of an expert, which the layer
// and the low-rank factors use.
#pragma once

#include <array>
#include <vector>

#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {

struct Backward {
  const Problem& problem;
  const BackwardArgs& args;
  const Kernels& kernels;
  const Isa isa;
  const Metadata metadata;
  // Operands of dA' and dX~. kTensors: dO, weights and H of `args`, and dh. kFp8: quantised and
  // restored tensors in scratch; H of `args` if it is kept in bf16.
  Tensor da_rows;
  Weights weights;
  void* h;
  void* dx_operand;
  void* dh;      ///< dH of the current group of experts
  void* scaled;  ///< A' of the current group of experts
  void* dx_rows;
  Lora lora;      ///< factors in the dtype
  const void* p;  ///< P of all groups
  // Inner rows of the current group of experts.
  void* q;
  void* u;
  void* v;

  std::int64_t gates() const { return gate_factor(problem.activation.kind); }
  bool wants_dh() const {
    const Weights& g = args.grads;
    return args.dx.data != nullptr || g.gate.data != nullptr || g.up.data != nullptr ||
           g.b_gate.data != nullptr || g.b_up.data != nullptr || wants_up_factors();
  }
  bool wants_up_factors() const {
    const LowRank& g = args.lora_grads.up;
    return g.a.data != nullptr || g.b.data != nullptr || g.gate_b.data != nullptr;
  }
  bool wants_down_factors() const {
    const LowRank& g = args.lora_grads.down;
    return g.a.data != nullptr || g.b.data != nullptr;
  }
  bool wants_scaled() const { return args.grads.down.data != nullptr || wants_down_factors(); }
  bool adds() const { return args.grad_mode == GradMode::kAccumulate; }
  Operand x_rows() const { return rows_of(args.x, metadata.row_token); }
  Operand dout_rows() const { return rows_of(args.dout, metadata.row_token); }
};

/// dW2, dW1 or gradients of factors: grads[s] (E, m, n) = the sum over rows of columns [s*m,
/// (s+1)*m) of a times b.
class WeightGradient {
 public:
  WeightGradient(Team& team, const Backward& b, const ColGemm& gemm, std::array<Tensor, 2> grads)
      : team_(team),
        b_(b),
        gemm_(gemm),
        grads_(grads),
        tasks_(split_cols(gemm_, 0, 1)),
        workers_(team, gemm_) {}

  void run(const ExpertGroup& group) {
    const std::int64_t each = std::ssize(tasks_);
    team_.run((group.last - group.first) * each, [&](std::int64_t i, std::int32_t worker) {
      const std::int64_t e = group.first + i / each;
      ColTask task = tasks_[i % each];
      task.expert = e;
      const RowTask rows{e, b_.metadata.offsets[e], b_.metadata.offsets[e + 1], group.begin};
      if (b_.adds() && rows.begin == rows.end) return;
      workers_[worker].run(
          task, rows, [&](const ColTile& tile) { prepare(e, tile); },
          [&](const ColTile& tile) { finish(e, tile); });
    });
  }

 private:
  static void* tile_in(const Tensor& out, std::int64_t e, const ColTile& tile) {
    const std::int64_t at = e * out.stride[0] + tile.row * out.stride[1] + tile.col * out.stride[2];
    return at_element(out.data, at, dtype_bytes(out.dtype));
  }
  void prepare(std::int64_t e, const ColTile& tile) const {
    const Tensor& out = grads_[tile.segment];
    if (out.data == nullptr || out.stride[2] != 1) return;
    const std::int64_t element = dtype_bytes(out.dtype);
    prefetch_rows(tile_in(out, e, tile), tile.acc.rows, out.stride[1] * element,
                  tile.acc.cols * element);
  }
  void finish(std::int64_t e, const ColTile& tile) const {
    const Tensor& out = grads_[tile.segment];
    if (out.data == nullptr) return;
    StoreTile t{.tile = tile.acc};
    t.out = tile_in(out, e, tile);
    t.row_stride = out.stride[1];
    t.col_stride = out.stride[2];
    t.mode = b_.adds() ? StoreMode::kAdd : StoreMode::kWrite;
    kernels(out.dtype, b_.isa).store_tile(t);
  }

  Team& team_;
  const Backward& b_;
  const ColGemm gemm_;
  const std::array<Tensor, 2> grads_;
  std::vector<ColTask> tasks_;  ///< of expert 0; the tasks of other experts have the same tiles
  PerWorker<ColGemmWorker> workers_;
};

}  // namespace sonicmoe::cpu
