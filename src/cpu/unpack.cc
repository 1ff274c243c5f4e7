// Unpacks weights. A task is one row of one expert. All elements of a block have the same scale, so
// the 16 products of a 4-bit format are made once a block.
#include <algorithm>

#include "core/numeric.h"
#include "core/packed_values.h"
#include "cpu/backend.h"
#include "cpu/threads.h"

namespace sonicmoe::cpu {
namespace {

/// Approximate cost of unpacking one element, in flops as thread_count() counts them.
constexpr double kFlopsPerElement = 8.0;

template <class T>
const T* data_of(const Buffer& buffer) {
  return static_cast<const T*>(buffer.data);
}

float absmax_of(const PackedWeights& p, std::int64_t block) {
  if (p.nested_map.data == nullptr) return data_of<float>(p.scales)[block];
  return packed::nested_absmax(data_of<float>(p.nested_map)[data_of<std::uint8_t>(p.scales)[block]],
                               data_of<float>(p.nested_scales)[block / packed::kNestedBlock],
                               *data_of<float>(p.nested_offset));
}

/// Unpacks the blocks of `size` elements that the row at element `first` of the tensor has.
/// value(code) and scale(block) are of the format; kFirst is the shift of the even element's code.
template <int kFirst, class Out, class Value, class Scale>
void four_bits(const PackedWeights& p, std::int64_t first, std::int64_t size, Out* out,
               const Value& value, const Scale& scale) {
  const auto* codes = data_of<std::uint8_t>(p.codes) + first / 2;
  for (std::int64_t at = 0; at < p.columns; at += size) {
    const float s = scale((first + at) / size);
    Out products[16];
    for (std::uint32_t c = 0; c < 16; ++c) products[c] = from_float<Out>(key::mul32(value(c), s));
    for (std::int64_t i = at; i < at + size; i += 2) {
      const std::uint8_t byte = codes[i / 2];
      out[i] = products[byte >> kFirst & 15];
      out[i + 1] = products[byte >> (4 - kFirst) & 15];
    }
  }
}

template <class Out>
void fp8_row(const PackedWeights& p, std::int64_t expert, std::int64_t row, Out* out) {
  constexpr std::int64_t kBlock = packed::kFP8Block;
  const std::int64_t across = packed::divide_up(p.columns, kBlock);
  const std::int64_t down = packed::divide_up(p.rows, kBlock);
  const float* scales = data_of<float>(p.scales) + (expert * down + row / kBlock) * across;
  const auto* codes = data_of<std::uint8_t>(p.codes) + (expert * p.rows + row) * p.columns;
  for (std::int64_t i = 0; i < p.columns; ++i) {
    out[i] = from_float<Out>(key::mul32(fp8::value_of(codes[i]), scales[i / kBlock]));
  }
}

template <class Out>
void unpack_row(const PackedWeights& p, std::int64_t index, Out* out) {
  const std::int64_t first = index * p.columns;
  if (p.format == PackedFormat::kNF4) {
    four_bits<4>(p, first, p.block, out + first, packed::nf4_of,
                 [&p](std::int64_t block) { return absmax_of(p, block); });
  } else if (p.format == PackedFormat::kMXFP4) {
    four_bits<0>(p, first, packed::kMXBlock, out + first, packed::e2m1_of,
                 [&p](std::int64_t block) {
                   return packed::e8m0_of(data_of<std::uint8_t>(p.scales)[block]);
                 });
  } else {
    fp8_row(p, index / p.rows, index % p.rows, out + first);
  }
}

}  // namespace

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec) {
  const std::int64_t rows = packed.experts * packed.rows;
  const double elements = static_cast<double>(rows) * static_cast<double>(packed.columns);
  Team team(thread_count(exec, kFlopsPerElement * elements), rows);
  team.run(rows, [&](std::int64_t row, std::int32_t) {
    if (out.dtype == DType::kF32) return unpack_row(packed, row, static_cast<float*>(out.data));
    if (out.dtype == DType::kF16) return unpack_row(packed, row, static_cast<F16*>(out.data));
    unpack_row(packed, row, static_cast<BF16*>(out.data));
  });
}

}  // namespace sonicmoe::cpu
