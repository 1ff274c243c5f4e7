// unpack_weights() on the CPU and through the C interface, against the oracle.
#include "sonicmoe/packed.h"

#include <gtest/gtest.h>

#include "packed_cases.h"
#include "sonicmoe/c_api.h"
#include "verify/convert.h"
#include "verify/oracle_packed.h"

namespace sonicmoe {
namespace {

using testing::PackedCase;

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

/// The values that `unpack` gives, and the bytes of its output.
struct Unpacked {
  explicit Unpacked(const PackedCase& c, DType dtype)
      : bytes(static_cast<std::size_t>(c.elements() * dtype_bytes(dtype)), 0xa5),
        out(tensor3(bytes.data(), dtype, c.experts, c.rows, c.columns)) {}
  std::vector<std::uint8_t> bytes;
  Tensor out;
};

std::vector<double> unpack_on_cpu(const PackedCase& c, DType dtype, std::int32_t threads = 1) {
  Unpacked to(c, dtype);
  unpack_weights(c.on_host(), to.out, {Backend::kCpu, threads});
  return oracle::read(to.out);
}

TEST(Packed, EveryCodeAndScaleHasTheOraclesValue) {
  for (const PackedCase& c : testing::packed_cases()) {
    for (const DType dtype : kDTypes) {
      SCOPED_TRACE(c.name + " " + dtype_name(dtype));
      const auto expected = oracle::unpack_weights(c.on_host(), dtype);
      EXPECT_TRUE(testing::same_values(unpack_on_cpu(c, dtype), expected));
      EXPECT_TRUE(testing::same_values(unpack_on_cpu(c, dtype, 3), expected));
    }
  }
}

// Sizes that CUDA does not serve.
TEST(Packed, TheCpuTakesAnyColumnsOfFP8) {
  const PackedCase c = testing::fp8_case(2, 5, 131);
  EXPECT_TRUE(testing::same_values(unpack_on_cpu(c, DType::kBF16),
                                   oracle::unpack_weights(c.on_host(), DType::kBF16)));
}

TEST(Packed, TheComparisonRejectsMistakes) {
  int made = 0;
  for (const PackedCase& sound : testing::packed_cases()) {
    const auto expected = oracle::unpack_weights(sound.on_host(), DType::kBF16);
    for (const auto& mistake : testing::packed_mistakes()) {
      if (!mistake.concerns(sound)) continue;
      PackedCase wrong = sound;
      mistake.make(wrong);
      EXPECT_FALSE(testing::same_values(unpack_on_cpu(wrong, DType::kBF16), expected))
          << sound.name << ": " << mistake.name;
      ++made;
    }
  }
  EXPECT_GT(made, 20);
}

TEST(Packed, AScaleThatIsNaNMakesItsBlockNaNAndNoOther) {
  PackedCase c = testing::nf4_case(1, 2, 128, 64, false);
  c.scales = testing::bytes_of({1.0f, std::nanf(""), 1.0f, 1.0f});
  const auto values = unpack_on_cpu(c, DType::kBF16);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::isnan(values[i]), i / 64 == 1) << i;
  }
}

TEST(Packed, NamesOfFormats) {
  EXPECT_STREQ(packed_format_name(PackedFormat::kMXFP4), "mxfp4");
  EXPECT_STREQ(packed_format_name(static_cast<PackedFormat>(9)), "unknown");
  EXPECT_EQ(packed_format_from_name("fp8_blocks"), PackedFormat::kFP8Blocks);
  EXPECT_THROW(packed_format_from_name("fp4"), Error);
}

TEST(Packed, TheCInterfaceGivesTheSameBits) {
  for (const PackedCase& c : testing::packed_cases()) {
    SCOPED_TRACE(c.name);
    Unpacked expected(c, DType::kBF16), given(c, DType::kBF16);
    const PackedWeights p = c.on_host();
    unpack_weights(p, expected.out);
    smoe_packed_weights packed{};
    packed.size = sizeof packed;
    packed.format = static_cast<std::int32_t>(p.format);
    packed.experts = p.experts;
    packed.rows = p.rows;
    packed.columns = p.columns;
    packed.block = p.block;
    packed.codes = p.codes.data;
    packed.codes_bytes = p.codes.bytes;
    packed.scales = p.scales.data;
    packed.scales_bytes = p.scales.bytes;
    packed.nested_map = p.nested_map.data;
    packed.nested_map_bytes = p.nested_map.bytes;
    packed.nested_scales = p.nested_scales.data;
    packed.nested_scales_bytes = p.nested_scales.bytes;
    packed.nested_offset = p.nested_offset.data;
    packed.nested_offset_bytes = p.nested_offset.bytes;
    smoe_tensor out{};
    out.size = sizeof out;
    out.dtype = SMOE_BF16;
    out.rank = 3;
    out.data = given.bytes.data();
    std::copy_n(given.out.shape, 3, out.shape);
    std::copy_n(given.out.stride, 3, out.stride);
    ASSERT_EQ(smoe_unpack_weights(&packed, &out, nullptr), SMOE_OK) << smoe_last_error();
    EXPECT_EQ(given.bytes, expected.bytes);
    packed.scales = nullptr;
    EXPECT_EQ(smoe_unpack_weights(&packed, &out, nullptr), SMOE_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(smoe_last_error()).substr(0, 6), "scales");
    EXPECT_EQ(smoe_unpack_weights(nullptr, &out, nullptr), SMOE_INVALID_ARGUMENT);
    EXPECT_EQ(smoe_unpack_weights(&packed, nullptr, nullptr), SMOE_INVALID_ARGUMENT);
  }
}

}  // namespace
}  // namespace sonicmoe
