// Packs strided or gathered rows of any storage type into the panels of gemm_kernels.h. Included by
// gemm_<isa>.cc through gemm_table.h.
//
// If the lanes of a panel do not fill whole vectors (mr lanes), pack_rows may write past the end of
// the panel. So such panels are packed in ascending order of address, and AlignedMemory has room
// after the last panel. pack_cols writes only the k of its job.
#pragma once

#include <utility>

#include "cpu/gemm_kernels.h"
#include "cpu/gemm_simd.h"

namespace sonicmoe::cpu::SONICMOE_ISA {

/// Products of the accumulators' type: a packed element is one k.
template <class T>
struct PlainDot {
  using Packed = T;
  using Acc = T;
  using V = typename Lane<T>::V;
  static constexpr std::int64_t kGroup = 1;
  static V broadcast(const T* a) { return splat(*a); }
  static V load(const T* b) { return SONICMOE_ISA::load(b); }
  static V madd(V a, V b, V c) { return fma(a, b, c); }
};

#if defined(__AVX512BF16__)
/// Products of bf16 pairs: a packed element is two k, which one instruction multiplies and adds to
/// fp32. The instruction flushes denormals to zero.
struct PairDot {
  using Packed = std::uint32_t;
  using Acc = float;
  using V = F32V;
  static constexpr std::int64_t kGroup = 2;
  static U32V broadcast(const std::uint32_t* a) { return *a + U32V{}; }
  static U32V load(const std::uint32_t* b) { return load_raw<U32V>(b); }
  static V madd(U32V a, U32V b, V c) {
    return (V)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

inline float widen_one(float v) { return v; }
inline double widen_one(double v) { return v; }
inline float widen_one(BF16 v) { return to_float(v); }
inline float widen_one(F16 v) { return to_float(v); }

/// Writes value k of one lane into a panel.
template <class S, class Dot>
inline void put_value(typename Dot::Packed* panel, std::int64_t width, std::int64_t lane,
                      std::int64_t k, S value) {
  if constexpr (Dot::kGroup == 1) {
    panel[k * width + lane] = widen_one(value);
  } else {
    reinterpret_cast<S*>(panel + (k / 2) * width + lane)[k % 2] = value;
  }
}

template <class Dot>
inline std::int64_t groups_of(std::int64_t k) {
  return (k + Dot::kGroup - 1) / Dot::kGroup;
}

/// Packs element by element, for sources where neither lanes nor k are contiguous.
template <class S, class Dot>
void pack_strided(const PackJob& job, std::int64_t lane_row, std::int64_t lane_col) {
  auto* panel = static_cast<typename Dot::Packed*>(job.out);
  const S* data = static_cast<const S*>(job.source.data);
  const std::int64_t padded_k = groups_of<Dot>(job.k) * Dot::kGroup;
  for (std::int64_t lane = 0; lane < job.width; ++lane) {
    for (std::int64_t k = 0; k < padded_k; ++k) {
      S value{};
      if (lane < job.lanes && k < job.k) {
        const std::int64_t l = job.lane0 + lane;
        const std::int64_t kk = job.k0 + k;
        value = data[element_offset(job.source, lane_row * l + lane_col * kk,
                                    lane_row * kk + lane_col * l)];
      }
      put_value<S, Dot>(panel, job.width, lane, k, value);
    }
  }
}

/// Packed elements in a vector.
template <class Dot>
inline constexpr int kPackedLanes = kVectorBytes / static_cast<int>(sizeof(typename Dot::Packed));

/// The packed elements of one row from p on: n storage elements, then zeros.
template <class S, class Dot>
inline auto load_groups(const S* p, std::int64_t n) {
  if constexpr (Dot::kGroup == 1) {
    return load_n(p, n);
  } else {
    constexpr std::int64_t kCount = kVectorBytes / sizeof(S);
    if (n >= kCount) return load_raw<U32V>(p);
    S values[kCount] = {};
    for (std::int64_t i = 0; i < n; ++i) values[i] = p[i];
    return load_raw<U32V>(values);
  }
}

/// One step of transpose(): swaps the off-diagonal kBlock x kBlock blocks of two rows.
template <int kBlock, class V, int... kLane>
inline void exchange(V& upper, V& lower, std::integer_sequence<int, kLane...>) {
  constexpr int kCount = sizeof...(kLane);
  const V a = upper;
  const V b = lower;
  upper = lanes_of<((kLane & kBlock) == 0 ? kLane : kCount + kLane - kBlock)...>(a, b);
  lower = lanes_of<((kLane & kBlock) == 0 ? kLane + kBlock : kCount + kLane)...>(a, b);
}

template <int kBlock, int kCount, class V>
inline void transpose(V (&rows)[kCount]) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    if ((i & kBlock) == 0) {
      exchange<kBlock>(rows[i], rows[i + kBlock], std::make_integer_sequence<int, kCount>());
    }
  }
  if constexpr (kBlock > 1) transpose<kBlock / 2>(rows);
}

/// Packs lanes [first, first + kCount) of a panel from rows with contiguous k, by transposition.
template <class S, class Dot>
void pack_row_block(const PackJob& job, std::int64_t first) {
  constexpr int kCount = kPackedLanes<Dot>;
  using V = decltype(load_groups<S, Dot>(nullptr, 0));
  const S* rows[kCount];
  const std::int64_t lanes = job.lanes - first;
  for (int i = 0; i < kCount; ++i) {
    const std::int64_t row =
        job.lane0 + (i < lanes ? first + i : 0);  // for an absent lane, a row that exists
    rows[i] = static_cast<const S*>(job.source.data) + element_offset(job.source, row, job.k0);
  }
  auto* out = static_cast<typename Dot::Packed*>(job.out) + first;
  constexpr std::int64_t kStep = kCount * Dot::kGroup;
  for (std::int64_t k = 0; k < job.k; k += kStep, out += kCount * job.width) {
    V v[kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      v[i] = i < lanes ? load_groups<S, Dot>(rows[i] + k, job.k - k) : V{};
    }
    transpose<kCount / 2>(v);
    if (job.k - k >= kStep) {
#pragma GCC unroll 16
      for (int i = 0; i < kCount; ++i) store_raw(out + i * job.width, v[i]);
    } else {
      for (std::int64_t i = 0; i < groups_of<Dot>(job.k - k); ++i) {
        store_raw(out + i * job.width, v[i]);
      }
    }
  }
}

template <class S, class Dot>
void pack_rows(const PackJob& job) {
  if (job.source.col_stride != 1) return pack_strided<S, Dot>(job, 1, 0);
  constexpr int kCount = kPackedLanes<Dot>;
  // From the last block to the first: the last block's stores reach into the next k, which the
  // first block overwrites.
  for (std::int64_t first = (job.width - 1) / kCount * kCount; first >= 0; first -= kCount) {
    pack_row_block<S, Dot>(job, first);
  }
}

/// The packed elements of neighbouring columns, from one row or, for bf16 pairs, from two rows.
template <class S, class Dot>
inline auto load_columns(const S* row, const S* next, std::int64_t n) {
  if constexpr (Dot::kGroup == 1) {
    return load_n(row, n);
  } else {
    const U32V low = (U32V)load_n(row, n) >> 16;  // bf16 loads fill the high half only
    return next != nullptr ? low | (U32V)load_n(next, n) : low;
  }
}

/// Stores the first n lanes. With Spill::kYes the other lanes may be written too, which is faster.
enum class Spill { kNo, kYes };
template <class P, class V>
inline void store_lanes(P* p, V v, std::int64_t n, Spill spill) {
  constexpr std::int64_t kCount = sizeof(V) / sizeof(P);
  if (n >= kCount || spill == Spill::kYes) return store_raw(p, v);
  std::memcpy(p, &v, static_cast<std::size_t>(n) * sizeof(P));
}

template <class S, class Dot>
void pack_cols(const PackJob& job) {
  if (job.source.col_stride != 1) return pack_strided<S, Dot>(job, 0, 1);
  constexpr int kCount = kPackedLanes<Dot>;
  const S* data = static_cast<const S*>(job.source.data);
  auto* out = static_cast<typename Dot::Packed*>(job.out);
  for (std::int64_t k = 0; k < job.k; k += Dot::kGroup, out += job.width) {
    const S* row = data + element_offset(job.source, job.k0 + k, job.lane0);
    const S* next = nullptr;
    if (Dot::kGroup == 2 && k + 1 < job.k) {
      next = data + element_offset(job.source, job.k0 + k + 1, job.lane0);
    }
    // Lanes past the panel belong to the next k, which overwrites them. The last k has no next.
    const Spill spill = k + Dot::kGroup < job.k ? Spill::kYes : Spill::kNo;
    for (std::int64_t i = 0; i < job.width; i += kCount) {
      const std::int64_t n = job.lanes - i;
      if (n <= 0) {
        store_lanes(out + i, typename Dot::V{}, job.width - i, spill);
      } else {
        const auto v = load_columns<S, Dot>(row + i, next == nullptr ? next : next + i, n);
        store_lanes(out + i, v, job.width - i, spill);
      }
    }
  }
}

}  // namespace sonicmoe::cpu::SONICMOE_ISA
