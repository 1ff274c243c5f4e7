// Offsets and row indices of the grouped GEMMs are device values: defined for every bit pattern.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "sonicmoe/grouped_gemm.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t kMin = INT64_MIN, kMax = INT64_MAX;
constexpr std::int64_t kRows = 150, kSourceRows = 40, kLeft = 9, kRight = 5;
constexpr float kUntouched = 1234.5f;

using Offsets = std::vector<std::int64_t>;

// The definition in the header, computed without the library.
std::int64_t begin_of(const Offsets& o, std::size_t e) {
  return std::clamp<std::int64_t>(o[e], 0, kRows);
}
std::int64_t end_of(const Offsets& o, std::size_t e) {
  return std::max(begin_of(o, e), begin_of(o, e + 1));
}
std::int64_t source_row(std::int32_t index) {
  return std::clamp<std::int64_t>(index, 0, kSourceRows - 1);
}

std::vector<float> small_integers(std::int64_t count, std::mt19937& engine) {
  std::uniform_int_distribution<int> small(-2, 2);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = static_cast<float>(small(engine));
  return values;
}

std::vector<std::int32_t> wild_indices(std::mt19937& engine) {
  std::uniform_int_distribution<int> near(-5, kSourceRows + 5);
  std::vector<std::int32_t> gather(static_cast<std::size_t>(kRows));
  for (std::int32_t& i : gather) i = near(engine);
  gather[3] = INT32_MIN;
  gather[4] = INT32_MAX;
  return gather;
}

// Ranges that do not overlap: each row has one right answer.
const Offsets kApart[] = {
    {0, 50, 100, 150},    {-64, 16, 32, 48},        {kMin, 10, 20, kMax},  {10, 20, 30, 40},
    {kMin, kMin, 0, 150}, {kMax, kMax, kMax, kMax}, {150, 151, 152, 1000}, {0, 0, 0, 0},
    {50, 20, 20, 20},     {100, 150, kMin, -7},     {-1, 1, 1, 1LL << 32},
};
// A row may have two experts: any of their products may stand there.
const Offsets kOverlapping[] = {{0, 150, 0, 150}, {20, 100, 10, kMax}, {0, kMax, kMin, 90}};

struct Call {
  Offsets offsets;
  std::vector<std::int32_t> gather;
  std::vector<float> a, b, d;

  Call(const Offsets& o, std::int64_t b_size, std::int64_t d_size, std::mt19937& engine)
      : offsets(o),
        gather(wild_indices(engine)),
        a(small_integers(kSourceRows * kLeft, engine)),
        b(small_integers(b_size, engine)),
        d(static_cast<std::size_t>(d_size), kUntouched) {}

  std::int64_t experts() const { return std::ssize(offsets) - 1; }
  Tensor offsets_tensor() { return tensor1(offsets.data(), DType::kI64, std::ssize(offsets)); }
  Tensor gather_tensor() { return tensor1(gather.data(), DType::kI32, kRows); }
};

struct RowCall : Call {
  RowCall(const Offsets& o, std::mt19937& engine)
      : Call(o, 3 * kRight * kLeft, kRows * kRight, engine) {
    grouped_gemm({tensor2(a.data(), DType::kF32, kSourceRows, kLeft),
                  tensor3(b.data(), DType::kF32, 3, kRight, kLeft),
                  tensor2(d.data(), DType::kF32, kRows, kRight), offsets_tensor(), gather_tensor()},
                 {.num_threads = 4});
  }
  bool is_product(std::int64_t p, std::int64_t e) const {
    for (std::int64_t j = 0; j < kRight; ++j) {
      float sum = 0;
      for (std::int64_t k = 0; k < kLeft; ++k) {
        sum += a[source_row(gather[p]) * kLeft + k] * b[(e * kRight + j) * kLeft + k];
      }
      if (d[p * kRight + j] != sum) return false;
    }
    return true;
  }
  bool untouched(std::int64_t p) const {
    return std::all_of(&d[p * kRight], &d[p * kRight] + kRight,
                       [](float v) { return v == kUntouched; });
  }
};

