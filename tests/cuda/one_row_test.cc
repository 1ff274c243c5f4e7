// The row stride of a matrix with one row is never used, so callers may pass any value. Views often
// have 1, which the driver refuses in a tensor map.
#include "core/numeric.h"
#include "device_array.h"
#include "each_engine.h"
#include "sonicmoe/grouped_gemm.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::must;

class CudaOneRow : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaOneRow);

TEST_P(CudaOneRow, ItsStrideIsNotUsed) {
  constexpr std::int64_t kK = 64, kN = 136, kExperts = 2;
  const Exec exec = this->exec();
  std::vector<std::uint16_t> a(kK, 0), b, want;
  a[5] = to_bf16(2.0f).bits;
  for (std::int64_t i = 0; i < kExperts * kN * kK; ++i) {
    b.push_back(to_bf16(static_cast<float>(i % 61)).bits);
  }
  for (std::int64_t j = 0; j < kN; ++j) {  // the row belongs to expert 1
    want.push_back(to_bf16(2.0f * static_cast<float>(((kN + j) * kK + 5) % 61)).bits);
  }
  DeviceArray d_a(kK * 2), d_b(kExperts * kN * kK * 2), d_d(kN * 2), d_offsets((kExperts + 1) * 8);
  DeviceArray scratch(grouped_gemm_scratch_bytes(1, kExperts, exec));
  d_a.set(a);
  d_b.set(b);
  d_offsets.set(std::vector<std::int64_t>{0, 0, 1});
  GroupedGemm args;
  args.a = tensor2(d_a.data(), DType::kBF16, 1, kK);
  args.b = tensor3(d_b.data(), DType::kBF16, kExperts, kN, kK);
  args.d = tensor2(d_d.data(), DType::kBF16, 1, kN);
  args.a.stride[0] = args.d.stride[0] = 1;
  args.offsets = tensor1(d_offsets.data(), DType::kI64, kExperts + 1);
  args.scratch = scratch.buffer();
  grouped_gemm(args, exec);
  must(cudaDeviceSynchronize());
  EXPECT_EQ(d_d.get<std::uint16_t>(), want);
}

}  // namespace
}  // namespace sonicmoe
