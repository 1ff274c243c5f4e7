// Packed weights as arguments, and the operator unpack_weights.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "sonicmoe/packed.h"
#include "views.h"

namespace sonicmoe_torch {

#define SONICMOE_PACKED(ARGUMENT)     \
  ARGUMENT(Array, codes)              \
  ARGUMENT(Array, scales)             \
  ARGUMENT(MaybeArray, nested_map)    \
  ARGUMENT(MaybeArray, nested_scales) \
  ARGUMENT(MaybeArray, nested_offset) \
  ARGUMENT(std::int64_t, format)      \
  ARGUMENT(std::int64_t, block)
struct PackedCall {
  SONICMOE_ARGUMENTS(SONICMOE_PACKED)
};

/// The operator's first argument is the tensor that it writes, which the macros cannot describe.
struct UnpackCall : PackedCall {
  Array out{};
  auto fields() { return std::tuple_cat(std::tie(out), PackedCall::fields()); }
  static std::string schema() { return "Tensor(a!) out, " + PackedCall::schema(); }
};

/// The bytes of a contiguous tensor of codes or scales.
inline sonicmoe::Buffer packed_bytes(const Array& t, const char* name) {
  const ScalarType dtype = t.scalar_type();
  if (dtype != ScalarType::Byte && dtype != ScalarType::Float &&
      dtype != ScalarType::Float8_e4m3fn) {
    throw std::invalid_argument(std::string(name) + " has dtype " +
                                torch::headeronly::toString(dtype) +
                                ", must be Byte, Float or Float8_e4m3fn");
  }
  if (!t.is_contiguous()) {
    throw std::invalid_argument(std::string(name) + " has gaps, must be contiguous");
  }
  expect_memory(t, name);
  return lend(t);
}

inline sonicmoe::Buffer packed_bytes(const MaybeArray& t, const char* name) {
  return t.has_value() ? packed_bytes(*t, name) : sonicmoe::Buffer{};
}

struct PackedShape {
  std::int64_t experts, rows, columns;
};

inline sonicmoe::PackedWeights packed_weights(const PackedCall& a, const PackedShape& shape) {
  sonicmoe::PackedWeights packed;
  packed.format = enumerator("format", a.format, sonicmoe::PackedFormat::kFP8Blocks);
  packed.experts = shape.experts;
  packed.rows = shape.rows;
  packed.columns = shape.columns;
  packed.block = a.block;
  packed.codes = packed_bytes(a.codes, "codes");
  packed.scales = packed_bytes(a.scales, "scales");
  packed.nested_map = packed_bytes(a.nested_map, "nested_map");
  packed.nested_scales = packed_bytes(a.nested_scales, "nested_scales");
  packed.nested_offset = packed_bytes(a.nested_offset, "nested_offset");
  return packed;
}

/// Writes the unpacked weights to out (E, rows, columns).
inline std::tuple<> unpack_weights(UnpackCall& a) {
  const DeviceScope device(a.out);
  expect_rank(a.out, 3, "out");
  const PackedShape shape{a.out.size(0), a.out.size(1), a.out.size(2)};
  sonicmoe::unpack_weights(packed_weights(a, shape), view(a.out, "out"), device.exec());
  return {};
}

}  // namespace sonicmoe_torch