TEST(GemmValues, RowsBelongToTheExpertWhoseClampedRangeHasThem) {
  std::mt19937 engine(1);
  for (const Offsets& offsets : kApart) {
    const RowCall call(offsets, engine);
    for (std::int64_t p = 0; p < kRows; ++p) {
      std::int64_t owner = -1;
      for (std::size_t e = 0; e < 3; ++e) {
        if (begin_of(offsets, e) <= p && p < end_of(offsets, e)) owner = static_cast<int>(e);
      }
      EXPECT_TRUE(owner < 0 ? call.untouched(p) : call.is_product(p, owner))
          << "row " << p << " of offsets " << testing::PrintToString(offsets);
    }
  }
}

TEST(GemmValues, OverlappingRangesStayInsideTheirRows) {
  std::mt19937 engine(2);
  for (const Offsets& offsets : kOverlapping) {
    const RowCall call(offsets, engine);
    for (std::int64_t p = 0; p < kRows; ++p) {
      bool owned = false, right = false;
      for (std::size_t e = 0; e < 3; ++e) {
        if (p < begin_of(offsets, e) || p >= end_of(offsets, e)) continue;
        owned = true;
        right = right || call.is_product(p, static_cast<std::int64_t>(e));
      }
      EXPECT_TRUE(owned ? right : call.untouched(p)) << "row " << p;
    }
  }
}

TEST(GemmValues, SumsTakeTheClampedRangeOfEveryExpert) {
  std::mt19937 engine(3);
  std::vector<Offsets> all(std::begin(kApart), std::end(kApart));
  all.insert(all.end(), std::begin(kOverlapping), std::end(kOverlapping));
  for (const Offsets& offsets : all) {
    Call call(offsets, kRows * kRight, 3 * kLeft * kRight, engine);
    grouped_gemm_k({tensor2(call.a.data(), DType::kF32, kSourceRows, kLeft),
                    tensor2(call.b.data(), DType::kF32, kRows, kRight),
                    tensor3(call.d.data(), DType::kF32, 3, kLeft, kRight), call.offsets_tensor(),
                    call.gather_tensor()},
                   {.num_threads = 4});
    for (std::int64_t at = 0; at < 3 * kLeft * kRight; ++at) {
      const auto e = static_cast<std::size_t>(at / (kLeft * kRight));
      const std::int64_t i = at / kRight % kLeft, j = at % kRight;
      float sum = 0;
      for (std::int64_t p = begin_of(offsets, e); p < end_of(offsets, e); ++p) {
        sum += call.a[source_row(call.gather[p]) * kLeft + i] * call.b[p * kRight + j];
      }
      ASSERT_EQ(call.d[at], sum) << "offsets " << testing::PrintToString(offsets);
    }
  }
}

TEST(GemmValues, WithoutRowsToGatherNothingIsComputed) {
  Offsets offsets = {0, 2};
  std::vector<std::int32_t> gather = {0, 7};
  std::vector<float> b(6, 1.0f), d(4, kUntouched), sums(6, kUntouched);
  const Tensor no_rows = tensor2(nullptr, DType::kF32, 0, 3);
  const Tensor at = tensor1(offsets.data(), DType::kI64, 2);
  const Tensor index = tensor1(gather.data(), DType::kI32, 2);
  grouped_gemm({no_rows, tensor3(b.data(), DType::kF32, 1, 2, 3),
                tensor2(d.data(), DType::kF32, 2, 2), at, index});
  EXPECT_EQ(d, std::vector<float>(4, kUntouched));
  grouped_gemm_k({no_rows, tensor2(b.data(), DType::kF32, 2, 2),
                  tensor3(sums.data(), DType::kF32, 1, 3, 2), at, index});
  EXPECT_EQ(sums, std::vector<float>(6, 0.0f));
}

TEST(GemmValues, AnIndexListWithoutEntriesNeedsNoMemory) {
  Offsets offsets = {0, 0};
  std::vector<float> a(12, 1.0f), b(6, 1.0f), sums(6, kUntouched);
  const Tensor index = tensor1(nullptr, DType::kI32, 0);
  grouped_gemm_k({tensor2(a.data(), DType::kF32, 4, 3), tensor2(nullptr, DType::kF32, 0, 2),
                  tensor3(sums.data(), DType::kF32, 1, 3, 2),
                  tensor1(offsets.data(), DType::kI64, 2), index});
  EXPECT_EQ(sums, std::vector<float>(6, 0.0f));
}

}  // namespace
}  // namespace sonicmoe
