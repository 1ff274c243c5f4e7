// One case of unpack_weights(): two calls, with other bytes in the output before the second one.
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "verify/caller.h"
#include "verify/oracle_packed.h"

namespace sonicmoe::verify {
namespace {

/// The buffers of a packed tensor in guarded blocks.
struct PackedBlocks {
  PackedWeights shape;
  std::vector<std::pair<Buffer PackedWeights::*, Block*>> buffers;

  PackedWeights at(std::uint8_t* (Block::*memory)()) const {
    PackedWeights packed = shape;
    for (const auto& [buffer, block] : buffers) {
      packed.*buffer = {(block->*memory)(), block->bytes()};
    }
    return packed;
  }
};

/// Makes the buffers. Every value is finite: scales are small enough for fp16, and the codes of
/// e4m3 are not NaN.
class Packer {
 public:
  Packer(const Case& c, Blocks& blocks) : case_(c), blocks_(blocks) {
    std::seed_seq seed(c.name.begin(), c.name.end());
    engine_.seed(seed);
  }

  PackedBlocks make() {
    const Problem& p = case_.problem;
    const PackedFormat format = case_.packed.format;
    made_.shape.format = format;
    made_.shape.experts = p.experts;
    made_.shape.rows = p.width;
    made_.shape.columns = p.hidden;
    made_.shape.block = case_.packed.block;
    const std::int64_t elements = p.experts * p.width * p.hidden;
    const bool is_fp8 = format == PackedFormat::kFP8Blocks;
    fill_bytes("codes", &PackedWeights::codes, is_fp8 ? elements : elements / 2, 0, 255);
    if (is_fp8) {
      for (std::int64_t i = 0; i < elements; ++i) {
        std::uint8_t& code = made_.buffers.back().second->host()[i];
        if ((code & 0x7f) == 0x7f) code ^= 1;
      }
      const std::int64_t grid = (p.width + 127) / 128 * ((p.hidden + 127) / 128);
      fill_floats("scales", &PackedWeights::scales, p.experts * grid);
    } else if (format == PackedFormat::kMXFP4) {
      fill_bytes("scales", &PackedWeights::scales, elements / 32, 105, 139);
    } else if (case_.packed.nested) {
      const std::int64_t blocks = elements / case_.packed.block;
      fill_bytes("scales", &PackedWeights::scales, blocks, 0, 255);
      fill_floats("nested_map", &PackedWeights::nested_map, 256);
      fill_floats("nested_scales", &PackedWeights::nested_scales, (blocks + 255) / 256);
      fill_floats("nested_offset", &PackedWeights::nested_offset, 1);
    } else {
      fill_floats("scales", &PackedWeights::scales, elements / case_.packed.block);
    }
    return made_;
  }

 private:
  Block& add(const char* what, Buffer PackedWeights::* buffer, std::int64_t bytes) {
    Block& block = blocks_.add(what, bytes);
    made_.buffers.emplace_back(buffer, &block);
    return block;
  }
  void fill_bytes(const char* what, Buffer PackedWeights::* buffer, std::int64_t count, int low,
                  int high) {
    std::uniform_int_distribution<int> byte(low, high);
    std::uint8_t* to = add(what, buffer, count).host();
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(byte(engine_));
  }
  void fill_floats(const char* what, Buffer PackedWeights::* buffer, std::int64_t count) {
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-12, 3);
    std::uint8_t* to = add(what, buffer, 4 * count).host();
    for (std::int64_t i = 0; i < count; ++i) {
      const float value = std::ldexp(normal(engine_), exponent(engine_));
      std::memcpy(to + 4 * i, &value, 4);
    }
  }

  const Case& case_;
  Blocks& blocks_;
  PackedBlocks made_;
  std::mt19937 engine_;
};

}  // namespace

void run_unpack(const Case& c, const Implementation& implementation, CaseResult& result) {
  Caller caller(c, implementation, result);
  const PackedBlocks packed = Packer(c, caller.blocks()).make();
  const Problem& p = c.problem;
  const BlockView out =
      caller.blocks().add_view("out", tensor3(nullptr, p.dtype, p.experts, p.width, p.hidden));
  oracle::Matrix<double> want(p.experts * p.width, p.hidden);
  want.values = oracle::unpack_weights(packed.at(&Block::host), p.dtype);
  const std::vector<Expected> outputs = {{"out", out, want, want, p.width}};
  const auto run = [&] {
    implementation.unpack_weights(packed.at(&Block::device), out.on_device());
  };
  caller.call({"unpack_weights", kPoison, {}, {}}, outputs, run);
  caller.judge(outputs, kPoison);
  const Caller::Bits bits = Caller::bits(outputs);
  caller.call({"unpack_weights", kOtherPoison, {}, {}}, outputs, run);
  Caller::require_same(bits, outputs, "a call on other bytes");
}

}  // namespace sonicmoe::verify
