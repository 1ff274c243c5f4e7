// The kernels of the layer, one plain function per formula, for the rows of one expert:
//
//   A    H = r(X W1^T + b1), A = r(act(H))         dH   dA' = dO W2, dA = s dA', dH = r(act'(H) dA)
//   Y    Y = r(A W2^T + b2)                             A' = r(s act(H)), dS = sum dA' r(act(H))
//   dW2  dO^T A'     dW1  dH^T X             dX~  r(dH W1)     db1, db2  column sums
//
// Low-rank factors add a Term to the sums of H, Y, dA' and dX~; sonicmoe/low_rank.h has the
// formulas.
//
// Gradients of weights and biases are rounded when they are stored. O and dX, sums over a token's
// rows, are in oracle.cc. Real is the type of sums and epilogues, r(.) rounds to
// `storage`; Real = double with storage kF64 rounds nothing. Sums run in ascending order of their
// index: one fixed order. Inputs X and dO are the gathered rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "verify/convert.h"
#include "verify/matrix.h"
#include "verify/oracle_activation.h"

namespace sonicmoe::oracle {

template <class Real>
Matrix<Real> rounded(DType storage, Matrix<Real> m) {
  round_all(storage, m.values);
  return m;
}

template <class Real>
Matrix<Real> transposed(const Matrix<Real>& m) {
  Matrix<Real> out(m.cols, m.rows);
  for (std::int64_t i = 0; i < m.rows; ++i) {
    for (std::int64_t j = 0; j < m.cols; ++j) out(j, i) = m(i, j);
  }
  return out;
}

/// The type of a product's sums: Real, or Real cut to `bits` bits after every `step` terms.
struct Accumulator {
  int bits = 0;  ///< 0: Real as it is
  std::int64_t step = 32;
};

template <class Real>
Real cut(Real v, int bits) {
  int exponent = 0;
  const Real fraction = std::frexp(v, &exponent);
  return std::ldexp(std::trunc(std::ldexp(fraction, bits)), exponent - bits);
}

// Sanitizers would check each element of these sums, which takes ten times as long as the sums.
// add_product() checks the shapes instead.
#define SONICMOE_UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/// out[j] += the sum of a[k] * b[k * cols + j] for `terms` ascending k, for columns j from `first`
/// on, four vectors of kBytes at a time. Returns the first column that is left.
template <std::size_t kBytes, class Real>
SONICMOE_UNCHECKED __attribute__((always_inline)) inline std::int64_t add_vectors(
    const Real* a, const Real* b, std::int64_t terms, std::int64_t cols, std::int64_t first,
    Real* out) {
  typedef Real Vector __attribute__((vector_size(kBytes), aligned(alignof(Real)), may_alias));
  constexpr std::int64_t kColumns = 4 * kBytes / sizeof(Real);
  for (; first + kColumns <= cols; first += kColumns) {
    auto* to = reinterpret_cast<Vector*>(out + first);
    Vector sum0 = to[0], sum1 = to[1], sum2 = to[2], sum3 = to[3];
    for (std::int64_t k = 0; k < terms; ++k) {
      const auto* from = reinterpret_cast<const Vector*>(b + k * cols + first);
      sum0 += a[k] * from[0];
      sum1 += a[k] * from[1];
      sum2 += a[k] * from[2];
      sum3 += a[k] * from[3];
    }
    to[0] = sum0, to[1] = sum1, to[2] = sum2, to[3] = sum3;
  }
  return first;
}

template <class Real>
SONICMOE_UNCHECKED __attribute__((target("avx512f"))) std::int64_t add_wide_vectors(
    const Real* a, const Real* b, std::int64_t terms, std::int64_t cols, Real* out) {
  return add_vectors<32>(a, b, terms, cols, add_vectors<64>(a, b, terms, cols, 0, out), out);
}

/// The same for every column. Each sum has one order, whatever the vectors; long double has none.
template <class Real>
SONICMOE_UNCHECKED void add_terms(const Real* a, const Real* b, std::int64_t terms,
                                  std::int64_t cols, Real* out) {
  std::int64_t j = 0;
  if constexpr (sizeof(Real) <= sizeof(double)) {
    static const bool has_wide_vectors = __builtin_cpu_supports("avx512f");
    if (has_wide_vectors) j = add_wide_vectors(a, b, terms, cols, out);
    j = add_vectors<16>(a, b, terms, cols, j, out);
  }
  for (; j < cols; ++j) {
    Real sum = out[j];
    for (std::int64_t k = 0; k < terms; ++k) sum += a[k] * b[k * cols + j];
    out[j] = sum;
  }
}

#undef SONICMOE_UNCHECKED

/// Throws unless the matrix has `rows` rows of `cols` elements.
template <class Real>
void require_shape(const Matrix<Real>& m, std::int64_t rows, std::int64_t cols) {
  const bool is_whole = static_cast<std::int64_t>(m.values.size()) == m.rows * m.cols;
  if (m.rows != rows || m.cols != cols || !is_whole) {
    throw Error(Status::kInternal, "the oracle needs a matrix of " + std::to_string(rows) + " x " +
                                       std::to_string(cols) + " but got " + std::to_string(m.rows) +
                                       " x " + std::to_string(m.cols) + " with " +
                                       std::to_string(m.values.size()) + " elements.");
  }
}

/// sum += a b. The terms of an element are added in ascending order of a's column.
template <class Real>
void add_product(Matrix<Real>& sum, const Matrix<Real>& a, const Matrix<Real>& b,
                 Accumulator accumulator = {}) {
  require_shape(sum, a.rows, b.cols);
  require_shape(b, a.cols, b.cols);
  const std::int64_t step = accumulator.bits == 0 ? a.cols : accumulator.step;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    Real* out = sum.row(i);
    for (std::int64_t k = 0; k < a.cols; k += step) {
      const std::int64_t terms = std::min(step, a.cols - k);
      add_terms(a.row(i) + k, b.row(k), terms, b.cols, out);
      if (accumulator.bits == 0 || terms < step) continue;
      for (std::int64_t j = 0; j < b.cols; ++j) out[j] = cut(out[j], accumulator.bits);
    }
  }
}

