// unpack_weights() on the GPU against the oracle, for every code and scale.
#include <memory>

#include "device_array.h"
#include "packed_cases.h"
#include "test_device.h"
#include "verify/convert.h"
#include "verify/oracle_packed.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::PackedCase;

std::vector<double> unpack(const PackedCase& c, DType dtype) {
  std::vector<std::unique_ptr<DeviceArray>> arrays;
  const PackedWeights packed = c.with([&arrays](const std::vector<std::uint8_t>& bytes) {
    if (bytes.empty()) return Buffer{};
    arrays.push_back(std::make_unique<DeviceArray>(static_cast<std::int64_t>(bytes.size())));
    arrays.back()->set(bytes);
    return arrays.back()->buffer();
  });
  DeviceArray out(c.elements() * dtype_bytes(dtype));
  unpack_weights(packed, tensor3(out.data(), dtype, c.experts, c.rows, c.columns),
                 testing::test_exec());
  DeviceArray::wait();
  std::vector<std::uint8_t> bytes = out.get();
  return oracle::read(tensor3(bytes.data(), dtype, c.experts, c.rows, c.columns));
}

TEST(CudaPacked, EveryCodeAndScaleHasTheOraclesValue) {
  for (const PackedCase& c : testing::packed_cases()) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      SCOPED_TRACE(c.name + " " + dtype_name(dtype));
      const auto expected = oracle::unpack_weights(c.on_host(), dtype);
      EXPECT_TRUE(testing::same_values(unpack(c, dtype), expected));
    }
  }
}

TEST(CudaPacked, TheComparisonRejectsMistakes) {
  for (const PackedCase& sound : testing::packed_cases()) {
    const auto expected = oracle::unpack_weights(sound.on_host(), DType::kBF16);
    for (const auto& mistake : testing::packed_mistakes()) {
      if (!mistake.concerns(sound)) continue;
      PackedCase wrong = sound;
      mistake.make(wrong);
      EXPECT_FALSE(testing::same_values(unpack(wrong, DType::kBF16), expected))
          << sound.name << ": " << mistake.name;
    }
  }
}

TEST(CudaPacked, RefusesWhatCudaCannotAddress) {
  PackedCase c = testing::fp8_case(1, 4, 24);
  try {
    unpack(c, DType::kBF16);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "columns is 24, must be a multiple of 16 on CUDA");
    EXPECT_EQ(error.status(), Status::kUnsupported);
  }
}

}  // namespace
}  // namespace sonicmoe
