// Precision::kFp8 through the C interface: the bits of the C++ interface, structs of the version
// before it, and refusals.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/numeric.h"
#include "sonicmoe/c_api.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t T = 9, d = 128, n = 256, E = 3, K = 2;

/// Aligned memory, filled with bytes that nobody should read.
struct Memory {
  explicit Memory(std::int64_t size)
      : bytes(size), storage(static_cast<std::size_t>(size) + 256, 0xa5) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage.data());
    data = storage.data() + (256 - address % 256) % 256;
  }
  std::int64_t bytes;
  std::vector<std::uint8_t> storage;
  std::uint8_t* data;
};

struct Array {
  Array(std::vector<std::int64_t> sizes, DType type, std::uint32_t seed)
      : shape(std::move(sizes)), dtype(type), memory(count() * dtype_bytes(type)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count(); ++i) {
      const float v = normal(random);
      if (type == DType::kI32) {
        reinterpret_cast<std::int32_t*>(memory.data)[i] = static_cast<std::int32_t>(random() % E);
      } else if (type == DType::kF32) {
        reinterpret_cast<float*>(memory.data)[i] = v;
      } else {
        reinterpret_cast<BF16*>(memory.data)[i] = to_bf16(v);
      }
    }
  }
  std::int64_t count() const {
    std::int64_t product = 1;
    for (const std::int64_t size : shape) product *= size;
    return product;
  }
  Tensor view() const {
    auto* data = const_cast<std::uint8_t*>(memory.data);
    if (shape.size() == 2) return tensor2(data, dtype, shape[0], shape[1]);
    return tensor3(data, dtype, shape[0], shape[1], shape[2]);
  }
  smoe_tensor c() const {
    const Tensor v = view();
    smoe_tensor t{};
    t.size = sizeof t;
    t.dtype = static_cast<std::int32_t>(v.dtype);
    t.rank = v.rank;
    t.data = v.data;
    std::copy_n(v.shape, 3, t.shape);
    std::copy_n(v.stride, 3, t.stride);
    return t;
  }
  std::vector<std::int64_t> shape;
  DType dtype;
  Memory memory;
};

smoe_problem c_problem() {
  smoe_problem p{};
  p.size = sizeof p;
  p.dtype = SMOE_BF16;
  p.tokens = T;
  p.hidden = d;
  p.width = n;
  p.experts = E;
  p.top_k = K;
  p.precision = SMOE_PRECISION_FP8;
  return p;
}

Problem cpp_problem() {
  Problem p{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};
  p.dtype = DType::kBF16;
  p.precision = Precision::kFp8;
  return p;
}

struct Values {
  Array x{{T, d}, DType::kBF16, 1}, dout{{T, d}, DType::kBF16, 2};
  Array gate{{E, n, d}, DType::kBF16, 3}, up{{E, n, d}, DType::kBF16, 4};
  Array down{{E, d, n}, DType::kBF16, 5};
  Array ids{{T, K}, DType::kI32, 6}, scores{{T, K}, DType::kF32, 7};
};

struct Results {
  Array out{{T, d}, DType::kBF16, 8}, dx{{T, d}, DType::kBF16, 9};
  Array dgate{{E, n, d}, DType::kBF16, 10};
};

void by_cpp(const Values& v, Results& r) {
  const Problem p = cpp_problem();
  const Sizes f = moe_sizes(p, Pass::kForward), b = moe_sizes(p, Pass::kBackward);
  const Memory h(f.h_bytes), saved(f.saved_bytes);
  const Memory scratch(std::max(f.scratch_bytes, b.scratch_bytes)), fp8(fp8_weights_bytes(p));
  const auto lend = [](const Memory& m) { return Buffer{m.data, m.bytes}; };
  Routing routing;
  routing.ids = v.ids.view();
  routing.weights = v.scores.view();
  Weights weights;
  weights.gate = v.gate.view();
  weights.up = v.up.view();
  weights.down = v.down.view();
  quantize_weights(p, weights, lend(fp8));
  moe_forward(p, {v.x.view(), routing, weights, r.out.view(), lend(h), lend(saved), lend(scratch),
                  lend(fp8)});
  BackwardArgs args;
  args.x = v.x.view();
  args.routing = routing;
  args.weights = weights;
  args.dout = v.dout.view();
  args.h = lend(h);
  args.saved = lend(saved);
  args.scratch = lend(scratch);
  args.dx = r.dx.view();
  args.grads.gate = r.dgate.view();
  args.fp8_weights = lend(fp8);
  moe_backward(p, args);
}

