// The grouped GEMMs on integers, for every instruction set: every element, every awkward size.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "cpu/moe_layer.h"
#include "verify/convert.h"

namespace sonicmoe::cpu {
namespace {

using Counts = std::vector<std::int64_t>;

struct Shape {
  Counts counts;
  std::int64_t n;
  std::int64_t k;
};

std::vector<Shape> shapes() {
  const Counts edges = {0, 1, 63, 64, 65, 127, 128, 129};
  const Counts long_rows = {300, 0, 257, 13, 0};
  return {{edges, 1, 1},      {edges, 7, 13},     {edges, 33, 31},        {edges, 96, 64},
          {edges, 65, 264},   {long_rows, 40, 3}, {long_rows, 31, 129},   {{0, 0}, 5, 9},
          {{14}, 32, 16},     {{28, 15}, 64, 17}, {{5, 6, 4, 12}, 48, 8}, {{1100}, 3, 5},
          {{600, 3}, 520, 10}};
}

/// Owns the memory of a tensor, poisoned, with a gap after every row.
struct Owned {
  std::vector<std::uint8_t> bytes;
  Tensor view;

  Owned(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t gap)
      : bytes(static_cast<std::size_t>((rows * (cols + gap) + 1) * dtype_bytes(dtype)), 0xff) {
    view = tensor2(bytes.data(), dtype, rows, cols);
    view.stride[0] = cols + gap;
  }
  double at(std::int64_t r, std::int64_t c) const {
    return oracle::load(bytes.data(), view.dtype, r * view.stride[0] + c);
  }
  void fill(std::mt19937& engine) {
    std::uniform_int_distribution<int> small(-2, 2);
    for (std::int64_t r = 0; r < view.shape[0]; ++r) {
      for (std::int64_t c = 0; c < view.shape[1]; ++c) {
        oracle::store(bytes.data(), view.dtype, r * view.stride[0] + c, small(engine));
      }
    }
  }
  bool untouched(std::int64_t r, std::int64_t c) const {
    const std::int64_t size = dtype_bytes(view.dtype);
    const auto* p = bytes.data() + (r * view.stride[0] + c) * size;
    return std::all_of(p, p + size, [](std::uint8_t b) { return b == 0xff; });
  }
};

std::vector<std::int64_t> offsets_of(const Counts& counts) {
  std::vector<std::int64_t> offsets = {0};
  for (const std::int64_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

struct Param {
  Isa isa;
  DType dtype;
};

class CpuGemm : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (!isa_available(GetParam().isa)) GTEST_SKIP() << isa_name(GetParam().isa);
  }
  static DType out_dtype() { return GetParam().dtype == DType::kF64 ? DType::kF64 : DType::kF32; }
};

// Rows of the gathered operand in a shuffled order.
std::vector<std::int32_t> shuffled(std::int64_t rows, std::mt19937& engine) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(rows));
  for (std::int64_t i = 0; i < rows; ++i) order[i] = static_cast<std::int32_t>(i);
  std::shuffle(order.begin(), order.end(), engine);
  return order;
}

