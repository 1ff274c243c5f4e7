// Argument checks of unpack_weights() and of passes on packed weights.
#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/overlap.h"
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

void buffers(const PackedWeights& p) {
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
}

/// Refuses packed weights of other sizes than a layer's, and memory for them in another place than
/// unpack_weights() writes. `elements`: those of an expert.
void operand(const Problem& problem, const char* name, const PackedWeights& p,
             std::initializer_list<Tensor> views, std::int64_t elements) {
  sizes(p);
  buffers(p);
  if (p.experts != problem.experts || p.rows * p.columns != elements) {
    refuse(std::string("packed.") + name + " has " + std::to_string(p.experts) + " experts of " +
           std::to_string(p.rows) + " * " + std::to_string(p.columns) + " elements, must have " +
           std::to_string(problem.experts) + " of " + std::to_string(elements));
  }
  const std::int64_t some = views.begin()->shape[0];
  const auto* base = static_cast<const std::byte*>(views.begin()->data);
  for (const Tensor& t : views) base = std::min(base, static_cast<const std::byte*>(t.data));
  for (const Tensor& t : views) {
    const std::int64_t first =
        (static_cast<const std::byte*>(t.data) - base) / dtype_bytes(problem.dtype);
    const std::int64_t last =
        first + (t.shape[1] - 1) * t.stride[1] + (t.shape[2] - 1) * t.stride[2];
    const bool apart = t.shape[0] == 1 || t.stride[0] == elements;
    if (t.shape[0] < 1 || t.shape[0] > problem.experts || t.shape[0] != some) {
      refuse(std::string("weights.") + name + " has memory for " + std::to_string(t.shape[0]) +
             " experts, must have it for 1 to " + std::to_string(problem.experts) + ", gate as up");
    }
    if (!apart || t.stride[1] < 1 || t.stride[2] < 1 || last >= elements) {
      std::string strides;
      for (int i = 0; i < 3; ++i) strides += (i == 0 ? "" : ", ") + std::to_string(t.stride[i]);
      refuse(std::string("weights.") + name + " has strides (" + strides +
             "), must have those of a view of a contiguous tensor (E', rows, columns) of packed." +
             name);
    }
  }
}

Range range_of(std::initializer_list<Tensor> views) {
  Range range;
  for (const Tensor& t : views) {
    if (!given(t)) continue;
    const auto begin = reinterpret_cast<std::uintptr_t>(t.data);
    std::int64_t last = 0;
    for (int i = 0; i < 3; ++i) last += (t.shape[i] - 1) * t.stride[i];
    const std::uintptr_t end =
        begin + static_cast<std::uintptr_t>((last + 1) * dtype_bytes(t.dtype));
    range = range.empty() ? Range{begin, end}
                          : Range{std::min(range.begin, begin), std::max(range.end, end)};
  }
  return range;
}

Buffer buffer_of(const Range& range) {
  return {reinterpret_cast<void*>(range.begin), static_cast<std::int64_t>(range.end - range.begin)};
}

}  // namespace

void unpack_weights(const PackedWeights& p, const Tensor& out, const Exec& e) {
  exec(e);
  sizes(p);
  buffers(p);
  output(out, "out", {{"E", p.experts}, {"rows", p.rows}, {"columns", p.columns}}, kUnpacked);
  contiguous(out);
}

Weights of_all_experts(const Problem& p, Weights w) {
  const std::int64_t matrix = p.width * p.hidden;
  const std::int64_t of_up = gate_factor(p.activation.kind) * matrix;
  for (Tensor* t : {&w.gate, &w.up, &w.down}) {
    if (!given(*t) || t->rank != 3) continue;
    t->shape[0] = p.experts;
    t->stride[0] = t == &w.down ? matrix : of_up;
  }
  return w;
}

void packed_layer(const Problem& p, const Weights& w, const PackedLayer& packed) {
  if (p.precision != Precision::kTensors) {
    refuse("precision is fp8, must be tensors: packed weights of an fp8 layer are unpacked first");
  }
  const std::int64_t matrix = p.width * p.hidden;
  if (is_gated(p.activation.kind)) {
    operand(p, "up", packed.up, {w.up, w.gate}, 2 * matrix);
  } else {
    operand(p, "up", packed.up, {w.up}, matrix);
  }
  operand(p, "down", packed.down, {w.down}, matrix);
}

UnpackedMemory unpacked_memory(const Weights& w) {
  const Range up = range_of({w.gate, w.up}), down = range_of({w.down});
  if (!up.overlaps(down)) return {buffer_of(up), buffer_of(down)};
  return {buffer_of({std::min(up.begin, down.begin), std::max(up.end, down.end)}), {}};
}

}  // namespace sonicmoe::checks
