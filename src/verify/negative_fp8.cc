// Negative controls of Precision::kFp8.
#include <algorithm>

#include "core/fp8_layout.h"
#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

constexpr const char* kRandom = "fp8/routing/ids_distinct/random";
constexpr const char* kRoundings = "fp8/routing/ids_distinct/roundings";
constexpr const char* kKeptTensors = "fp8/activation/relu_kept_bf16/roundings";
constexpr const char* kTail = "fp8/routing/tail_ids_edges/random";
constexpr const char* kTailIntegers = "fp8/routing/tail_ids_edges/integers";
constexpr const char* kPromotion = "fp8/promotion/roundings";

float* floats(std::uint8_t* bytes, std::int64_t offset) {
  return reinterpret_cast<float*>(bytes + offset);
}

/// Forward and backward read a copy of the quantised weights that f(bytes, problem) has changed.
template <class F>
Break with_fp8_weights(F f) {
  return with_inputs([f](DeviceCopies& copies, Problem& p, auto& args) {
    args.fp8_weights = copies.changed(args.fp8_weights, [&](std::uint8_t* bytes) { f(bytes, p); });
  });
}

void double_one_scale(std::uint8_t* bytes, const Problem& p) {
  floats(bytes, fp8::weights_layout(p).up_s)[0] *= 2.0f;
}
void take_neighbours_scale(std::uint8_t* bytes, const Problem& p) {
  float* scales = floats(bytes, fp8::weights_layout(p).down_s);
  const std::int64_t count = p.experts * fp8::blocks_of(p.hidden) * fp8::blocks_of(p.width);
  std::rotate(scales, scales + 1, scales + count);
}
void exchange_gate_and_up(std::uint8_t* bytes, const Problem& p) {
  const std::int64_t tiles = fp8::blocks_of(p.hidden) * fp8::blocks_of(p.width);
  for (std::int64_t e = 0; e < p.experts; ++e) {
    float* gate = floats(bytes, fp8::weights_layout(p).up_s) + 2 * e * tiles;
    std::swap_ranges(gate, gate + tiles, gate + tiles);
  }
}

/// As if the sums over d ended at the last multiple of 128.
void skip_the_last_columns(std::uint8_t* bytes, const Problem& p) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  const std::int64_t row = fp8::whole_blocks(p.hidden);
  for (std::int64_t begin = at.up; begin < at.up_t; begin += row) {
    std::fill(bytes + begin + p.hidden / 128 * 128, bytes + begin + row, std::uint8_t{0});
  }
}
void take_the_scale_before_the_last(std::uint8_t* bytes, const Problem& p) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  const std::int64_t row = fp8::blocks_of(p.hidden);
  float* end = floats(bytes, at.down_s);
  for (float* s = floats(bytes, at.up_s); s + row <= end; s += row) s[row - 1] = s[row - 2];
}

/// After forward, f(scales, rows) changes the scales of the kept H: one a row, those of the first
/// block of 128 columns.
template <class F>
Break with_kept_scales(F f) {
  return after_forward([f](const Memory& memory, const Problem& p, const ForwardArgs& args) {
    if (args.h.data == nullptr) return;
    const std::int64_t rows = row_capacity(p);
    const std::int64_t offset = fp8::kept_h_layout(p, rows).scales;
    const Tensor scales =
        tensor1(static_cast<std::uint8_t*>(args.h.data) + offset, DType::kF32, rows);
    edit(memory, scales, [&](const Tensor& t) { f(static_cast<float*>(t.data), rows); });
  });
}

/// In a kept H whose gate and up end with a block of 64, the scales that blocks would have if they
/// were counted from the first column of gate on: the first of up is then the last one of gate.
Break with_blocks_across_gate_and_up() {
  return after_forward([](const Memory& memory, const Problem& p, const ForwardArgs& args) {
    if (args.h.data == nullptr) return;
    const fp8::RowsLayout at = fp8::kept_h_layout(p, row_capacity(p));
    const std::int64_t blocks = fp8::blocks_of(p.width);
    const Tensor scales = tensor1(static_cast<std::uint8_t*>(args.h.data) + at.scales, DType::kF32,
                                  2 * blocks * at.scale_stride);
    edit(memory, scales, [&](const Tensor& t) {
      float* up = static_cast<float*>(t.data) + blocks * at.scale_stride;
      std::copy_n(up - at.scale_stride, at.scale_stride, up);
    });
  });
}

