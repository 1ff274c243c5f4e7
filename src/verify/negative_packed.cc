// Negative controls of unpack_weights().
#include <algorithm>

#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

constexpr const char* kNF4 = "unpack/nf4/bf16";
constexpr const char* kNested = "unpack/nf4_nested/bf16";
constexpr const char* kMXFP4 = "unpack/mxfp4/bf16";
constexpr const char* kFP8 = "unpack/fp8_blocks/bf16";

/// f changes the bytes of one buffer that the implementation reads.
template <class F>
Break with_buffer(Buffer PackedWeights::* buffer, F f) {
  return [buffer, f](const Implementation& sound) {
    Implementation broken = sound;
    broken.unpack_weights = [=](PackedWeights packed, const Tensor& out) {
      DeviceCopies copies(sound.memory);
      const std::int64_t bytes = (packed.*buffer).bytes;
      packed.*buffer =
          copies.changed(packed.*buffer, [f, bytes](std::uint8_t* data) { f(data, data + bytes); });
      sound.unpack_weights(packed, out);
    };
    return broken;
  };
}

/// f changes memory after a sound call.
template <class F>
Break after_unpacking(F f) {
  return [f](const Implementation& sound) {
    Implementation broken = sound;
    broken.unpack_weights = [=](const PackedWeights& packed, const Tensor& out) {
      sound.unpack_weights(packed, out);
      f(sound.memory, packed, out);
    };
    return broken;
  };
}

template <std::int64_t kBytes>
void take_next(std::uint8_t* begin, std::uint8_t* end) {
  std::rotate(begin, begin + kBytes, end);
}
void exchange_halves(std::uint8_t* begin, std::uint8_t* end) {
  std::transform(begin, end, begin, [](std::uint8_t byte) {
    return static_cast<std::uint8_t>(byte << 4 | byte >> 4);
  });
}
void set_zero(std::uint8_t* begin, std::uint8_t* end) { std::fill(begin, end, std::uint8_t{0}); }

void forget_last(const Memory& memory, const PackedWeights&, const Tensor& out) {
  const std::int64_t bytes = oracle::element_count(out) * dtype_bytes(out.dtype);
  const std::vector<std::uint8_t> poison(16, kPoison);
  memory.upload(static_cast<std::uint8_t*>(out.data) + bytes - 16, poison.data(), 16);
}
void write_behind(const Memory& memory, const PackedWeights&, const Tensor& out) {
  scribble(memory, out.data, oracle::element_count(out) * dtype_bytes(out.dtype));
}
void change_scale(const Memory& memory, const PackedWeights& packed, const Tensor&) {
  scribble(memory, packed.scales.data, 3);
}

}  // namespace

std::vector<Control> controls_of_packed_weights() {
  const auto codes = &PackedWeights::codes, scales = &PackedWeights::scales;
  return {
      {"the two codes of a byte are exchanged",
       {{kNF4, Fault::kUnequal}, {kMXFP4, Fault::kUnequal}},
       with_buffer(codes, exchange_halves)},
      {"codes are those of the next byte",
       {{kFP8, Fault::kUnequal}},
       with_buffer(codes, take_next<1>)},
      {"scales are those of the next block",
       {{kNF4, Fault::kUnequal}, {kFP8, Fault::kUnequal}},
       with_buffer(scales, take_next<4>)},
      {"scales of one byte are those of the next block",
       {{kNested, Fault::kUnequal}, {kMXFP4, Fault::kUnequal}},
       with_buffer(scales, take_next<1>)},
      {"nested scales are those of the next 256 blocks",
       {{kNested, Fault::kUnequal}},
       with_buffer(&PackedWeights::nested_scales, take_next<4>)},
      {"nested absmax has no offset",
       {{kNested, Fault::kUnequal}},
       with_buffer(&PackedWeights::nested_offset, set_zero)},
      {"the last unpacked weights are not written",
       {{kNF4, Fault::kUnwritten}},
       after_unpacking(forget_last)},
      {"unpacking writes behind its output",
       {{kFP8, Fault::kOutside}},
       after_unpacking(write_behind)},
      {"unpacking changes a scale",
       {{kMXFP4, Fault::kInputChanged}},
       after_unpacking(change_scale)},
  };
}

}  // namespace sonicmoe::verify
