#include "cpu/low_rank.h"

#include <algorithm>

#include "core/numeric.h"

namespace sonicmoe::cpu {
namespace {

bool rounds_factors(const Problem& p) { return p.f32_factors && p.dtype != DType::kF32; }

/// The factors of one projection in the order in which rounded_factors() places them.
constexpr Tensor LowRank::* kParts[] = {&LowRank::a, &LowRank::gate_b, &LowRank::b};
constexpr LowRank Lora::* kProjections[] = {&Lora::up, &Lora::down};

std::int64_t elements(const Tensor& t) { return t.shape[0] * t.shape[1] * t.shape[2]; }

template <class T>
void round_expert(const Tensor& from, const Tensor& to, std::int64_t e) {
  const auto* source = static_cast<const float*>(from.data) + e * from.stride[0];
  T* out = static_cast<T*>(to.data) + e * to.stride[0];
  for (std::int64_t i = 0; i < to.shape[1]; ++i) {
    for (std::int64_t j = 0; j < to.shape[2]; ++j) {
      *out++ = from_float<T>(source[i * from.stride[1] + j * from.stride[2]]);
    }
  }
}

}  // namespace

std::int64_t rounded_factors_bytes(const Problem& p) {
  if (!rounds_factors(p)) return 0;
  const std::int64_t up = p.up_rank * (p.hidden + gate_factor(p.activation.kind) * p.width);
  return p.experts * (up + p.down_rank * (p.hidden + p.width)) * dtype_bytes(p.dtype);
}

Lora rounded_factors(const Problem& p, const Lora& lora, void* memory) {
  if (!rounds_factors(p)) return lora;
  Lora views = lora;
  auto* next = static_cast<std::byte*>(memory);
  for (const auto projection : kProjections) {
    for (const auto part : kParts) {
      Tensor& t = views.*projection.*part;
      if (t.data == nullptr) continue;
      t = tensor3(next, p.dtype, t.shape[0], t.shape[1], t.shape[2]);
      next += elements(t) * dtype_bytes(p.dtype);
    }
  }
  return views;
}

void round_factors(Team& team, const Problem& p, const Lora& lora, const Lora& rounded) {
  if (!rounds_factors(p)) return;
  team.run(p.experts, [&](std::int64_t e, std::int32_t) {
    for (const auto projection : kProjections) {
      for (const auto part : kParts) {
        const Tensor& to = rounded.*projection.*part;
        if (to.data == nullptr) continue;
        const auto round = to.dtype == DType::kBF16 ? round_expert<BF16> : round_expert<F16>;
        round(lora.*projection.*part, to, e);
      }
    }
  });
}

Operand inner_rows(const void* data, std::int64_t rank, bool all_rows) {
  return {data, nullptr, rank, 1, all_rows};
}

InnerRows::InnerRows(Team& team, const InnerRowsJob& job)
    : team_(team), job_(job), workers_(team, job.gemm) {
  std::fill_n(scales_, kMostTileRows, job.scale);
}

void InnerRows::run(const ExpertGroup& group) {
  team_.run(std::ssize(group.tasks), [&](std::int64_t task, std::int32_t worker) {
    workers_[worker].run(
        group.tasks[task], [](const RowTile&) {},
        [&](const RowTile& tile) { finish(tile, job_.all_rows ? 0 : group.begin); });
  });
}

void InnerRows::finish(const RowTile& tile, std::int64_t origin) const {
  const Kernels& k = *job_.gemm.kernels;
  StoreTile t{.tile = tile.acc[0], .scale = scales_};
  const std::int64_t rank = job_.gemm.n;
  t.out = at_element(job_.out, (tile.row - origin) * rank + tile.col, k.element_bytes);
  t.row_stride = rank;
  k.store_tile(t);
}

}  // namespace sonicmoe::cpu
