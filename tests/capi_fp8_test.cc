// Precision::kFp8 through the C interface: the bits of the C++ interface, structs of the version
// before it, and refusals.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "capi_layer.h"

namespace sonicmoe {
namespace {

using testing::Array;
using testing::CapiLayer;
using testing::Memory;

Problem small_problem() {
  Problem p{.tokens = 9, .hidden = 128, .width = 256, .experts = 3, .top_k = 2};
  p.dtype = DType::kBF16;
  p.precision = Precision::kFp8;
  return p;
}

struct Layer : CapiLayer {
  Layer() : CapiLayer(small_problem()) {
    backward.grads.gate = dgate.cpp;
    grads.size = sizeof grads;
    grads.gate = &dgate.c;
    c_backward.grads = &grads;
  }
  Array dgate{DType::kBF16, {E, n, d}, 10};
  smoe_weights grads{};
};

void by_cpp(Layer& l) {
  const Memory fp8(fp8_weights_bytes(l.problem));
  quantize_weights(l.problem, l.weights, fp8.buffer());
  l.forward.fp8_weights = l.backward.fp8_weights = fp8.buffer();
  moe_forward(l.problem, l.forward);
  moe_backward(l.problem, l.backward);
}

void by_c(Layer& l) {
  smoe_sizes sizes{};
  sizes.size = sizeof sizes;
  ASSERT_EQ(smoe_moe_sizes(&l.c_problem, SMOE_FORWARD, nullptr, &sizes), SMOE_OK);
  EXPECT_EQ(sizes.h_bytes, l.h.bytes);
  EXPECT_EQ(sizes.saved_bytes, l.saved.bytes);
  std::int64_t bytes = 0;
  ASSERT_EQ(smoe_fp8_weights_bytes(&l.c_problem, nullptr, &bytes), SMOE_OK);
  const Memory fp8(bytes);
  ASSERT_EQ(smoe_quantize_weights(&l.c_problem, &l.c_weights, fp8.data, fp8.bytes, nullptr),
            SMOE_OK);
  smoe_forward_args& forward = l.c_forward;
  forward.fp8_weights = l.c_backward.fp8_weights = fp8.data;
  forward.fp8_weights_bytes = l.c_backward.fp8_weights_bytes = fp8.bytes;
  ASSERT_EQ(smoe_moe_forward(&l.c_problem, &forward, nullptr), SMOE_OK) << smoe_last_error();
  ASSERT_EQ(smoe_moe_backward(&l.c_problem, &l.c_backward, nullptr), SMOE_OK) << smoe_last_error();
  // A program of the version before has smaller structs: without the weights, fp8 is refused.
  forward.size = offsetof(smoe_forward_args, fp8_weights);
  EXPECT_EQ(smoe_moe_forward(&l.c_problem, &forward, nullptr), SMOE_WORKSPACE_TOO_SMALL);
  EXPECT_EQ(smoe_last_error(),
            "fp8_weights is missing, must have at least " + std::to_string(bytes) + " bytes");
}

TEST(CApiFp8, GivesTheBitsOfCpp) {
  Layer cpp, c;
  by_cpp(cpp);
  by_c(c);
  EXPECT_TRUE(cpp.out == c.out);
  EXPECT_TRUE(cpp.dx == c.dx);
  EXPECT_TRUE(cpp.dgate == c.dgate);
  EXPECT_FALSE(c.dgate == Layer().dgate) << "not written";
}

TEST(CApiFp8, AProblemOfTheVersionBeforeIsInTheTensorsPrecision) {
  Layer l;
  smoe_problem& p = l.c_problem;
  p.size = offsetof(smoe_problem, precision);  // its last bytes are then not looked at
  std::int64_t bytes = -1;
  ASSERT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &bytes), SMOE_OK) << smoe_last_error();
  EXPECT_EQ(bytes, 0);
  p.size -= 1;
  EXPECT_EQ(smoe_fp8_weights_bytes(&p, nullptr, &bytes), SMOE_INVALID_ARGUMENT);
}

TEST(CApiFp8, AutoAndRefusals) {
  Layer l;
  smoe_problem& p = l.c_problem;
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
