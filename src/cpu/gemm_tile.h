// The register-tiled product, and the epilogues without an activation, as templates over the
// storage type and the kind of multiplication. Included by gemm_<isa>.cc through gemm_table.h.
#pragma once

#include "cpu/gemm_pack.h"

namespace sonicmoe::cpu::SONICMOE_ISA {

/// The product tile of an instruction set: kRows rows of kVectors vectors of accumulators.
struct TileShape {
#if defined(__AVX512F__)
  static constexpr int kRows = 14;  // of 32 registers: 28 accumulators, 2 of b, 1 of a
#elif defined(__AVX2__)
  static constexpr int kRows = 6;  // of 16 registers: 12 accumulators, 2 of b, 1 of a
#else
  static constexpr int kRows = 4;
#endif
  static constexpr int kVectors = 2;
};

template <class Dot>
inline constexpr std::int64_t kTileCols =
    TileShape::kVectors * static_cast<std::int64_t>(kVectorBytes / sizeof(typename Dot::Acc));

template <class Dot, int kRows>
void product_rows(const ProductJob& job) {
  using V = typename Dot::V;
  using Acc = typename Dot::Acc;
  constexpr int kVectors = TileShape::kVectors;
  constexpr std::int64_t kLanes = kTileCols<Dot> / kVectors;
  Acc* tile = static_cast<Acc*>(job.tile);
  V sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      sum[i][j] = job.start == Start::kAdd ? load(tile + i * kTileCols<Dot> + j * kLanes) : V{};
    }
  }
  const auto* a = static_cast<const typename Dot::Packed*>(job.a);
  const auto* b = static_cast<const typename Dot::Packed*>(job.b);
  for (std::int64_t k = 0; k < job.k_groups; ++k) {
    const auto b0 = Dot::load(b);
    const auto b1 = Dot::load(b + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const auto x = Dot::broadcast(a + i);
      sum[i][0] = Dot::madd(x, b0, sum[i][0]);
      sum[i][1] = Dot::madd(x, b1, sum[i][1]);
    }
    a += TileShape::kRows;
    b += kTileCols<Dot>;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) store(tile + i * kTileCols<Dot> + j * kLanes, sum[i][j]);
  }
}

/// Calls the instance for job.rows, so that absent rows are not multiplied.
template <class Dot, int kRows = TileShape::kRows>
void product(const ProductJob& job) {
  if constexpr (kRows > 1) {
    if (job.rows < kRows) return product<Dot, kRows - 1>(job);
  }
  product_rows<Dot, kRows>(job);
}

template <class S>
void store_tile(const StoreTile& t) {
  using V = typename Lane<S>::V;
  using Acc = typename Lane<S>::Acc;
  for (std::int64_t r = 0; r < t.tile.rows; ++r) {
    const Acc* acc = static_cast<const Acc*>(t.tile.values) + r * t.tile.stride;
    const std::int64_t row = t.index != nullptr ? t.index[r] : r;
    S* out = static_cast<S*>(t.out) + row * t.row_stride;
    const V scale = splat(t.scale != nullptr ? static_cast<Acc>(t.scale[r]) : Acc(1));
    for (std::int64_t c = 0; c < t.tile.cols; c += Lane<S>::kCount) {
      const std::int64_t n = t.tile.cols - c;
      V v = load_n(acc + c, n);
      if (t.bias != nullptr) v += load_n(static_cast<const Acc*>(t.bias) + c, n);
      if (t.scale != nullptr) v *= scale;
      if (t.col_stride == 1) {
        if (t.mode == StoreMode::kAdd) v += load_n(out + c, n);
        store_n(out + c, v, n);
        continue;
      }
      S lanes[Lane<S>::kCount];
      store(lanes, v);
      for (std::int64_t i = 0; i < n && i < Lane<S>::kCount; ++i) {
        S* element = out + (c + i) * t.col_stride;
        if (t.mode == StoreMode::kAdd) {
          const V sum = load_n(element, 1) + v[i];
          store_n(element, sum, 1);
        } else {
          *element = lanes[i];
        }
      }
    }
  }
}

template <class S>
void sum_rows(const SumJob& job) {
  using V = typename Lane<S>::V;
  using Acc = typename Lane<S>::Acc;
  const S* rows = static_cast<const S*>(job.rows);
  S* out = static_cast<S*>(job.out);
  for (std::int64_t c = 0; c < job.cols; c += Lane<S>::kCount) {
    const std::int64_t n = job.cols - c;
    V sum{};
    for (std::int64_t i = 0; i < job.count; ++i) {
      const V v = load_n(rows + job.index[i] * job.row_stride + c, n);
      sum = job.weight != nullptr ? fma(v, splat(static_cast<Acc>(job.weight[i])), sum) : sum + v;
    }
    if (job.out_stride == 1) {
      store_n(out + c, sum, n);
      continue;
    }
    S lanes[Lane<S>::kCount];
    store(lanes, sum);
    for (std::int64_t i = 0; i < n && i < Lane<S>::kCount; ++i) {
      out[(c + i) * job.out_stride] = lanes[i];
    }
  }
}

template <class S>
inline typename Lane<S>::V load_strided(const S* p, std::int64_t stride, std::int64_t n) {
  if (stride == 1) return load_n(p, n);
  S lanes[Lane<S>::kCount] = {};
  for (std::int64_t i = 0; i < n && i < Lane<S>::kCount; ++i) lanes[i] = p[i * stride];
  return load(lanes);
}

template <class S>
void column_sum(const ColumnSumJob& job) {
  using V = typename Lane<S>::V;
  using Acc = typename Lane<S>::Acc;
  Acc* out = static_cast<Acc*>(job.sum);
  const std::int64_t stride = job.source.col_stride;
  for (std::int64_t r = 0; r < job.rows; ++r) {
    const S* row =
        static_cast<const S*>(job.source.data) + element_offset(job.source, job.row0 + r, 0);
    const V scale = splat(job.scale != nullptr ? static_cast<Acc>(job.scale[r]) : Acc(1));
    for (std::int64_t c = 0; c < job.cols; c += Lane<S>::kCount) {
      const std::int64_t n = job.cols - c;
      const V v = load_strided(row + c * stride, stride, n);
      store_n(out + c, fma(v, scale, load_n(out + c, n)), n);
    }
  }
}

template <class S>
double dot(const void* a, std::int64_t stride, const void* b, std::int64_t n) {
  using Acc = typename Lane<S>::Acc;
  typename Lane<S>::V sum{};
  for (std::int64_t c = 0; c < n; c += Lane<S>::kCount) {
    const auto x = load_strided(static_cast<const S*>(a) + c * stride, stride, n - c);
    sum = fma(x, load_n(static_cast<const Acc*>(b) + c, n - c), sum);
  }
  return sum_lanes(sum);
}

template <class S>
void widen(const void* source, std::int64_t stride, std::int64_t n, void* out) {
  using Acc = typename Lane<S>::Acc;
  for (std::int64_t c = 0; c < n; c += Lane<S>::kCount) {
    store_n(static_cast<Acc*>(out) + c,
            load_strided(static_cast<const S*>(source) + c * stride, stride, n - c), n - c);
  }
}

}  // namespace sonicmoe::cpu::SONICMOE_ISA
