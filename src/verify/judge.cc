#include "verify/judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>

#include "verify/convert.h"

namespace sonicmoe::verify {
namespace {

// One ulp divided by a value just below a power of two, where this ratio is smallest.
double ulp(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 0x1p-8;
    case DType::kF16:
      return 0x1p-11;
    case DType::kF64:
      return 0x1p-53;
    default:
      return 0x1p-24;
  }
}

std::string element_name(const Expected& expected, std::size_t index) {
  const Tensor& view = expected.tensor.view;
  std::string name = expected.what + "[";
  auto rest = static_cast<std::int64_t>(index);
  std::int64_t size = oracle::element_count(view);
  for (std::int32_t axis = 0; axis < view.rank; ++axis) {
    size /= view.shape[axis];
    name += (axis == 0 ? "" : ", ") + std::to_string(rest / size);
    rest %= size;
  }
  return name + "]";
}

Verdict reject(Fault fault, const Expected& expected, std::size_t index, double got, double want) {
  std::ostringstream text;
  text.precision(17);
  text << element_name(expected, index) << " is " << got << ", expected " << want;
  return {fault, text.str()};
}

bool holds_filling(const BlockView& tensor, std::int64_t index, std::uint8_t filling) {
  const Tensor t = tensor.on_host();
  const std::int64_t size = dtype_bytes(t.dtype);
  const auto* bytes =
      static_cast<const std::uint8_t*>(t.data) + oracle::element_offset(t, index) * size;
  return std::all_of(bytes, bytes + size, [&](std::uint8_t byte) { return byte == filling; });
}

// Finds unwritten elements, and NaN or infinity where a finite value is expected.
Verdict judge_finite(const Expected& expected, const std::vector<double>& ours,
                     std::uint8_t filling) {
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (std::isfinite(ours[i])) continue;
    if (holds_filling(expected.tensor, static_cast<std::int64_t>(i), filling)) {
      return {Fault::kUnwritten, element_name(expected, i) + " was not written"};
    }
    return reject(Fault::kInaccurate, expected, i, ours[i], expected.exact.values[i]);
  }
  return {};
}

double norm(const double* values, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return std::sqrt(sum);
}

struct RowErrors {
  double max = 0.0;
  double sum = 0.0;
  std::int64_t worst = 0;

  void add(double error, std::int64_t row) {
    sum += error;
    if (error > max) {
      max = error;
      worst = row;
    }
  }
};

double distance(const double* a, const double* b, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

}  // namespace

const char* fault_name(Fault fault) {
  constexpr const char* kNames[] = {"none",          "unwritten",      "outside",
                                    "input changed", "not repeatable", "depends on the batch",
                                    "unequal",       "inaccurate",     "not zero",
                                    "sizes",         "threw",          "bad case"};
  return kNames[static_cast<int>(fault)];
}

double Measure::ratio() const {
  return std::max(max_error / max_allowed, mean_error / mean_allowed);
}

Verdict judge_equal(const Expected& expected, std::uint8_t filling) {
  const std::vector<double> ours = oracle::read(expected.tensor.on_host());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    if (ours[i] == expected.same.values[i]) continue;
    if (holds_filling(expected.tensor, static_cast<std::int64_t>(i), filling)) {
      return {Fault::kUnwritten, element_name(expected, i) + " was not written"};
    }
    return reject(Fault::kUnequal, expected, i, ours[i], expected.same.values[i]);
  }
  return {};
}

Verdict judge_error(const Expected& expected, std::uint8_t filling, Measure& measure) {
  const std::vector<double> ours = oracle::read(expected.tensor.on_host());
  if (const Verdict v = judge_finite(expected, ours, filling); v.fault != Fault::kNone) return v;
  const std::int64_t rows = expected.exact.rows;
  const std::int64_t cols = expected.exact.cols;
  RowErrors mine, reference;
  for (std::int64_t begin = 0; begin < rows; begin += expected.group_rows) {
    const std::int64_t end = std::min(begin + expected.group_rows, rows);
    const double scale = norm(expected.exact.row(begin), (end - begin) * cols) /
                         std::sqrt(static_cast<double>(end - begin));
    for (std::int64_t i = begin; i < end; ++i) {
      const double* truth = expected.exact.row(i);
      // A row must be zero if the exact row and the row in the same precision are zero. A quantised
      // value may be on the other side of the activation's kink: then only the exact row is zero.
      const auto is_zero = [cols](const double* row) {
        return std::all_of(row, row + cols, [](double v) { return v == 0.0; });
      };
      const bool zero = is_zero(truth) && is_zero(expected.same.row(i));
      for (std::int64_t j = 0; zero && j < cols; ++j) {
        const auto at = static_cast<std::size_t>(i * cols + j);
        if (ours[at] != 0.0) return reject(Fault::kNotZero, expected, at, ours[at], 0.0);
      }
      if (scale == 0.0) continue;
      mine.add(distance(ours.data() + i * cols, truth, cols) / scale, i);
      reference.add(distance(expected.same.row(i), truth, cols) / scale, i);
    }
  }
  const double floor = ulp(expected.tensor.view.dtype);
  const double count = std::max<double>(1.0, static_cast<double>(rows));
  measure = {expected.what, mine.max, std::max(2.0 * reference.max, floor), mine.sum / count,
             std::max(2.0 * reference.sum / count, floor)};
  if (measure.ratio() <= 1.0) return {};
  std::ostringstream text;
  text << expected.what << " has an error of " << measure.max_error << " at row " << mine.worst
       << " (allowed " << measure.max_allowed << ") and " << measure.mean_error
       << " on average (allowed " << measure.mean_allowed << ")";
  return {Fault::kInaccurate, text.str()};
}

}  // namespace sonicmoe::verify
