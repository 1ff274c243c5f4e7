// Torch tensors as the library's views, and buffers from torch's allocator.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "sonicmoe/moe.h"

// torch's C shim has this function since 2.13. With an older torch its address is null, and the
// shim prints the reason of an error on stderr.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

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

/// Refuses a weight that torch.expand made: its elements share memory, and so would the elements of
/// its gradient.
inline void expect_own_memory(const Array& t, const char* name) {
  for (std::int64_t i = 0; i < t.dim(); ++i) {
    if (t.stride(i) != 0 || t.size(i) < 2) continue;
    throw std::invalid_argument(std::string(name) + " has stride 0 in dimension " +
                                std::to_string(i) +
                                ", must not be expanded: every element needs memory of its own");
  }
}

/// Refuses a tensor whose elements are not all inside of its storage. Such a tensor is a parameter
/// that FSDP has freed, by resizing its storage: to read it would read other memory.
inline void expect_memory(const Array& t, const char* name) {
  std::int64_t bytes = 0;
  std::int64_t last = 0;  // the index of the last element
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(t.get(), &last));
  for (std::int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) == 0) return;
    last += (t.size(i) - 1) * t.stride(i);
  }
  if ((last + 1) * static_cast<std::int64_t>(t.element_size()) <= bytes) return;
  throw std::invalid_argument(std::string(name) + " has freed memory: its storage has " +
                              std::to_string(bytes) + " bytes, must have at least " +
                              std::to_string((last + 1) * t.element_size()));
}

/// A view of all of `t`. The address of a tensor without elements is null, which the library takes
/// for "not given". So its view gets the address of a static buffer, which is never read.
inline sonicmoe::Tensor view(const Array& t, const char* name) {
  alignas(256) static char unread[256];
  sonicmoe::Tensor v;
  if (t.dim() < 1 || t.dim() > 3) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(t.dim()) +
                                " dimensions, must have 1 to 3");
  }
  expect_memory(t, name);
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

/// How dimension 1 of a weight or bias holds gate and up; the numbers of _names.py.
enum class GateLayout : std::int32_t { kConcatenated = 0, kInterleaved = 1 };

/// Gate and up as views of one tensor whose dimension 1 holds both.
inline Halves split(const Array& fused, GateLayout layout, const char* name) {
  sonicmoe::Tensor gate = view(fused, name);
  const std::int64_t both = gate.shape[1];
  if (both % 2 != 0) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(both) +
                                " rows an expert, must be an even number (gate and up)");
  }
  const bool interleaved = layout == GateLayout::kInterleaved;
  gate.shape[1] = both / 2;
  sonicmoe::Tensor up = gate;
  const std::int64_t offset = interleaved ? gate.stride[1] : gate.stride[1] * (both / 2);
  up.data = static_cast<char*>(gate.data) + offset * sonicmoe::dtype_bytes(gate.dtype);
  if (interleaved) gate.stride[1] = up.stride[1] = 2 * gate.stride[1];
  return {gate, up};
}

/// The gate and up projections of a layer; fused: w_up holds both.
inline Halves gate_and_up(const MaybeArray& w_gate, const MaybeArray& w_up, bool fused,
                          GateLayout layout) {
  if (fused && w_up.has_value()) return split(*w_up, layout, "w_up");
  return {view(w_gate, "w_up"), view(w_up, "w_up")};
}

/// A device in the numbers of torch's C shim.
struct DeviceId {
  std::int32_t type = aoti_torch_device_type_cpu();
  std::int32_t index = 0;
};

inline DeviceId device_of(const Array& t) {
  DeviceId id;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &id.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &id.index));
  return id;
}

