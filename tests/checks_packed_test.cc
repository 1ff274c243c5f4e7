// Every refusal of unpack_weights(), word for word.
#include "checks_fixture.h"
#include "sonicmoe/packed.h"

namespace sonicmoe::test {
namespace {

constexpr std::int64_t E = 2, kRows = 3, kColumns = 128;

struct NF4 {
  Memory memory;
  PackedWeights packed;
  Tensor out = memory.tensor(DType::kBF16, {E, kRows, kColumns});

  NF4() {
    packed = {PackedFormat::kNF4, E, kRows, kColumns, 64, {}, {}, {}, {}, {}};
    packed.codes = memory.buffer(E * kRows * kColumns / 2);
    packed.scales = memory.buffer(E * kRows * kColumns / 64 * 4);
  }
  void run() { unpack_weights(packed, out); }
};

TEST(ChecksPacked, RefusalsOfNF4) {
  expect_refusals<NF4>({
      {[](NF4& c) { c.packed.format = static_cast<PackedFormat>(3); },
       "format is 3, must be in 0 to 2"},
      {[](NF4& c) { c.packed.experts = 0; }, "experts is 0, must be at least 1"},
      {[](NF4& c) { c.packed.rows = -3; }, "rows is -3, must be at least 1"},
      {[](NF4& c) { c.packed.columns = 0; }, "columns is 0, must be at least 1"},
      {[](NF4& c) { c.packed.columns = std::int64_t{1} << 60; },
       "E*rows*columns is 2 * 3 * 1152921504606846976 * 4, must be below 2^55",
       Status::kOutOfRange},
      {[](NF4& c) { c.packed.block = 0; }, "block is 0, must be a power of two from 32 to 4096"},
      {[](NF4& c) { c.packed.block = 96; }, "block is 96, must be a power of two from 32 to 4096"},
      {[](NF4& c) { c.packed.block = 16; }, "block is 16, must be a power of two from 32 to 4096"},
      {[](NF4& c) { c.packed.block = 8192; },
       "block is 8192, must be a power of two from 32 to 4096"},
      {[](NF4& c) { c.packed.block = 256; },
       "columns is 128, must be a multiple of 256, the elements that share a scale"},
      {[](NF4& c) { c.packed.codes = {}; }, "codes is missing, must have 384 bytes"},
      {[](NF4& c) { c.packed.codes.bytes = 768; }, "codes has 768 bytes, must have 384 bytes"},
      {[](NF4& c) { c.packed.scales = {}; }, "scales (absmax) is missing, must have 48 bytes"},
      {[](NF4& c) { c.packed.scales.bytes -= 4; },
       "scales (absmax) has 44 bytes, must have 48 bytes"},
      {[](NF4& c) { c.packed.scales.data = static_cast<char*>(c.packed.scales.data) + 1; },
       "scales (absmax) must be aligned to 4 bytes"},
      {[](NF4& c) { c.packed.nested_scales = c.memory.buffer(4); },
       "nested_scales is given, must be empty: nested_map is missing"},
      {[](NF4& c) { c.packed.nested_offset = c.memory.buffer(4); },
       "nested_offset is given, must be empty: nested_map is missing"},
      {[](NF4& c) { c.out.shape[1] = 2; },
       "out has shape (2, 2, 128), must be (E, rows, columns) = (2, 3, 128)"},
      {[](NF4& c) { c.out.dtype = DType::kI32; }, "out is i32, must be f32 or bf16 or f16"},
      {[](NF4& c) { c.out.data = nullptr; },
       "out is null, must point to (E, rows, columns) = (2, 3, 128) elements"},
      {[](NF4& c) { c.out.stride[0] = 400; },
       "out has stride 400 in dimension 0, must be contiguous: 384"},
      {[](NF4& c) { c.out.data = c.packed.codes.data; },
       "out overlaps codes, must be memory of its own"},
      {[](NF4& c) { c.out.data = c.packed.scales.data; },
       "out overlaps scales, must be memory of its own"},
  });
}

struct Nested : NF4 {
  Nested() {
    packed.scales = memory.buffer(12);
    packed.nested_map = memory.buffer(1024);
    packed.nested_scales = memory.buffer(4);
    packed.nested_offset = memory.buffer(4);
  }
};

TEST(ChecksPacked, RefusalsOfNestedAbsmax) {
  expect_refusals<Nested>({
      {[](Nested& c) { c.packed.scales.bytes = 48; },
       "scales (absmax) has 48 bytes, must have 12 bytes"},
      {[](Nested& c) { c.packed.nested_map.bytes = 64; },
       "nested_map has 64 bytes, must have 1024 bytes"},
      {[](Nested& c) { c.packed.nested_scales = {}; },
       "nested_scales is missing, must have 4 bytes"},
      {[](Nested& c) { c.packed.nested_offset = {}; },
       "nested_offset is missing, must have 4 bytes"},
      {[](Nested& c) { c.packed.nested_offset.bytes = 8; },
       "nested_offset has 8 bytes, must have 4 bytes"},
      {[](Nested& c) { c.out.data = c.packed.nested_map.data; },
       "out overlaps nested_map, must be memory of its own"},
  });
}

struct MXFP4 {
  Memory memory;
  PackedWeights packed;
  Tensor out = memory.tensor(DType::kF16, {E, kRows, kColumns});

