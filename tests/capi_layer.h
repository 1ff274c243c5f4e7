// A layer with the arguments of the C++ and of the C interface on the same memory, for tests in
// which both must give the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/numeric.h"
#include "sonicmoe/c_api.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::testing {

/// Memory at a multiple of 256 bytes, filled with bytes that nobody should read.
struct Memory {
  explicit Memory(std::int64_t size)
      : bytes(size), storage(static_cast<std::size_t>(size) + 256, 0xa5) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    data = storage.data() + (256 - address % 256) % 256;
  }
  Memory(const Memory&) = delete;
  Buffer buffer() const { return {data, bytes}; }

  std::int64_t bytes;
  std::vector<std::uint8_t> storage;
  std::uint8_t* data;
};

/// A dense tensor of two or three dimensions: normal values in bf16 or fp32, or integers below
/// `limit` in int32.
struct Array {
  Array(DType dtype, const std::vector<std::int64_t>& shape, std::uint32_t seed,
        std::int32_t limit = 0)
      : memory(count(shape) * dtype_bytes(dtype)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count(shape); ++i) {
      if (dtype == DType::kI32) {
        reinterpret_cast<std::int32_t*>(memory.data)[i] =
            static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(limit));
      } else if (dtype == DType::kF32) {
        reinterpret_cast<float*>(memory.data)[i] = normal(random);
      } else {
        reinterpret_cast<BF16*>(memory.data)[i] = to_bf16(normal(random));
      }
    }
    cpp = shape.size() == 2 ? tensor2(memory.data, dtype, shape[0], shape[1])
                            : tensor3(memory.data, dtype, shape[0], shape[1], shape[2]);
    c.size = sizeof c;
    c.dtype = static_cast<std::int32_t>(dtype);
    c.rank = cpp.rank;
    c.data = cpp.data;
    std::copy_n(cpp.shape, 3, c.shape);
    std::copy_n(cpp.stride, 3, c.stride);
  }
  static std::int64_t count(const std::vector<std::int64_t>& shape) {
    std::int64_t product = 1;
    for (const std::int64_t size : shape) product *= size;
    return product;
  }
  bool operator==(const Array& other) const {
    return memory.bytes == other.memory.bytes &&
           std::memcmp(memory.data, other.memory.data, static_cast<std::size_t>(memory.bytes)) == 0;
  }

  Memory memory;
  Tensor cpp;
  smoe_tensor c{};
};

/// Two layers of equal problems hold equal values.
struct CapiLayer {
  explicit CapiLayer(const Problem& p) : problem(p) {
    c_problem.size = sizeof c_problem;
    c_problem.dtype = static_cast<std::int32_t>(p.dtype);
    c_problem.tokens = p.tokens;
    c_problem.hidden = p.hidden;
    c_problem.width = p.width;
    c_problem.experts = p.experts;
    c_problem.top_k = p.top_k;
    c_problem.precision = static_cast<std::int32_t>(p.precision);
    c_problem.up_rank = p.up_rank;
    c_problem.down_rank = p.down_rank;
    c_routing.size = sizeof c_routing;
    c_routing.ids = &ids.c;
    c_routing.weights = &scores.c;
    c_weights.size = sizeof c_weights;
    c_weights.gate = &gate.c;
    c_weights.up = &up.c;
    c_weights.down = &down.c;
    c_forward.size = sizeof c_forward;
    c_forward.out = &out.c;
    lend(c_forward);
    c_backward.size = sizeof c_backward;
    c_backward.dout = &dout.c;
    c_backward.dx = &dx.c;
    lend(c_backward);
    routing.ids = ids.cpp;
    routing.weights = scores.cpp;
    weights.gate = gate.cpp;
    weights.up = up.cpp;
    weights.down = down.cpp;
    forward = {x.cpp, routing, weights, out.cpp, h.buffer(), saved.buffer(), scratch.buffer()};
    backward = {x.cpp, routing, weights, dout.cpp, h.buffer(), saved.buffer(), scratch.buffer()};
    backward.dx = dx.cpp;
  }
  CapiLayer(const CapiLayer&) = delete;

  Problem problem;
  const Sizes of_forward = moe_sizes(problem, Pass::kForward);
  const Sizes of_backward = moe_sizes(problem, Pass::kBackward);
  std::int64_t T = problem.tokens, d = problem.hidden, n = problem.width, E = problem.experts;
  Array x{problem.dtype, {T, d}, 1}, dout{problem.dtype, {T, d}, 2};
  Array gate{problem.dtype, {E, n, d}, 3}, up{problem.dtype, {E, n, d}, 4};
  Array down{problem.dtype, {E, d, n}, 5};
  Array ids{DType::kI32, {T, problem.top_k}, 6, static_cast<std::int32_t>(E)};
  Array scores{DType::kF32, {T, problem.top_k}, 7};
  Array out{problem.dtype, {T, d}, 8}, dx{problem.dtype, {T, d}, 9};
  Memory h{of_forward.h_bytes}, saved{of_forward.saved_bytes};
  Memory scratch{std::max(of_forward.scratch_bytes, of_backward.scratch_bytes)};

  Routing routing;
  Weights weights;
  ForwardArgs forward;
  BackwardArgs backward;
  smoe_problem c_problem{};
  smoe_routing c_routing{};
  smoe_weights c_weights{};
  smoe_forward_args c_forward{};
  smoe_backward_args c_backward{};

 private:
  /// The arguments that both passes have.
  template <class Args>
  void lend(Args& args) {
    args.x = &x.c;
    args.routing = &c_routing;
    args.weights = &c_weights;
    args.h = h.data;
    args.h_bytes = h.bytes;
    args.saved = saved.data;
    args.saved_bytes = saved.bytes;
    args.scratch = scratch.data;
    args.scratch_bytes = scratch.bytes;
  }
};

}  // namespace sonicmoe::testing
