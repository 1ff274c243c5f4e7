// One MoE layer from C++: route, forward, backward. docs/cpp.md shows this file's body.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"

using namespace sonicmoe;

std::vector<float> normal(std::int64_t count, float scale) {
  static std::mt19937 generator(0);
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<float> values(count);
  for (float& v : values) v = draw(generator);
  return values;
}

Tensor matrix(std::vector<float>& v, std::int64_t rows, std::int64_t cols) {
  return tensor2(v.data(), DType::kF32, rows, cols);
}

// Memory that the library uses for one step, aligned as the library requires.
struct Lent {
  explicit Lent(std::int64_t bytes)
      : memory(std::aligned_alloc(256, (bytes + 255) / 256 * 256), &std::free),
        buffer{memory.get(), bytes} {}
  std::unique_ptr<void, decltype(&std::free)> memory;
  Buffer buffer;
};

int main() {
  // [readme
  const std::int64_t T = 256, d = 64, n = 32, E = 16, K = 4;
  auto x = normal(T * d, 1), w1 = normal(E * 2 * n * d, 0.1f), w2 = normal(E * d * n, 0.1f);
  auto logits = normal(T * E, 1), out = x, dout = x, dx = x, dw1 = w1, dw2 = w2;
  std::vector<std::int64_t> ids(T * K);
  std::vector<float> scores(T * K), dscores(T * K);
  const Routing routing{.ids = tensor2(ids.data(), DType::kI64, T, K),
                        .weights = matrix(scores, T, K)};
  route({.top_k = K}, matrix(logits, T, E), routing.ids, routing.weights);

  // W1 (E, 2n, d) holds [gate; up]: two views of one tensor, by stride.
  auto halves = [&](auto& w) {
    return std::pair(Tensor{w.data(), DType::kF32, 3, {E, n, d}, {2 * n * d, d, 1}},
                     Tensor{w.data() + n * d, DType::kF32, 3, {E, n, d}, {2 * n * d, d, 1}});
  };
  const auto [gate, up] = halves(w1);
  const auto [dgate, dup] = halves(dw1);
  const Weights weights{.gate = gate, .up = up, .down = tensor3(w2.data(), DType::kF32, E, d, n)};
  const Problem problem{.tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K};

  const Sizes size = moe_sizes(problem, Pass::kForward);
  const Sizes back = moe_sizes(problem, Pass::kBackward);
  Lent h(size.h_bytes), saved(size.saved_bytes),
      scratch(std::max(size.scratch_bytes, back.scratch_bytes));
  moe_forward(problem, {matrix(x, T, d), routing, weights, matrix(out, T, d), h.buffer,
                        saved.buffer, scratch.buffer});
  moe_backward(
      problem,
      {.x = matrix(x, T, d),
       .routing = routing,
       .weights = weights,
       .dout = matrix(dout, T, d),
       .h = h.buffer,
       .saved = saved.buffer,
       .scratch = scratch.buffer,
       .dx = matrix(dx, T, d),
       .dweights = matrix(dscores, T, K),
       .grads = {.gate = dgate, .up = dup, .down = tensor3(dw2.data(), DType::kF32, E, d, n)}});
  // readme]
  std::printf("kept for backward: %lld bytes; out[0] = %f\n",
              static_cast<long long>(size.h_bytes + size.saved_bytes), out[0]);
  return 0;
}