  MXFP4() {
    packed = {PackedFormat::kMXFP4, E, kRows, kColumns, 0, {}, {}, {}, {}, {}};
    packed.codes = memory.buffer(E * kRows * kColumns / 2);
    packed.scales = memory.buffer(E * kRows * kColumns / 32);
  }
  void run() { unpack_weights(packed, out); }
};

TEST(ChecksPacked, RefusalsOfMXFP4) {
  expect_refusals<MXFP4>({
      {[](MXFP4& c) { c.packed.columns = 80; },
       "columns is 80, must be a multiple of 32, the elements that share a scale"},
      {[](MXFP4& c) { c.packed.block = 32; }, "block is 32, must be 0: only nf4 has a choice"},
      {[](MXFP4& c) { c.packed.scales.bytes = 96; }, "scales has 96 bytes, must have 24 bytes"},
      {[](MXFP4& c) { c.packed.nested_map = c.memory.buffer(1024); },
       "nested_map is given, must be empty: only the absmax of nf4 may be nested"},
  });
}

struct FP8 {
  Memory memory;
  PackedWeights packed;
  Tensor out = memory.tensor(DType::kF32, {E, kRows, kColumns});

  FP8() {
    packed = {PackedFormat::kFP8Blocks, E, kRows, kColumns, 0, {}, {}, {}, {}, {}};
    packed.codes = memory.buffer(E * kRows * kColumns);
    packed.scales = memory.buffer(E * 4);
  }
  void run() { unpack_weights(packed, out); }
};

TEST(ChecksPacked, RefusalsOfFP8Blocks) {
  expect_refusals<FP8>({
      {[](FP8& c) { c.packed.codes.bytes /= 2; }, "codes has 384 bytes, must have 768 bytes"},
      {[](FP8& c) { c.packed.scales = {}; }, "scales is missing, must have 8 bytes"},
      {[](FP8& c) { c.packed.scales.bytes = 4; }, "scales has 4 bytes, must have 8 bytes"},
      {[](FP8& c) { c.packed.scales.data = static_cast<char*>(c.packed.scales.data) + 2; },
       "scales must be aligned to 4 bytes"},
  });
}

TEST(ChecksPacked, TheCpuUnpacksNoWeightsInsideOfAPass) {
  const auto sentence = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kUnsupported);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(sentence([] { moe_forward({}, {}, PackedLayer{}); }),
            "moe_forward of packed weights is not served by the backend cpu, must run on another");
  EXPECT_EQ(sentence([] { moe_backward({}, {}, PackedLayer{}); }),
            "moe_backward of packed weights is not served by the backend cpu, must run on another");
}

}  // namespace
}  // namespace sonicmoe::test
