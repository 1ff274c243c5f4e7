// Gradients that are added to the caller's buffers.
#include <algorithm>

#include "device_array.h"
#include "each_engine.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::must;

class CudaAccumulate : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaAccumulate);

// -0 + 0 is +0, so a gradient of 0 must not be added.
TEST_P(CudaAccumulate, ExpertsWithoutRowsDoNotChange) {
  constexpr std::int64_t kWidth = 64, kExperts = 2, kMatrix = kWidth * kWidth;
  constexpr std::uint32_t kMinusZero = 0x80000000u;
  const Exec exec = this->exec();
  Problem p;
  p.tokens = p.top_k = 1;
  p.hidden = p.width = kWidth;
  p.experts = kExperts;
  p.dtype = DType::kBF16;
  p.activation.kind = ActivationKind::kReLU;
  const Sizes forward = moe_sizes(p, Pass::kForward, exec);
  const Sizes backward = moe_sizes(p, Pass::kBackward, exec);
  DeviceArray row(kWidth * 2, 0), matrices(kExperts * kMatrix * 2, 0), out(kWidth * 2);
  DeviceArray id(4, 0), weight(4, 0), h(forward.h_bytes), saved(forward.saved_bytes);
  DeviceArray scratch(std::max(forward.scratch_bytes, backward.scratch_bytes));
  DeviceArray up(kExperts * kMatrix * 4), down(kExperts * kMatrix * 4);
  const std::vector<std::uint32_t> before(kExperts * kMatrix, kMinusZero);
  up.set(before);
  down.set(before);

  ForwardArgs f;
  f.x = tensor2(row.data(), DType::kBF16, 1, kWidth);
  f.routing.ids = tensor2(id.data(), DType::kI32, 1, 1);  // the only row is expert 0's
  f.routing.weights = tensor2(weight.data(), DType::kF32, 1, 1);
  f.weights.up = tensor3(matrices.data(), DType::kBF16, kExperts, kWidth, kWidth);
  f.weights.down = f.weights.up;
  f.out = tensor2(out.data(), DType::kBF16, 1, kWidth);
  f.h = h.buffer();
  f.saved = saved.buffer();
  f.scratch = scratch.buffer();
  moe_forward(p, f, exec);
  BackwardArgs b;
  b.x = b.dout = f.x;
  b.routing = f.routing;
  b.weights = f.weights;
  b.h = f.h;
  b.saved = f.saved;
  b.scratch = f.scratch;
  b.grads.up = tensor3(up.data(), DType::kF32, kExperts, kWidth, kWidth);
  b.grads.down = tensor3(down.data(), DType::kF32, kExperts, kWidth, kWidth);
  b.grad_mode = GradMode::kAccumulate;
  moe_backward(p, b, exec);
  must(cudaDeviceSynchronize());
  for (const DeviceArray* grad : {&up, &down}) {
    const auto after = grad->get<std::uint32_t>();
    EXPECT_EQ(std::count(after.begin() + kMatrix, after.end(), kMinusZero), kMatrix);
  }
}

}  // namespace
}  // namespace sonicmoe
