// Argument checks of unpack_weights().
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/packed_values.h"

namespace sonicmoe::checks {
namespace {

constexpr std::int64_t kLeastBlock = 32;
constexpr std::int64_t kMostBlock = 4096;
constexpr DTypes kUnpacked = {DType::kF32, DType::kBF16, DType::kF16};

void exact(const Buffer& buffer, const char* name, std::int64_t bytes, std::int64_t alignment) {
  const std::string wanted = ", must have " + std::to_string(bytes) + " bytes";
  if (buffer.data == nullptr) refuse(std::string(name) + " is missing" + wanted);
  if (buffer.bytes != bytes) {
    refuse(std::string(name) + " has " + std::to_string(buffer.bytes) + " bytes" + wanted);
  }
  if (reinterpret_cast<std::uintptr_t>(buffer.data) % alignment != 0) {
    refuse(std::string(name) + " must be aligned to " + std::to_string(alignment) + " bytes");
  }
}

void empty(const Buffer& buffer, const char* name, const char* reason) {
  if (buffer.data != nullptr) {
    refuse(std::string(name) + " is given, must be empty: " + reason);
  }
}

void multiple(const char* name, std::int64_t value, std::int64_t of) {
  if (value % of != 0) {
    refuse(std::string(name) + " is " + std::to_string(value) + ", must be a multiple of " +
           std::to_string(of) + ", the elements that share a scale");
  }
}

void sizes(const PackedWeights& p) {
  known("format", static_cast<std::int32_t>(p.format), kPackedFormatCount);
  at_least("experts", p.experts, 1);
  at_least("rows", p.rows, 1);
  at_least("columns", p.columns, 1);
  array_bytes("E*rows*columns", {p.experts, p.rows, p.columns, dtype_bytes(DType::kF32)});
  if (p.format != PackedFormat::kNF4) {
    if (p.block != 0) {
      refuse("block is " + std::to_string(p.block) + ", must be 0: only nf4 has a choice");
    }
    if (p.format == PackedFormat::kMXFP4) multiple("columns", p.columns, packed::kMXBlock);
    return;
  }
  if (p.block < kLeastBlock || p.block > kMostBlock || (p.block & (p.block - 1)) != 0) {
    refuse("block is " + std::to_string(p.block) + ", must be a power of two from 32 to 4096");
  }
  multiple("columns", p.columns, p.block);
}

void contiguous(const Tensor& out) {
  const Tensor dense = tensor3(out.data, out.dtype, out.shape[0], out.shape[1], out.shape[2]);
  for (std::int32_t i = 0; i < 3; ++i) {
    if (out.shape[i] > 1 && out.stride[i] != dense.stride[i]) {
      refuse("out has stride " + std::to_string(out.stride[i]) + " in dimension " +
             std::to_string(i) + ", must be contiguous: " + std::to_string(dense.stride[i]));
    }
  }
}

}  // namespace

void unpack_weights(const PackedWeights& p, const Tensor& out, const Exec& e) {
  exec(e);
  sizes(p);
  const packed::Bytes bytes = packed::bytes_of(p);
  const bool nested = p.nested_map.data != nullptr;
  exact(p.codes, "codes", bytes.codes, 1);
  const bool fp32 =
      p.format == PackedFormat::kFP8Blocks || (p.format == PackedFormat::kNF4 && !nested);
  exact(p.scales, p.format == PackedFormat::kNF4 ? "scales (absmax)" : "scales", bytes.scales,
        fp32 ? 4 : 1);
  if (nested) {
    if (p.format != PackedFormat::kNF4) {
      empty(p.nested_map, "nested_map", "only the absmax of nf4 may be nested");
    }
    exact(p.nested_map, "nested_map", 256 * 4, 4);
    exact(p.nested_scales, "nested_scales", bytes.nested_scales, 4);
    exact(p.nested_offset, "nested_offset", 4, 4);
  } else {
    empty(p.nested_scales, "nested_scales", "nested_map is missing");
    empty(p.nested_offset, "nested_offset", "nested_map is missing");
  }
  output(out, "out", {{"E", p.experts}, {"rows", p.rows}, {"columns", p.columns}}, kUnpacked);
  contiguous(out);
}

}  // namespace sonicmoe::checks