TEST_P(CpuGemm, RowsOfAnExpertTimesItsMatrix) {
  std::mt19937 engine(7);
  for (const Shape& s : shapes()) {
    auto offsets = offsets_of(s.counts);
    const std::int64_t rows = offsets.back();
    const auto experts = std::ssize(s.counts);
    for (const bool transposed : {false, true}) {
      auto gather = shuffled(rows, engine);
      Owned a(GetParam().dtype, rows, s.k, 3);
      Owned b(GetParam().dtype, experts * (transposed ? s.k : s.n), transposed ? s.n : s.k, 0);
      Owned d(out_dtype(), rows + 2, s.n, 5);
      a.fill(engine);
      b.fill(engine);
      GroupedGemm args{a.view, tensor3(b.bytes.data(), GetParam().dtype, experts, s.n, s.k), d.view,
                       tensor1(offsets.data(), DType::kI64, experts + 1),
                       tensor1(gather.data(), DType::kI32, rows)};
      if (transposed) {
        args.b.stride[1] = 1;
        args.b.stride[2] = s.n;
      }
      grouped_gemm_on(GetParam().isa, args, {.num_threads = 2});
      for (std::int64_t e = 0; e < experts; ++e) {
        for (std::int64_t p = offsets[e]; p < offsets[e + 1]; ++p) {
          for (std::int64_t j = 0; j < s.n; ++j) {
            double sum = 0;
            for (std::int64_t k = 0; k < s.k; ++k) {
              sum +=
                  a.at(gather[p], k) * (transposed ? b.at(e * s.k + k, j) : b.at(e * s.n + j, k));
            }
            ASSERT_EQ(d.at(p, j), sum) << "row " << p << " column " << j << " k " << s.k;
          }
          for (std::int64_t j = s.n; j < s.n + 5; ++j) ASSERT_TRUE(d.untouched(p, j));
        }
      }
      for (std::int64_t j = 0; j < 2 * s.n; ++j) {
        ASSERT_TRUE(d.untouched(rows + j / s.n, j % s.n)) << "past the last offset";
      }
    }
  }
}

TEST_P(CpuGemm, SumsOverTheRowsOfAnExpert) {
  std::mt19937 engine(8);
  for (const Shape& s : shapes()) {
    auto offsets = offsets_of(s.counts);
    const std::int64_t rows = offsets.back();
    const auto experts = std::ssize(s.counts);
    auto gather = shuffled(rows, engine);
    Owned a(GetParam().dtype, rows, s.k, 3);
    Owned b(GetParam().dtype, rows, s.n, 1);
    Owned d(out_dtype(), experts * s.k, s.n, 2);
    a.fill(engine);
    b.fill(engine);
    Tensor out = tensor3(d.bytes.data(), out_dtype(), experts, s.k, s.n);
    out.stride[1] = d.view.stride[0];
    out.stride[0] = s.k * out.stride[1];
    grouped_gemm_k_on(GetParam().isa,
                      {a.view, b.view, out, tensor1(offsets.data(), DType::kI64, experts + 1),
                       tensor1(gather.data(), DType::kI32, rows)},
                      {.num_threads = 2});
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t i = 0; i < s.k; ++i) {
        std::vector<double> sums(static_cast<std::size_t>(s.n), 0.0);
        for (std::int64_t p = offsets[e]; p < offsets[e + 1]; ++p) {
          for (std::int64_t j = 0; j < s.n; ++j) sums[j] += a.at(gather[p], i) * b.at(p, j);
        }
        for (std::int64_t j = 0; j < s.n; ++j) {
          ASSERT_EQ(d.at(e * s.k + i, j), sums[j]) << "expert " << e << " at " << i << ", " << j;
        }
        ASSERT_TRUE(d.untouched(e * s.k + i, s.n));
      }
    }
  }
}

std::vector<Param> params() {
  std::vector<Param> all;
  for (std::int32_t isa = 0; isa < kIsaCount; ++isa) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      all.push_back({static_cast<Isa>(isa), dtype});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(EveryTable, CpuGemm, testing::ValuesIn(params()), [](const auto& info) {
  return std::string(isa_name(info.param.isa)) + "_" + dtype_name(info.param.dtype);
});

// No memory: only where an element of a matrix of more than 2^31 elements would stand.
TEST(CpuGemmAddress, PassesTheRangeOf32Bits) {
  const std::int32_t index[] = {0, 2'000'000'000};
  const Operand gathered{nullptr, index, 8192, 1};
  EXPECT_EQ(element_offset(gathered, 1, 8191), 16'384'000'008'191);
  const Operand dense{nullptr, nullptr, 4096, 3};
  EXPECT_EQ(element_offset(dense, 3'000'000, 4095), 12'288'012'285);
}

}  // namespace
}  // namespace sonicmoe::cpu