template <class Real>
Matrix<Real> product(const Matrix<Real>& a, const Matrix<Real>& b, Accumulator accumulator = {}) {
  Matrix<Real> out(a.rows, b.cols);
  add_product(out, a, b, accumulator);
  return out;
}

/// What low-rank factors add to a product of the same rows: inner (m, r) times outer (r, columns).
/// Without factors both are empty.
template <class Real>
struct Term {
  Matrix<Real> inner;
  Matrix<Real> outer;
};

template <class Real>
Matrix<Real> sum_with(Matrix<Real> sum, const Term<Real>& term) {
  if (!term.outer.empty()) add_product(sum, term.inner, term.outer);
  return sum;
}

/// The inner matrix of a term: r(scale * rows factor), rows (m, k), factor (k, r).
template <class Real>
Matrix<Real> inner_rows(DType storage, Real scale, const Matrix<Real>& rows,
                        const Matrix<Real>& factor) {
  Matrix<Real> sum = product(rows, factor);
  for (Real& v : sum.values) v *= scale;
  return rounded(storage, std::move(sum));
}

/// r(sum + bias), the bias one value a column or empty.
template <class Real>
Matrix<Real> rounded_with_bias(DType storage, Matrix<Real> sum, const std::vector<Real>& bias) {
  if (!bias.empty()) {
    for (std::int64_t i = 0; i < sum.rows; ++i) {
      for (std::int64_t j = 0; j < sum.cols; ++j) sum(i, j) += bias[j];
    }
  }
  return rounded(storage, std::move(sum));
}

/// One expert's pre-activation: H's gate half (empty without a gate) and its up half, (m, n) each.
template <class Real>
struct Hidden {
  Matrix<Real> gate;
  Matrix<Real> up;

  Real gate_at(std::int64_t i, std::int64_t j) const { return gate.empty() ? Real(0) : gate(i, j); }
};

/// Kernel A, first half, for gate or up alone: x (m, d), w (n, d) -> (m, n).
template <class Real>
Matrix<Real> up_projection(DType storage, const Matrix<Real>& x, const Matrix<Real>& w,
                           const std::vector<Real>& bias, Accumulator accumulator = {},
                           const Term<Real>& term = {}) {
  return rounded_with_bias(storage, sum_with(product(x, transposed(w), accumulator), term), bias);
}

/// Kernel A, second half: A = r(act(H)).
template <class Real>
Matrix<Real> activated(DType storage, const Activation& activation, const Hidden<Real>& h) {
  Matrix<Real> a(h.up.rows, h.up.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) {
      a(i, j) = activate(activation, h.gate_at(i, j), h.up(i, j)).value;
    }
  }
  return rounded(storage, std::move(a));
}

