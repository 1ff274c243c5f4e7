// Negative controls of Precision::kFp8.
#include <algorithm>

#include "core/fp8_layout.h"
#include "verify/breakage.h"

namespace sonicmoe::verify {
namespace {

constexpr const char* kRandom = "fp8/routing/ids_distinct/random";
constexpr const char* kRoundings = "fp8/routing/ids_distinct/roundings";
constexpr const char* kKeptTensors = "fp8/activation/relu_kept_bf16/roundings";
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
  const std::int64_t count = p.experts * (p.hidden / 128) * (p.width / 128);
  std::rotate(scales, scales + 1, scales + count);
}
void exchange_gate_and_up(std::uint8_t* bytes, const Problem& p) {
  const std::int64_t tiles = p.hidden / 128 * (p.width / 128);
  for (std::int64_t e = 0; e < p.experts; ++e) {
    float* gate = floats(bytes, fp8::weights_layout(p).up_s) + 2 * e * tiles;
    std::swap_ranges(gate, gate + tiles, gate + tiles);
  }
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
       [](const Implementation& sound) {
         Implementation broken = sound;
         broken.quantize_weights = [sound](const Problem& p, const Weights& w, const Buffer& out) {
           sound.quantize_weights(p, w, out);
           auto* byte = static_cast<std::uint8_t*>(out.data) + fp8::weights_layout(p).down_t + 77;
           edit(sound.memory, tensor1(byte, DType::kI32, 1),
                [](const Tensor& t) { static_cast<std::uint8_t*>(t.data)[0] ^= 1; });
         };
         return broken;
       }},
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
