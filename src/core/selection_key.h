// The arithmetic that decides to which experts a token goes. Host and device compile this same
// source, so the CPU and the GPU compute the same bits and choose the same experts.
//
// All operations are fp32 in a stated order. Products and sums are fused only by an explicit fma,
// so the compiler has nothing to choose. No library function is called, except fmaf by code that is
// built without fma instructions; it gives the same bits. Exponentials of x < -80 are zero. So no
// value is subnormal (E <= 1024), and flush-to-zero modes change nothing.
//
// - exp32: 2^n * P(r), where x = n ln2 + r, |r| <= ln2/2 and P has degree 6. At most 1 ulp off on
//   [-80, 0].
// - sigmoid32: 1/(1 + e) for x >= 0, else e/(1 + e), where e = exp32(-|x|).
// - sqrt_softplus32: sqrt(max(x, 0) + e * L(e)), where e = exp32(-|x|) and L(e), of degree 9, is
//   ln(1 + e)/e. At most 2 ulp off on [-80, inf); 0 below.
// - softmax: p_i = exp32(x_i - max) * (1/sum), where sum is the tree sum.
// - tree sum of n values: S(0, P), where P is the least power of two >= n, S(i, 1) = v_i (0 from n
//   on) and S(i, 2m) = S(i, m) + S(i + m, m). Any split into consecutive blocks can follow it:
//   first within a lane, then between neighbouring lanes (shuffle xor 1, 2, 4, ...).
#pragma once

#include <cstdint>
#if !defined(__CUDA_ARCH__)
#include <bit>
#endif

#if defined(__CUDACC__)
#define SONICMOE_HD static __host__ __device__ __forceinline__
#else
// Internal linkage: files compiled for different instruction sets would otherwise share one copy,
// and the linker could pick one that this processor cannot run.
#define SONICMOE_HD [[gnu::always_inline]] static inline
#endif

namespace sonicmoe::key {

SONICMOE_HD std::uint32_t bits_of(float v) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(v);
#else
  return std::bit_cast<std::uint32_t>(v);
#endif
}

SONICMOE_HD float float_of(std::uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  return std::bit_cast<float>(u);
#endif
}

#if defined(__CUDA_ARCH__)
SONICMOE_HD float fma32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
SONICMOE_HD float add32(float a, float b) { return __fadd_rn(a, b); }
SONICMOE_HD float mul32(float a, float b) { return __fmul_rn(a, b); }
SONICMOE_HD float div32(float a, float b) { return __fdiv_rn(a, b); }
SONICMOE_HD float sqrt32(float a) { return __fsqrt_rn(a); }
#else
SONICMOE_HD float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SONICMOE_HD float add32(float a, float b) { return a + b; }
SONICMOE_HD float mul32(float a, float b) { return a * b; }
SONICMOE_HD float div32(float a, float b) { return a / b; }
SONICMOE_HD float sqrt32(float a) { return __builtin_sqrtf(a); }
#endif

SONICMOE_HD float minus_infinity() { return float_of(0xff800000u); }

/// The largest finite value of each logits dtype. +inf counts as this value.
inline constexpr float kLargestF32 = 0x1.fffffep+127f;
inline constexpr float kLargestBF16 = 0x1.fep+127f;
inline constexpr float kLargestF16 = 65504.0f;

/// A logit as routing sees it: NaN is -inf, +inf is the largest finite value.
SONICMOE_HD float clean(float v, float largest) {
  const float capped = v < largest ? v : largest;
  return v == v ? capped : minus_infinity();
}

/// Unsigned order = numeric order; -0 and +0 are one value.
SONICMOE_HD std::uint32_t order_bits(float v) {
  const std::uint32_t u = bits_of(add32(v, 0.0f));
  const std::uint32_t negative = 0u - (u >> 31);
  return u ^ (negative | 0x80000000u);
}
SONICMOE_HD float from_order_bits(std::uint32_t k) {
  const std::uint32_t positive = 0u - (k >> 31);
  return float_of(k ^ (~positive | 0x80000000u));
}
/// order_bits(-inf): a key that is not greater can never be chosen.
inline constexpr std::uint32_t kUnavailable = 0x007fffffu;

