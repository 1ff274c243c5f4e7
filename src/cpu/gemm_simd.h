// Vectors as wide as the registers of the instruction set that a file is compiled for. Loops on
// these types are written once for all instruction sets.
//
// Only gemm_<isa>.cc include this file, and define SONICMOE_ISA first. Everything is in a namespace
// of that name: otherwise the linker would merge the templates of two instruction sets into one.
#pragma once

#ifndef SONICMOE_ISA
#error "define SONICMOE_ISA before including gemm_simd.h"
#endif

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/numeric.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sonicmoe::cpu::SONICMOE_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kLanes32 = kVectorBytes / 4;
inline constexpr int kLanes64 = kVectorBytes / 8;

typedef float F32V __attribute__((vector_size(kVectorBytes)));
typedef double F64V __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t I32V __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t U32V __attribute__((vector_size(kVectorBytes)));
typedef std::uint16_t U16V __attribute__((vector_size(kVectorBytes / 2)));

/// The accumulator of a storage type, and its vector.
template <class S>
struct Lane {
  using Acc = float;
  using V = F32V;
  static constexpr int kCount = kLanes32;
};
template <>
struct Lane<double> {
  using Acc = double;
  using V = F64V;
  static constexpr int kCount = kLanes64;
};

inline F32V splat(float v) { return v - F32V{}; }
inline F64V splat(double v) { return v - F64V{}; }

inline F32V fma(F32V a, F32V b, F32V c) {
#if defined(__AVX512F__)
  return (F32V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F32V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline F64V fma(F64V a, F64V b, F64V c) {
#if defined(__AVX512F__)
  return (F64V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
  return (F64V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

template <class V, class T>
inline V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
inline void store_raw(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

inline F32V load(const float* p) { return load_raw<F32V>(p); }
inline F64V load(const double* p) { return load_raw<F64V>(p); }
inline F32V load(const BF16* p) {
  const U32V wide = __builtin_convertvector(load_raw<U16V>(p), U32V) << 16;
  return (F32V)wide;
}
inline F32V load(const F16* p) {
#if defined(__AVX512F__)
  return (F32V)_mm512_maskz_cvtph_ps(0xffff,
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (F32V)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  F32V v;
  for (int i = 0; i < kLanes32; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, F32V v) { store_raw(p, v); }
inline void store(double* p, F64V v) { store_raw(p, v); }
/// v rounded to bf16, whose bits are the upper half of each lane.
inline U32V rounded_bf16(F32V v) {
  const U32V u = (U32V)v;
  const U32V rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const U32V quiet = (u & 0xffff0000u) | 0x400000u;
  return (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
}
#if defined(__AVX512BF16__)
/// The bf16 instruction flushes denormals to zero. A vector with a lane that may be denormal goes
/// through rounded_bf16() instead.
inline U16V to_bf16(F32V v) {
  constexpr int kExponent = 0x7f800000;
  if (_mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(kExponent)) == 0xffff) [[likely]] {
    return (U16V)_mm512_cvtneps_pbh((__m512)v);
  }
  return (U16V)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(rounded_bf16(v) >> 16));
}
#elif defined(__AVX512F__)
inline U16V to_bf16(F32V v) {
  return (U16V)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(rounded_bf16(v) >> 16));
}
#else
inline U16V to_bf16(F32V v) { return __builtin_convertvector(rounded_bf16(v) >> 16, U16V); }
#endif
inline void store(BF16* p, F32V v) { store_raw(p, to_bf16(v)); }
inline void store(F16* p, F32V v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes32; ++i) p[i] = to_f16(v[i]);
#endif
}

#if defined(__AVX512F__)
/// The mask of the first n of 16 lanes; for fp64, its low byte is the mask of 8 lanes.
inline __mmask16 first_lanes(std::int64_t n) {
  return n >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << n) - 1u);
}
inline F32V load_masked(const float* p, std::int64_t n) {
  return (F32V)_mm512_maskz_loadu_ps(first_lanes(n), p);
}
inline F64V load_masked(const double* p, std::int64_t n) {
  return (F64V)_mm512_maskz_loadu_pd(static_cast<__mmask8>(first_lanes(n)), p);
}
inline F32V load_masked(const BF16* p, std::int64_t n) {
  const __m256i v = _mm256_maskz_loadu_epi16(first_lanes(n), p);
  return (F32V)((U32V)_mm512_maskz_cvtepu16_epi32(0xffff, v) << 16);
}
inline F32V load_masked(const F16* p, std::int64_t n) {
  return (F32V)_mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(first_lanes(n), p));
}
#else
template <class S>
inline typename Lane<S>::V load_masked(const S* p, std::int64_t n) {
  S lanes[Lane<S>::kCount] = {};
  for (std::int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
#endif

/// Loads or stores the first n lanes. A load sets the other lanes to zero; a store does not write
/// them.
template <class S>
inline typename Lane<S>::V load_n(const S* p, std::int64_t n) {
  return n >= Lane<S>::kCount ? load(p) : load_masked(p, n);
}
template <class S>
inline void store_n(S* p, typename Lane<S>::V v, std::int64_t n) {
  if (n >= Lane<S>::kCount) [[likely]]
    return store(p, v);
  S lanes[Lane<S>::kCount];
  store(lanes, v);
  for (std::int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

/// r(.): rounds to the storage type and converts back.
template <class S, class V>
inline V round_to(V v) {
  S lanes[Lane<S>::kCount];
  store(lanes, v);
  return load(lanes);
}
template <>
inline F32V round_to<float>(F32V v) {
  return v;
}
template <>
inline F64V round_to<double>(F64V v) {
  return v;
}
template <>
inline F32V round_to<BF16>(F32V v) {
  return (F32V)(__builtin_convertvector(to_bf16(v), U32V) << 16);
}

/// The lanes with these numbers; the lanes of b are numbered after those of a.
template <int... kLane, class V>
inline V lanes_of(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kLane...);
#else  // GCC before 12
  return __builtin_shuffle(a, b, decltype(a < b){kLane...});
#endif
}

/// Adds the upper half of the lanes to the lower half until one lane is left.
template <int kHalf, class V, int... kLane>
inline auto sum_halves(V v, std::integer_sequence<int, kLane...> lanes) {
  const V sum = v + lanes_of<(kLane % kHalf + kHalf)...>(v, v);
  if constexpr (kHalf > 1) {
    return sum_halves<kHalf / 2>(sum, lanes);
  } else {
    return sum[0];
  }
}
template <class V>
inline auto sum_lanes(V v) {
  constexpr int kCount = sizeof(V) / sizeof(v[0]);
  return sum_halves<kCount / 2>(v, std::make_integer_sequence<int, kCount>());
}

}  // namespace sonicmoe::cpu::SONICMOE_ISA
