// exp, sigmoid, erf and tanh on vectors: polynomials in fp32, the C library in fp64. Included once
// for each instruction set, in that set's namespace (gemm_simd.h).
//
// The polynomials are Chebyshev fits computed in 40 digits. With them silu differs from fp64 by at
// most 4 ulp for |x| <= 80, and gelu by at most 2 ulp of its argument for |x| <= 9
// (tests/cpu_activation_test.cc).
#pragma once

#include <cmath>

#include "cpu/gemm_simd.h"

namespace sonicmoe::cpu::SONICMOE_ISA {

template <class V, std::size_t N>
inline V polynomial(V x, const float (&c)[N]) {
  V sum = splat(c[N - 1]);
#pragma GCC unroll 16
  for (std::size_t i = 2; i <= N; ++i) sum = fma(sum, x, splat(c[N - i]));
  return sum;
}

/// e^x = 2^i e^r, where x = i ln 2 + r and |r| <= ln(2)/2. e^r is a polynomial. 2^i is built from
/// exponent bits as two factors: one factor cannot reach denormal or the largest results. NaN stays
/// NaN.
inline F32V exp(F32V x) {
  constexpr float kCoefficients[] = {
      1.0f, 1.0f, 0.5f, 1.666641533e-1f, 4.166635126e-2f, 8.375132456e-3f, 1.394111663e-3f};
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23, whose last bit is 1.0
  const F32V low = splat(-104.0f);
  const F32V high = splat(89.0f);
  const F32V y = x < low ? low : (x > high ? high : x);
  const F32V shifted = fma(y, splat(1.44269504f), splat(kRoundToInteger));
  const F32V i = shifted - kRoundToInteger;
  F32V r = fma(i, splat(-0.693359375f), y);  // ln 2 in two parts; i times the first is exact
  r = fma(i, splat(2.12194440e-4f), r);
  const I32V exponent = (I32V)shifted - 0x4b400000;
  const I32V half = exponent >> 1;
  const F32V first = (F32V)((half + 127) << 23);
  const F32V second = (F32V)((exponent - half + 127) << 23);
  return polynomial(r, kCoefficients) * first * second;
}
inline F64V exp(F64V x) {
  for (int i = 0; i < kLanes64; ++i) x[i] = std::exp(x[i]);
  return x;
}

template <class V>
inline V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

/// erf(x): an odd polynomial for |x| < 0.92; else 1 - e^p(|x|) with x's sign, where p fits log
/// erfc.
inline F32V erf(F32V x) {
  constexpr float kSmall[] = {1.128379226f,    -3.761263490e-1f, 1.128369123e-1f, -2.685915120e-2f,
                              5.200368818e-3f, -8.134709205e-4f, 8.334718586e-5f};
  constexpr float kLogErfc[] = {3.204415261e-4f,  -1.130237579f,    -6.318145394e-1f,
                                -1.100944802e-1f, 2.643101849e-2f,  -4.763575271e-3f,
                                5.977434921e-4f,  -4.617791274e-5f, 1.643569703e-6f};
  const F32V magnitude = (F32V)((I32V)x & 0x7fffffff);
  const F32V four = splat(4.0f);
  const F32V t = magnitude > four ? four : magnitude;  // erf(4) rounds to 1
  const F32V small = x * polynomial(x * x, kSmall);
  const F32V large = 1.0f - exp(polynomial(t, kLogErfc));
  const F32V signed_large = (F32V)((I32V)large | ((I32V)x & static_cast<std::int32_t>(0x80000000)));
  return magnitude < splat(0.92f) ? small : signed_large;
}
inline F64V erf(F64V x) {
  for (int i = 0; i < kLanes64; ++i) x[i] = std::erf(x[i]);
  return x;
}

/// tanh(x): an odd polynomial for |x| < 0.35; else (1 - e^-2|x|) / (1 + e^-2|x|) with x's sign.
inline F32V tanh(F32V x) {
  constexpr float kSmall[] = {9.999999648e-1f, -3.333241632e-1f, 1.329566690e-1f, -4.895104864e-2f};
  const F32V magnitude = (F32V)((I32V)x & 0x7fffffff);
  const F32V small = x * polynomial(x * x, kSmall);
  const F32V tail = exp(-2 * magnitude);
  const F32V large = (1 - tail) / (1 + tail);
  const F32V signed_large = (F32V)((I32V)large | ((I32V)x & static_cast<std::int32_t>(0x80000000)));
  return magnitude < splat(0.35f) ? small : signed_large;
}
inline F64V tanh(F64V x) {
  for (int i = 0; i < kLanes64; ++i) x[i] = std::tanh(x[i]);
  return x;
}

}  // namespace sonicmoe::cpu::SONICMOE_ISA