/// e^x for x <= 0, -inf included.
SONICMOE_HD float exp32(float x) {
  const float shifted = fma32(x, 0x1.715476p+0f, 0x1.8p+23f);  // the low bits are n
  const float n = add32(shifted, -0x1.8p+23f);
  float r = fma32(n, -0x1.63p-1f, x);
  r = fma32(n, 0x1.bd0106p-13f, r);
  float p = 0x1.6a23acp-10f;
  p = fma32(p, r, 0x1.123a1cp-7f);
  p = fma32(p, r, 0x1.5558f4p-5f);
  p = fma32(p, r, 0x1.555492p-3f);
  p = fma32(p, r, 0x1.fffffcp-2f);
  p = fma32(p, r, 1.0f);
  p = fma32(p, r, 1.0f);
  const float scaled = float_of(bits_of(p) + (bits_of(shifted) << 23));
  return x < -80.0f ? 0.0f : scaled;
}

/// 1/(1 + e^-x); 0 for -inf.
SONICMOE_HD float sigmoid32(float x) {
  const float e = exp32(x < 0.0f ? x : -x);
  return div32(x < 0.0f ? e : 1.0f, add32(1.0f, e));
}

/// ln(1 + e)/e for e from 0 to 1.
SONICMOE_HD float log1p_ratio32(float e) {
  float p = -0x1.a9336cp-9f;
  p = fma32(p, e, 0x1.453f12p-6f);
  p = fma32(p, e, -0x1.d29ccep-5f);
  p = fma32(p, e, 0x1.b25362p-4f);
  p = fma32(p, e, -0x1.397562p-3f);
  p = fma32(p, e, 0x1.92f696p-3f);
  p = fma32(p, e, -0x1.ff0f88p-3f);
  p = fma32(p, e, 0x1.554c8p-2f);
  p = fma32(p, e, -0x1.ffffbep-2f);
  return fma32(p, e, 1.0f);
}

/// sqrt(ln(1 + e^x)); 0 for -inf.
SONICMOE_HD float sqrt_softplus32(float x) {
  const float e = exp32(x < 0.0f ? x : -x);
  return sqrt32(fma32(e, log1p_ratio32(e), x < 0.0f ? 0.0f : x));
}

/// d ln(sqrt_softplus(x)) / dx = sigmoid(x) / (2 ln(1 + e^x)). For x < 0 the factor e^x cancels, so
/// it is 1/2 where the score is 0.
SONICMOE_HD float sqrt_softplus_slope32(float x) {
  const float e = exp32(x < 0.0f ? x : -x);
  const float ratio = log1p_ratio32(e);
  const float softplus = x < 0.0f ? ratio : fma32(e, ratio, x);
  return div32(0.5f, fma32(e, softplus, softplus));
}

/// A factor of sqrt_softplus(x), for a row whose largest logit is `top`; it does not underflow if
/// all logits are small. The factor is the same for all x of the row: e^(-top/2) if top <= 0, else
/// 1.
SONICMOE_HD float sqrt_softplus_part32(float x, float top) {
  if (top > 0.0f) return sqrt_softplus32(x);
  return mul32(exp32(mul32(0.5f, add32(x, -top))), sqrt32(log1p_ratio32(exp32(x))));
}

/// Sigmoid and sqrt_softplus routing choose by score + bias; a logit of -inf stays unavailable
/// whatever the bias.
SONICMOE_HD float biased(float logit, float score, float bias) {
  const float v = clean(add32(score, bias), kLargestF32);
  return logit == minus_infinity() ? logit : v;
}

/// A group's value: the sum of its two largest selection values. -inf counts as the lowest finite
/// value.
SONICMOE_HD float group_value(float best, float second) {
  const float a = best < -kLargestF32 ? -kLargestF32 : best;
  const float b = second < -kLargestF32 ? -kLargestF32 : second;
  return add32(a, b);
}

/// Score mass as a fixed-point number with 40 fraction bits, truncated. Sums of such numbers do not
/// depend on the order of the summands.
SONICMOE_HD std::uint64_t mass(float p) { return static_cast<std::uint64_t>(mul32(p, 0x1p40f)); }

/// The mass of a sqrt_softplus score, which may exceed 1: 24 fraction bits of at most 2^9, so that
/// 2^31 of them do not overflow.
inline constexpr float kLargestMass = 0x1p9f;
SONICMOE_HD std::uint64_t sqrt_softplus_mass(float score) {
  const float capped = score < kLargestMass ? score : kLargestMass;
  return static_cast<std::uint64_t>(mul32(capped, 0x1p24f));
}

}  // namespace sonicmoe::key
