// Torch tensors as the library's views, and buffers from torch's allocator.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "sonicmoe/moe.h"

namespace sonicmoe_torch {

using Array = torch::stable::Tensor;
using MaybeArray = std::optional<Array>;
using torch::headeronly::ScalarType;

inline sonicmoe::DType dtype_of(const Array& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return sonicmoe::DType::kF32;
    case ScalarType::BFloat16:
      return sonicmoe::DType::kBF16;
    case ScalarType::Half:
      return sonicmoe::DType::kF16;
    case ScalarType::Double:
      return sonicmoe::DType::kF64;
    case ScalarType::Int:
      return sonicmoe::DType::kI32;
    case ScalarType::Long:
      return sonicmoe::DType::kI64;
    default:
      throw std::invalid_argument(std::string(name) + " has dtype " +
                                  torch::headeronly::toString(t.scalar_type()) +
                                  ", must be Float, BFloat16, Half, Double, Int or Long");
  }
}

inline void expect_rank(const Array& t, std::int64_t rank, const char* name) {
  if (t.dim() == rank) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(t.dim()) +
                              " dimensions, must have " + std::to_string(rank));
}

/// A view of all of `t`. Torch hands out null for tensors without elements, where null would mean
/// "not given": such a view points at a byte that nobody reads.
inline sonicmoe::Tensor view(const Array& t, const char* name) {
  static char unread[256];
  sonicmoe::Tensor v;
  if (t.dim() < 1 || t.dim() > 3) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(t.dim()) +
                                " dimensions, must have 1 to 3");
  }
  v.data = t.data_ptr();
  if (v.data == nullptr) v.data = unread;
  v.dtype = dtype_of(t, name);
  v.rank = static_cast<std::int32_t>(t.dim());
  for (std::int32_t i = 0; i < v.rank; ++i) {
    v.shape[i] = t.size(i);
    v.stride[i] = t.stride(i);
  }
  return v;
}

inline sonicmoe::Tensor view(const MaybeArray& t, const char* name) {
  return t.has_value() ? view(*t, name) : sonicmoe::Tensor{};
}

struct Halves {
  sonicmoe::Tensor gate;
  sonicmoe::Tensor up;
};

/// Gate and up as views of one tensor whose dimension 1 holds both.
inline Halves split(const Array& fused, const std::string& layout, const char* name) {
  sonicmoe::Tensor gate = view(fused, name);
  const std::int64_t both = gate.shape[1];
  if (both % 2 != 0) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(both) +
                                " rows an expert, must be an even number (gate and up)");
  }
  const bool interleaved = layout == "interleaved";
  if (!interleaved && layout != "concatenated") {
    throw std::invalid_argument("gate_layout is \"" + layout +
                                "\", must be one of: concatenated, interleaved");
  }
  gate.shape[1] = both / 2;
  sonicmoe::Tensor up = gate;
  const std::int64_t offset = interleaved ? gate.stride[1] : gate.stride[1] * (both / 2);
  up.data = static_cast<char*>(gate.data) + offset * sonicmoe::dtype_bytes(gate.dtype);
  if (interleaved) gate.stride[1] = up.stride[1] = 2 * gate.stride[1];
  return {gate, up};
}

inline Array empty(const Array& like, std::initializer_list<std::int64_t> shape, ScalarType dtype) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(shape), dtype);
}

inline Array nothing(const Array& like) { return empty(like, {0}, like.scalar_type()); }

inline ScalarType score_dtype(const Array& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

/// Scratch from torch's allocator, at the alignment that the library asks for.
class Scratch {
 public:
  Scratch(const Array& like, std::int64_t bytes)
      : memory_(empty(like, {bytes + kAlignment}, ScalarType::Byte)), bytes_(bytes) {}
  sonicmoe::Buffer buffer() const {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data_ptr());
    const auto aligned = (address + kAlignment - 1) / kAlignment * kAlignment;
    return {reinterpret_cast<void*>(aligned), bytes_};
  }

 private:
  static constexpr std::int64_t kAlignment = 256;
  Array memory_;
  std::int64_t bytes_;
};

inline sonicmoe::Buffer lend(const Array& t) {
  return {t.data_ptr(), t.numel() * static_cast<std::int64_t>(t.element_size())};
}

inline sonicmoe::Exec exec() {
  sonicmoe::Exec e;
  e.num_threads = static_cast<std::int32_t>(torch::stable::get_num_threads());
  return e;
}

}  // namespace sonicmoe_torch
