#include "verify/oracle_gemm.h"

#include <algorithm>

#include "verify/oracle_formulas.h"

namespace sonicmoe::oracle {
namespace {

// Rows [begin, end) of a tensor. With a gather index, row p is row gather[p] of the tensor, clamped
// to its rows.
template <class Real>
Matrix<Real> rows_of(const Tensor& t, const Tensor& gather, std::int64_t begin, std::int64_t end) {
  Matrix<Real> out(end - begin, t.shape[1]);
  for (std::int64_t p = begin; p < end; ++p) {
    const std::int64_t row =
        gather.data == nullptr
            ? p
            : std::clamp<std::int64_t>(load_integer(gather, p), 0, t.shape[0] - 1);
    const std::vector<double> values = read(slice(t, row));
    std::transform(values.begin(), values.end(), out.row(p - begin),
                   [](double v) { return Real(v); });
  }
  return out;
}

// Calls f with the type of the sums.
template <class F>
Matrix<double> with_sums(DType dtype, Precision precision, F f) {
  const bool wide = precision == Precision::kExact;
  if (dtype == DType::kF64) {
    return wide ? f.template operator()<long double>() : f.template operator()<double>();
  }
  return wide ? f.template operator()<double>() : f.template operator()<float>();
}

// The rows of expert e, among `rows` rows. Offsets are clamped; where they decrease the expert has
// no rows.
struct RowRange {
  std::int64_t begin, end;
};
RowRange range_of(const Tensor& offsets, std::int64_t e, std::int64_t rows) {
  const auto offset = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(load_integer(offsets, i), 0, rows);
  };
  return {offset(e), std::max(offset(e), offset(e + 1))};
}

template <class Real>
void put_rows(const Matrix<Real>& from, std::int64_t row, Matrix<double>& to) {
  std::transform(from.values.begin(), from.values.end(), to.row(row),
                 [](Real v) { return static_cast<double>(v); });
}

}  // namespace

Matrix<double> grouped_gemm(const GroupedGemm& args, Precision precision) {
  return with_sums(args.a.dtype, precision, [&]<class Real>() {
    const std::int64_t experts = args.b.shape[0];
    const std::int64_t width = args.b.shape[1];
    const std::int64_t rows = args.d.shape[0];
    Matrix<double> d(range_of(args.offsets, experts - 1, rows).end, width);
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto [begin, end] = range_of(args.offsets, e, rows);
      put_rows(product(rows_of<Real>(args.a, args.gather, begin, end),
                       transposed(rows_of<Real>(slice(args.b, e), {}, 0, width))),
               begin, d);
    }
    return d;
  });
}

Matrix<double> grouped_gemm_k(const GroupedGemmK& args, Precision precision) {
  return with_sums(args.a.dtype, precision, [&]<class Real>() {
    const std::int64_t experts = args.d.shape[0];
    const std::int64_t left = args.d.shape[1];
    Matrix<double> d(experts * left, args.d.shape[2]);
    for (std::int64_t e = 0; e < experts; ++e) {
      const auto [begin, end] = range_of(args.offsets, e, args.b.shape[0]);
      put_rows(weight_grad(rows_of<Real>(args.a, args.gather, begin, end),
                           rows_of<Real>(args.b, {}, begin, end)),
               e * left, d);
    }
    return d;
  });
}

}  // namespace sonicmoe::oracle