/// Changes one code of the quantised weights: at(problem) is its offset.
Break with_another_code(std::int64_t (*at)(const Problem&)) {
  return [at](const Implementation& sound) {
    Implementation broken = sound;
    broken.quantize_weights = [sound, at](const Problem& p, const Weights& w, const Buffer& out) {
      sound.quantize_weights(p, w, out);
      edit(sound.memory, tensor1(static_cast<std::uint8_t*>(out.data) + at(p), DType::kI32, 1),
           [](const Tensor& t) { static_cast<std::uint8_t*>(t.data)[0] ^= 1; });
    };
    return broken;
  };
}

/// Doubles the first 128 values of the middle token of x in forward. The result is as if the scale
/// of this block were too large by a factor of two.
Break with_a_row_scale_off() {
  return [](const Implementation& sound) {
    Implementation broken = sound;
    broken.moe_forward = [sound](const Problem& p, ForwardArgs args) {
      DeviceCopies copies(sound.memory);
      args.x = copies.changed(args.x, [](const Tensor& t) {
        std::vector<double> values = oracle::read(t);
        const std::int64_t first = t.shape[0] / 2 * t.shape[1];
        for (std::int64_t i = first; i < first + 128; ++i) values[i] *= 2.0;
        oracle::write(t, values);
      });
      sound.moe_forward(p, args);
    };
    return broken;
  };
}

}  // namespace

std::vector<Control> controls_of_fp8() {
  const std::vector<Expectation> wrong = {{kRandom, Fault::kInaccurate}};
  return {
      {"a weight scale is one power of two off",
       {{kRandom, Fault::kInaccurate}, {kRoundings, Fault::kUnequal}},
       with_fp8_weights(double_one_scale)},
      {"weights have the scale of the neighbouring block", wrong,
       with_fp8_weights(take_neighbours_scale)},
      {"gate and up have each other's scales", wrong, with_fp8_weights(exchange_gate_and_up)},
      {"a row scale of X is one power of two off",
       {{kRandom, Fault::kInaccurate}, {kRoundings, Fault::kUnequal}},
       with_a_row_scale_off()},
      {"a scale of the kept H is one power of two off", wrong,
       with_kept_scales([](float* scales, std::int64_t rows) { scales[rows / 2] *= 2.0f; })},
      {"the kept H has the scales of the neighbouring row", wrong,
       with_kept_scales([](float* scales, std::int64_t rows) {
         std::rotate(scales, scales + 1, scales + rows);
       })},
      {"one code of the quantised weights is another",
       {{kRandom, Fault::kUnequal}},
       with_another_code([](const Problem& p) { return fp8::weights_layout(p).down_t + 77; })},
      {"a code past the last column of the quantised weights is not 0",
       {{kTail, Fault::kUnequal}},
       with_another_code([](const Problem& p) { return p.hidden; })},
      {"sums over d skip the last 64",
       {{kTail, Fault::kInaccurate}, {kTailIntegers, Fault::kUnequal}},
       with_fp8_weights(skip_the_last_columns)},
      {"a last block of 64 has the scale of the block before",
       {{kTail, Fault::kInaccurate}},
       with_fp8_weights(take_the_scale_before_the_last)},
      {"the blocks of the kept H run across gate and up",
       {{kTail, Fault::kInaccurate}},
       with_blocks_across_gate_and_up()},
      {"the products are those of bf16",
       {{kKeptTensors, Fault::kUnequal}},
       with_inputs([](DeviceCopies&, Problem& p, auto& args) {
         p.precision = Precision::kTensors;
         args.fp8_weights = {};
       })},
  };
}

std::vector<Control> controls_of_fp8_sums() {
  return {{"sums over the depth have 14 bits",
           {{kPromotion, Fault::kUnequal}},
           [](const Implementation&) {
             return oracle_implementation(oracle::Precision::kUnpromoted);
           }}};
}

}  // namespace sonicmoe::verify
