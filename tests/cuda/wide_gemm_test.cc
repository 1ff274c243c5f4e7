// A grouped GEMM with expert matrices too large for L2, so that record pairs are walked in bands. A
// row of a has one non-zero element, so that every element of d is one product.
#include <random>

#include "core/numeric.h"
#include "device_array.h"
#include "each_engine.h"
#include "sonicmoe/grouped_gemm.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::must;

constexpr std::int64_t kK = 4104, kN = 3080;  // 24.1 MB, 13 tiles of columns
// Records, record pairs and bands that begin at odd and even tiles, some of them not full.
constexpr std::int64_t kCounts[] = {1, 2200, 0, 129, 700, 100, 1500};
constexpr std::int64_t kExperts = std::size(kCounts);

std::uint16_t bits(int value) { return to_bf16(static_cast<float>(value)).bits; }

class CudaWideGemm : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaWideGemm);

TEST_P(CudaWideGemm, EveryElement) {
  const Exec exec = this->exec();
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t count : kCounts) offsets.push_back(offsets.back() + count);
  const std::int64_t rows = offsets.back();
  std::mt19937 random(3);
  std::vector<std::int64_t> chosen;
  std::vector<std::uint16_t> a(static_cast<std::size_t>(rows * kK));
  for (std::int64_t r = 0; r < rows; ++r) {
    chosen.push_back(random() % kK);
    a[r * kK + chosen[r]] = bits(1 + static_cast<int>(r % 3));
  }
  std::vector<int> values(static_cast<std::size_t>(kExperts * kN * kK));
  std::vector<std::uint16_t> b;
  b.reserve(values.size());
  for (int& value : values) {
    value = static_cast<int>(random() % 17) - 8;
    b.push_back(bits(value));
  }
  DeviceArray d_a(rows * kK * 2), d_b(kExperts * kN * kK * 2), d_d(rows * kN * 2);
  DeviceArray d_offsets((kExperts + 1) * 8);
  DeviceArray scratch(grouped_gemm_scratch_bytes(rows, kExperts, exec));
  d_a.set(a);
  d_b.set(b);
  d_offsets.set(offsets);
  GroupedGemm args;
  args.a = tensor2(d_a.data(), DType::kBF16, rows, kK);
  args.b = tensor3(d_b.data(), DType::kBF16, kExperts, kN, kK);
  args.d = tensor2(d_d.data(), DType::kBF16, rows, kN);
  args.offsets = tensor1(d_offsets.data(), DType::kI64, kExperts + 1);
  args.scratch = scratch.buffer();
  grouped_gemm(args, exec);
  must(cudaDeviceSynchronize());
  const auto d = d_d.get<std::uint16_t>();
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t r = offsets[e]; r < offsets[e + 1]; ++r) {
      for (std::int64_t j = 0; j < kN; ++j) {
        const int want = (1 + static_cast<int>(r % 3)) * values[(e * kN + j) * kK + chosen[r]];
        ASSERT_EQ(d[r * kN + j], bits(want)) << "row " << r << ", column " << j;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
