// A dense row-major matrix, the only container of the oracle.
#pragma once

#include <cstdint>
#include <vector>

namespace sonicmoe::oracle {

template <class Real>
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::vector<Real> values;

  Matrix() = default;
  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), cols(c), values(static_cast<std::size_t>(r * c)) {}

  Real& operator()(std::int64_t i, std::int64_t j) { return values[i * cols + j]; }
  const Real& operator()(std::int64_t i, std::int64_t j) const { return values[i * cols + j]; }
  Real* row(std::int64_t i) { return values.data() + i * cols; }
  const Real* row(std::int64_t i) const { return values.data() + i * cols; }
  /// Whether the matrix is absent. A matrix without rows is present, because it has columns.
  bool empty() const { return cols == 0; }
};

/// The same values in another type.
template <class To, class From>
Matrix<To> cast(const Matrix<From>& m) {
  Matrix<To> out(m.rows, m.cols);
  for (std::size_t i = 0; i < m.values.size(); ++i) out.values[i] = static_cast<To>(m.values[i]);
  return out;
}

}  // namespace sonicmoe::oracle
