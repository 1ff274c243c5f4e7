// Uses the installed C++ headers: one routing, one forward, and an error caught across the library.
#include <cstdio>
#include <cstring>
#include <vector>

#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/version.h"

using namespace sonicmoe;

namespace {

struct alignas(256) Block {
  unsigned char bytes[256];
};

bool routes_and_forwards() {
  std::vector<float> logits = {0, 2, 1, 3, 0, -1}, weights(4), x(8, 0.5f), w(3 * 4 * 4, 0.25f),
                     out(8, -1.0f);
  std::vector<std::int32_t> ids(4, -7);
  route({.top_k = 2}, tensor2(logits.data(), DType::kF32, 2, 3),
        tensor2(ids.data(), DType::kI32, 2, 2), tensor2(weights.data(), DType::kF32, 2, 2));
  const std::int32_t expected[] = {1, 2, 0, 1};
  if (std::memcmp(ids.data(), expected, sizeof(expected)) != 0) return false;

  Problem p{.tokens = 2, .hidden = 4, .width = 4, .experts = 3, .top_k = 2};
  p.activation.kind = ActivationKind::kReLU;
  const Sizes sizes = moe_sizes(p, Pass::kInference);
  std::vector<Block> scratch(static_cast<std::size_t>(sizes.scratch_bytes / 256 + 1));
  ForwardArgs args;
  args.x = tensor2(x.data(), DType::kF32, 2, 4);
  args.routing.ids = tensor2(ids.data(), DType::kI32, 2, 2);
  args.routing.weights = tensor2(weights.data(), DType::kF32, 2, 2);
  args.weights.up = tensor3(w.data(), DType::kF32, 3, 4, 4);
  args.weights.down = tensor3(w.data(), DType::kF32, 3, 4, 4);
  args.out = tensor2(out.data(), DType::kF32, 2, 4);
  args.scratch = {scratch.data(), static_cast<std::int64_t>(scratch.size() * sizeof(Block))};
  moe_forward(p, args);
  for (float v : out) {  // relu(4 * 0.5 * 0.25) = 0.5, then 4 * 0.5 * 0.25, weights sum to one
    if (v < 0.499f || v > 0.501f) return false;
  }
  return true;
}

bool refuses() {
  try {
    moe_sizes({.tokens = -1}, Pass::kInference);
  } catch (const Error& e) {
    return e.status() == Status::kInvalidArgument;
  }
  return false;
}

}  // namespace

int main() {
  if (std::strcmp(version_string(), SONICMOE_VERSION_STRING) != 0) return 1;
  if (!routes_and_forwards()) return 2;
  if (!refuses()) return 3;
  std::puts("consumer works");
  return 0;
}