/// "cpu", "cuda:1", or "device type 2" for other devices.
inline std::string text_of(const DeviceId& device) {
  if (device.type == aoti_torch_device_type_cpu()) return "cpu";
  if (device.type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(device.index);
  return "device type " + std::to_string(device.type);
}

/// Throws the error of an allocation that failed, with torch's reason if torch gives one. _ops.py
/// raises a torch.OutOfMemoryError for a message that begins with that name.
[[noreturn]] inline void throw_not_allocated(std::initializer_list<std::int64_t> shape,
                                             ScalarType dtype) {
  std::string sizes;
  for (const std::int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  const std::string what = std::string("a tensor of ") + torch::headeronly::toString(dtype) +
                           " and shape (" + sizes + ") cannot be allocated";
  if (torch_exception_get_what_without_backtrace == nullptr) {
    throw std::runtime_error("OutOfMemoryError: " + what + "; torch has printed the reason");
  }
  const std::string all = torch_exception_get_what_without_backtrace();
  const std::string reason = all.substr(0, all.find('\n'));
  const bool memory = reason.find("out of memory") != std::string::npos ||
                      reason.find("can't allocate memory") != std::string::npos;
  throw std::runtime_error((memory ? "OutOfMemoryError: " : "") + what + ": " + reason);
}

/// A new contiguous tensor. Calls the C shim: the stable C++ API would go through the dispatcher,
/// which takes longer than all other host code of an operator.
inline Array empty(DeviceId id, std::initializer_list<std::int64_t> shape, ScalarType dtype) {
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::int64_t strides[3] = {1, 1, 1};
  for (std::size_t i = shape.size() - 1; i > 0; --i) {
    strides[i - 1] = strides[i] * std::max<std::int64_t>(1, shape.begin()[i]);
  }
  AtenTensorHandle made = nullptr;
  const auto rank = static_cast<std::int64_t>(shape.size());
  const auto code = aoti_torch_empty_strided(
      rank, shape.begin(), strides, to<std::int32_t>(from(dtype)), id.type, id.index, &made);
  if (code != TORCH_SUCCESS) throw_not_allocated(shape, dtype);
  return Array(made);
}

inline Array empty(const Array& like, std::initializer_list<std::int64_t> shape, ScalarType dtype) {
  return empty(device_of(like), shape, dtype);
}

/// torch's empty_like; if `t` is contiguous, without torch's dispatcher.
inline Array empty_beside(const Array& t) {
  const std::int64_t rank = t.dim();
  if (!t.is_contiguous() || rank < 1 || rank > 3) return torch::stable::empty_like(t);
  const ScalarType dtype = t.scalar_type();
  if (rank == 1) return empty(t, {t.size(0)}, dtype);
  if (rank == 2) return empty(t, {t.size(0), t.size(1)}, dtype);
  return empty(t, {t.size(0), t.size(1), t.size(2)}, dtype);
}

/// t (T, d), or a contiguous copy of t if kernels cannot read its strides. Kernels need rows that
/// are contiguous and do not overlap, and on CUDA rows that begin at multiples of 16 bytes.
inline Array readable_rows(const Array& t, const char* name) {
  if (t.dim() != 2) return t;
  expect_memory(t, name);
  const std::int64_t step = t.stride(0);
  const bool cuda_reads = reinterpret_cast<std::uintptr_t>(t.data_ptr()) % 16 == 0 && step % 8 == 0;
  if (t.stride(1) == 1 && step >= t.size(1) && (cuda_reads || !t.is_cuda())) return t;
  Array copy = empty(t, {t.size(0), t.size(1)}, t.scalar_type());
  torch::stable::copy_(copy, t);
  return copy;
}

/// An empty tensor in place of a gradient that is not wanted. It is in host memory, where
/// allocation is faster.
inline Array nothing(const Array& like) { return empty(DeviceId{}, {0}, like.scalar_type()); }

inline ScalarType score_dtype(const Array& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

/// Scratch memory from torch's allocator, aligned as the library requires.
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

/// The bytes of `t`, which must be contiguous: made by the operator, or checked by owned_bytes().
inline sonicmoe::Buffer lend(const Array& t) {
  return {t.data_ptr(), t.numel() * static_cast<std::int64_t>(t.element_size())};
}

/// Memory that an earlier call has written, as the library reads it: `t`, or a contiguous and
/// aligned copy. A hook of saved tensors, or a caller who builds a tuple, may give it any strides.
inline Array owned_bytes(const Array& t, const char* name, ScalarType dtype) {
  if (t.scalar_type() != dtype) {
    throw std::invalid_argument(std::string(name) + " has dtype " +
                                torch::headeronly::toString(t.scalar_type()) + ", must be " +
                                torch::headeronly::toString(dtype) + ", as forward made it");
  }
  expect_own_memory(t, name);
  expect_memory(t, name);
  const std::uintptr_t alignment = t.is_cuda() ? 256 : 64;
  if (!t.is_contiguous()) return torch::stable::contiguous(t);
  if (reinterpret_cast<std::uintptr_t>(t.data_ptr()) % alignment != 0) {
    return torch::stable::clone(t);
  }
  return t;
}

}  // namespace sonicmoe_torch