/// Kernel Y before its rounding: a (m, n), w2 (d, n) -> (m, d). The grouped form scales this sum.
template <class Real>
Matrix<Real> down_projection_sum(const Matrix<Real>& a, const Matrix<Real>& w2,
                                 const std::vector<Real>& bias, Accumulator accumulator = {},
                                 const Term<Real>& term = {}) {
  return rounded_with_bias(DType::kF64, sum_with(product(a, transposed(w2), accumulator), term),
                           bias);
}

/// Outputs of kernel dH for one expert.
template <class Real>
struct ActivationGrad {
  Hidden<Real> dh;            ///< dH = r(act'(H) dA)
  Matrix<Real> scaled;        ///< A' = r(s act(H))
  std::vector<Real> dscores;  ///< dS, without the term of b2
};

/// Kernel dH after its product: dA' (m, n), scores (m).
template <class Real>
ActivationGrad<Real> activation_grad(DType storage, const Activation& activation,
                                     const Hidden<Real>& h, const Matrix<Real>& da_unscaled,
                                     const std::vector<Real>& scores) {
  const std::int64_t m = h.up.rows;
  const std::int64_t n = h.up.cols;
  ActivationGrad<Real> out;
  out.dh.up = Matrix<Real>(m, n);
  if (!h.gate.empty()) out.dh.gate = Matrix<Real>(m, n);
  out.scaled = Matrix<Real>(m, n);
  Matrix<Real> a(m, n);
  out.dscores.assign(static_cast<std::size_t>(m), Real(0));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const Activated<Real> act = activate(activation, h.gate_at(i, j), h.up(i, j));
      const Real da = scores[i] * da_unscaled(i, j);
      out.dh.up(i, j) = act.by_up * da;
      if (!h.gate.empty()) out.dh.gate(i, j) = act.by_gate * da;
      out.scaled(i, j) = scores[i] * act.value;
      a(i, j) = act.value;
    }
  }
  for (Matrix<Real>* each : {&out.dh.up, &out.dh.gate, &out.scaled, &a}) {
    round_all(storage, each->values);
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) out.dscores[i] += da_unscaled(i, j) * a(i, j);
  }
  return out;
}

/// The term of b2 in dS: <dO, b2> for each row.
template <class Real>
std::vector<Real> bias_term_of_dscores(const Matrix<Real>& dout, const std::vector<Real>& b2) {
  std::vector<Real> term(static_cast<std::size_t>(dout.rows), Real(0));
  for (std::int64_t i = 0; i < dout.rows; ++i) {
    for (std::int64_t j = 0; j < dout.cols; ++j) term[i] += dout(i, j) * b2[j];
  }
  return term;
}

/// Kernels dW2 (dout (m, d), A' (m, n) -> (d, n)) and dW1 (dH (m, n), x (m, d) -> (n, d)).
template <class Real>
Matrix<Real> weight_grad(const Matrix<Real>& left, const Matrix<Real>& right) {
  return product(transposed(left), right);
}

/// Kernel dX~: one sum over gate and up, rounded once.
template <class Real>
Matrix<Real> input_grad(DType storage, const Hidden<Real>& dh, const Matrix<Real>& w_gate,
                        const Matrix<Real>& w_up, Accumulator accumulator = {},
                        const Term<Real>& term = {}) {
  Matrix<Real> sum(dh.up.rows, w_up.cols);
  if (!dh.gate.empty()) add_product(sum, dh.gate, w_gate, accumulator);
  add_product(sum, dh.up, w_up, accumulator);
  return rounded(storage, sum_with(std::move(sum), term));
}

/// db1: the column sums of dH (m, n).
template <class Real>
std::vector<Real> up_bias_grad(const Matrix<Real>& dh) {
  std::vector<Real> sum(static_cast<std::size_t>(dh.cols), Real(0));
  for (std::int64_t i = 0; i < dh.rows; ++i) {
    for (std::int64_t j = 0; j < dh.cols; ++j) sum[j] += dh(i, j);
  }
  return sum;
}

/// db2: sum over rows of s dO.
template <class Real>
std::vector<Real> down_bias_grad(const Matrix<Real>& dout, const std::vector<Real>& scores) {
  std::vector<Real> sum(static_cast<std::size_t>(dout.cols), Real(0));
  for (std::int64_t i = 0; i < dout.rows; ++i) {
    for (std::int64_t j = 0; j < dout.cols; ++j) sum[j] += scores[i] * dout(i, j);
  }
  return sum;
}

}  // namespace sonicmoe::oracle