void by_c(const Values& v, Results& r) {
  const smoe_problem p = c_problem();
  smoe_sizes f{}, b{};
  f.size = b.size = sizeof f;
  ASSERT_EQ(smoe_moe_sizes(&p, SMOE_FORWARD, nullptr, &f), SMOE_OK) << smoe_last_error();
  ASSERT_EQ(smoe_moe_sizes(&p, SMOE_BACKWARD, nullptr, &b), SMOE_OK);
  std::int64_t bytes = 0;
  ASSERT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &bytes), SMOE_OK);
  const Memory h(f.h_bytes), saved(f.saved_bytes), fp8(bytes);
  const Memory scratch(std::max(f.scratch_bytes, b.scratch_bytes));
  const smoe_tensor x = v.x.c(), dout = v.dout.c(), ids = v.ids.c(), scores = v.scores.c();
  const smoe_tensor gate = v.gate.c(), up = v.up.c(), down = v.down.c();
  const smoe_tensor out = r.out.c(), dx = r.dx.c(), dgate = r.dgate.c();
  smoe_routing routing{};
  routing.size = sizeof routing;
  routing.ids = &ids;
  routing.weights = &scores;
  smoe_weights weights{}, grads{};
  weights.size = grads.size = sizeof weights;
  weights.gate = &gate;
  weights.up = &up;
  weights.down = &down;
  grads.gate = &dgate;
  ASSERT_EQ(smoe_quantize_weights(&p, &weights, fp8.data, fp8.bytes, nullptr), SMOE_OK);
  smoe_forward_args forward{};
  forward.size = sizeof forward;
  forward.x = &x;
  forward.routing = &routing;
  forward.weights = &weights;
  forward.out = &out;
  forward.h = h.data;
  forward.h_bytes = h.bytes;
  forward.saved = saved.data;
  forward.saved_bytes = saved.bytes;
  forward.scratch = scratch.data;
  forward.scratch_bytes = scratch.bytes;
  forward.fp8_weights = fp8.data;
  forward.fp8_weights_bytes = fp8.bytes;
  ASSERT_EQ(smoe_moe_forward(&p, &forward, nullptr), SMOE_OK) << smoe_last_error();
  smoe_backward_args backward{};
  backward.size = sizeof backward;
  backward.x = &x;
  backward.routing = &routing;
  backward.weights = &weights;
  backward.dout = &dout;
  backward.h = h.data;
  backward.h_bytes = h.bytes;
  backward.saved = saved.data;
  backward.saved_bytes = saved.bytes;
  backward.scratch = scratch.data;
  backward.scratch_bytes = scratch.bytes;
  backward.dx = &dx;
  backward.grads = &grads;
  backward.fp8_weights = fp8.data;
  backward.fp8_weights_bytes = fp8.bytes;
  ASSERT_EQ(smoe_moe_backward(&p, &backward, nullptr), SMOE_OK) << smoe_last_error();
  // A program of the version before has smaller structs: without the weights, fp8 is refused.
  forward.size = offsetof(smoe_forward_args, fp8_weights);
  EXPECT_EQ(smoe_moe_forward(&p, &forward, nullptr), SMOE_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(smoe_last_error(),
            "fp8_weights is missing, must have at least " + std::to_string(bytes) + " bytes");
}

TEST(CApiFp8, GivesTheBitsOfCpp) {
  const Values values;
  Results cpp, c;
  by_cpp(values, cpp);
  by_c(values, c);
  const auto same = [](const Array& a, const Array& b) {
    return std::memcmp(a.memory.data, b.memory.data, static_cast<std::size_t>(a.memory.bytes)) == 0;
  };
  EXPECT_TRUE(same(cpp.out, c.out));
  EXPECT_TRUE(same(cpp.dx, c.dx));
  EXPECT_TRUE(same(cpp.dgate, c.dgate));
}

TEST(CApiFp8, AProblemOfTheVersionBeforeIsInTheTensorsPrecision) {
  smoe_problem p = c_problem();
  p.size = offsetof(smoe_problem, precision);  // its last bytes are then not looked at
  std::int64_t bytes = -1;
  ASSERT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &bytes), SMOE_OK) << smoe_last_error();
  EXPECT_EQ(bytes, 0);
  p.size -= 1;
  EXPECT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &bytes), SMOE_INVALID_ARGUMENT);
}

TEST(CApiFp8, AutoAndRefusals) {
  smoe_problem p = c_problem();
  std::int32_t precision = -1;
  ASSERT_EQ(smoe_auto_precision(&p, nullptr, &precision), SMOE_OK) << smoe_last_error();
  EXPECT_EQ(precision, SMOE_PRECISION_TENSORS);  // on the CPU
  EXPECT_EQ(smoe_auto_precision(&p, nullptr, nullptr), SMOE_INVALID_ARGUMENT);
  EXPECT_EQ(smoe_fp8_weights_bytes(&p, nullptr, nullptr), SMOE_INVALID_ARGUMENT);
  EXPECT_STREQ(smoe_last_error(), "bytes is null, must not be null");
  EXPECT_EQ(smoe_quantize_weights(&p, nullptr, nullptr, 0, nullptr), SMOE_INVALID_ARGUMENT);
  p.precision = 7;
  EXPECT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &p.tokens), SMOE_INVALID_ARGUMENT);
  EXPECT_STREQ(smoe_last_error(), "precision is 7, must be in 0 to 1");
}

}  // namespace
}  // namespace sonicmoe
