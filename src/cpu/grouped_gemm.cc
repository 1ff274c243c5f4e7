// The grouped GEMMs of the public interface, on the engine of the layer.
#include <algorithm>

#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {
namespace {

/// The caller's offsets, each clamped to [0, R]. Expert e has rows [offsets[e], offsets[e + 1]),
/// and no rows if offsets[e + 1] < offsets[e].
class Offsets {
 public:
  Offsets(const Tensor& t, std::int64_t rows) : values_(static_cast<std::size_t>(t.shape[0])) {
    const auto* data = static_cast<const std::int64_t*>(t.data);
    for (std::int64_t e = 0; e < t.shape[0]; ++e) {
      values_[e] = std::clamp<std::int64_t>(data[e * t.stride[0]], 0, rows);
      if (e > 0) taken_ += std::max<std::int64_t>(values_[e] - values_[e - 1], 0);
    }
  }

  const std::vector<std::int64_t>& values() const { return values_; }
  RowTask rows(std::int64_t expert) const {
    return {expert, values_[expert], std::max(values_[expert], values_[expert + 1])};
  }
  /// Rows of all experts; a row that two experts have counts twice.
  std::int64_t taken() const { return taken_; }
  /// No row has two experts.
  bool ascend() const { return std::is_sorted(values_.begin(), values_.end()); }

 private:
  std::vector<std::int64_t> values_;
  std::int64_t taken_ = 0;
};

/// The caller's row indices, clamped to the rows of a. They are copied if they are strided or out
/// of range, else read in place. If a has no rows they are not read.
class Gather {
 public:
  Gather(const Tensor& t, std::int64_t source_rows)
      : data_(static_cast<const std::int32_t*>(t.data)) {
    if (data_ == nullptr || source_rows == 0) return;
    const auto last = static_cast<std::int32_t>(source_rows - 1);
    const auto within = [last](std::int32_t row) { return row >= 0 && row <= last; };
    if (t.stride[0] == 1 && std::all_of(data_, data_ + t.shape[0], within)) return;
    copy_.resize(static_cast<std::size_t>(t.shape[0]));
    for (std::int64_t i = 0; i < t.shape[0]; ++i) {
      copy_[i] = std::clamp(data_[i * t.stride[0]], 0, last);
    }
    data_ = copy_.data();
  }
  const std::int32_t* data() const { return data_; }

 private:
  const std::int32_t* data_;
  std::vector<std::int32_t> copy_;
};

/// Rows that can be computed: none if `a` has no rows to gather from.
std::int64_t served_rows(const Tensor& a, std::int64_t rows) { return a.shape[0] == 0 ? 0 : rows; }

}  // namespace

void grouped_gemm_on(Isa isa, const GroupedGemm& args, const Exec& exec) {
  const Tensor& d = args.d;
  const Offsets offsets(args.offsets, served_rows(args.a, d.shape[0]));
  if (offsets.taken() == 0) return;
  const Gather gather(args.gather, args.a.shape[0]);
  const Kernels& k = kernels(args.a.dtype, isa);
  const RowGemm gemm{&k,
                     rows_of(args.a, gather.data()),
                     {expert_matrix(args.b), {}},
                     1,
                     1,
                     args.b.shape[1],
                     args.b.shape[2]};
  // If ranges of experts overlap, several tasks write the same rows. One thread then computes them,
  // in the order of the experts.
  const double flops =
      2.0 * static_cast<double>(offsets.taken()) * static_cast<double>(gemm.n * gemm.seg_k);
  Team team(offsets.ascend() ? thread_count(exec, flops) : 1);
  const auto tasks = one_group(offsets.values(), team.size()).tasks;
  PerWorker<RowGemmWorker> workers(team, gemm);
  team.run(std::ssize(tasks), [&](std::int64_t task, std::int32_t worker) {
    workers[worker].run(
        tasks[task], [](const RowTile&) {},
        [&](const RowTile& tile) {
          StoreTile t{.tile = tile.acc[0]};
          t.out = at_element(d.data, tile.row * d.stride[0] + tile.col * d.stride[1],
                             dtype_bytes(d.dtype));
          t.row_stride = d.stride[0];
          t.col_stride = d.stride[1];
          kernels(d.dtype, isa).store_tile(t);
        });
  });
}

void grouped_gemm_k_on(Isa isa, const GroupedGemmK& args, const Exec& exec) {
  const Tensor& d = args.d;
  const Offsets offsets(args.offsets, served_rows(args.a, args.b.shape[0]));
  const Gather gather(args.gather, args.a.shape[0]);
  const Kernels& k = kernels(args.a.dtype, isa);
  const ColGemm gemm{&k,
                     rows_of(args.a, gather.data()),
                     rows_of(args.b, nullptr),
                     1,
                     args.a.shape[1],
                     args.b.shape[1]};
  const double flops =
      2.0 * static_cast<double>(offsets.taken()) * static_cast<double>(gemm.m * gemm.n);
  Team team(thread_count(exec, flops));
  const auto tasks = split_cols(gemm, 0, d.shape[0]);
  PerWorker<ColGemmWorker> workers(team, gemm);
  team.run(std::ssize(tasks), [&](std::int64_t task, std::int32_t worker) {
    const ColTask& c = tasks[task];
    workers[worker].run(
        c, offsets.rows(c.expert), [](const ColTile&) {},
        [&](const ColTile& tile) {
          StoreTile t{.tile = tile.acc};
          const std::int64_t at =
              c.expert * d.stride[0] + tile.row * d.stride[1] + tile.col * d.stride[2];
          t.out = at_element(d.data, at, dtype_bytes(d.dtype));
          t.row_stride = d.stride[1];
          t.col_stride = d.stride[2];
          kernels(d.dtype, isa).store_tile(t);
        });
  });
}

}  // namespace sonicmoe::cpu
