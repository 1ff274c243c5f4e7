// The primitive beneath the layer, on the same engine.
#include "cpu/moe_layer.h"

namespace sonicmoe::cpu {
namespace {

std::vector<std::int64_t> read_offsets(const Tensor& t) {
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(t.shape[0]));
  for (std::int64_t e = 0; e < t.shape[0]; ++e) {
    offsets[e] = static_cast<const std::int64_t*>(t.data)[e * t.stride[0]];
  }
  return offsets;
}

/// Row indices, made contiguous where the caller's are strided.
const std::int32_t* read_gather(const Tensor& t, std::vector<std::int32_t>& storage) {
  const auto* data = static_cast<const std::int32_t*>(t.data);
  if (data == nullptr || t.stride[0] == 1) return data;
  for (std::int64_t i = 0; i < t.shape[0]; ++i) storage.push_back(data[i * t.stride[0]]);
  return storage.data();
}

}  // namespace

void grouped_gemm_on(Isa isa, const GroupedGemm& args, const Exec& exec) {
  const auto offsets = read_offsets(args.offsets);
  std::vector<std::int32_t> storage;
  const std::int32_t* gather = read_gather(args.gather, storage);
  const Kernels& k = kernels(args.a.dtype, isa);
  const Tensor& d = args.d;
  const RowGemm gemm{&k,
                     rows_of(args.a, gather),
                     {expert_matrix(args.b), {}},
                     1,
                     1,
                     args.b.shape[1],
                     args.b.shape[2]};
  const double rows = static_cast<double>(offsets.back() - offsets.front());
  Team team(thread_count(exec, 2.0 * rows * static_cast<double>(gemm.n * gemm.seg_k)));
  const auto tasks = one_group(offsets, team.size()).tasks;
  Workers<RowGemmWorker, RowGemm> workers(team, gemm);
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
  const auto offsets = read_offsets(args.offsets);
  std::vector<std::int32_t> storage;
  const std::int32_t* gather = read_gather(args.gather, storage);
  const Kernels& k = kernels(args.a.dtype, isa);
  const Tensor& d = args.d;
  const ColGemm gemm{&k, rows_of(args.a, gather), rows_of(args.b, nullptr),
                     1,  args.a.shape[1],         args.b.shape[1]};
  const double rows = static_cast<double>(offsets.back() - offsets.front());
  Team team(thread_count(exec, 2.0 * rows * static_cast<double>(gemm.m * gemm.n)));
  const auto tasks = split_cols(gemm, 0, d.shape[0]);
  Workers<ColGemmWorker, ColGemm> workers(team, gemm);
  team.run(std::ssize(tasks), [&](std::int64_t task, std::int32_t worker) {
    const ColTask& c = tasks[task];
    const RowTask rows{c.expert, offsets[c.expert], offsets[c.expert + 1]};
    workers[worker].run(
        c, rows, [](const ColTile&) {},
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
