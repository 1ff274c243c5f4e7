// A captured step is valid for every routing: no launch depends on device values.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "device_array.h"
#include "each_engine.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

constexpr std::int64_t kT = 301, kD = 200, kN = 72, kE = 9, kK = 3;

using testing::must;
using Array = testing::DeviceArray;

/// Bits of random bf16 values in [-1, 1).
std::vector<std::uint16_t> values(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<std::uint16_t> out(static_cast<std::size_t>(count));
  for (std::uint16_t& v : out) {
    const float f = uniform(random);
    std::uint32_t word;
    __builtin_memcpy(&word, &f, 4);
    v = static_cast<std::uint16_t>(word >> 16);
  }
  return out;
}

/// Ids below `experts`, with some empty slots.
std::vector<std::int32_t> routing(unsigned seed, int experts) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> ids(kT * kK);
  for (std::int32_t& id : ids) id = static_cast<int>(random() % (experts + 1)) - 1;
  return ids;
}

class CudaGraph : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaGraph);

TEST_P(CudaGraph, ReplaysOverOtherRoutings) {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Problem problem;
  problem.tokens = kT;
  problem.hidden = kD;
  problem.width = kN;
  problem.experts = kE;
  problem.top_k = kK;
  problem.dtype = DType::kBF16;
  Exec exec = this->exec();
  exec.stream = stream;
  const Sizes forward = moe_sizes(problem, Pass::kForward, exec);
  const Sizes backward = moe_sizes(problem, Pass::kBackward, exec);
  Array x(kT * kD * 2), dout(kT * kD * 2), w1(kE * 2 * kN * kD * 2), w2(kE * kD * kN * 2);
  Array ids(kT * kK * 4), weights(kT * kK * 4), out(kT * kD * 2), dx(kT * kD * 2);
  Array dw1(kE * 2 * kN * kD * 2), dw2(kE * kD * kN * 2), dweights(kT * kK * 4);
  Array h(forward.h_bytes), saved(forward.saved_bytes);
  Array scratch(std::max(forward.scratch_bytes, backward.scratch_bytes));
  x.set(values(kT * kD, 1));
  dout.set(values(kT * kD, 2));
  w1.set(values(kE * 2 * kN * kD, 3));
  w2.set(values(kE * kD * kN, 4));
  weights.set(std::vector<float>(kT * kK, 0.3f));

  const auto halves = [](const Array& a) {
    Weights w;
    w.gate = tensor3(a.data(), DType::kBF16, kE, kN, kD);
    w.gate.stride[0] *= 2;
    w.up = w.gate;
    w.up.data = static_cast<std::uint16_t*>(a.data()) + kN * kD;
    return w;
  };
  ForwardArgs f;
  f.x = tensor2(x.data(), DType::kBF16, kT, kD);
  f.routing.ids = tensor2(ids.data(), DType::kI32, kT, kK);
  f.routing.weights = tensor2(weights.data(), DType::kF32, kT, kK);
  f.weights = halves(w1);
  f.weights.down = tensor3(w2.data(), DType::kBF16, kE, kD, kN);
  f.out = tensor2(out.data(), DType::kBF16, kT, kD);
  f.h = h.buffer();
  f.saved = saved.buffer();
  f.scratch = scratch.buffer();
  BackwardArgs b;
  b.x = f.x;
  b.routing = f.routing;
  b.weights = f.weights;
  b.dout = tensor2(dout.data(), DType::kBF16, kT, kD);
  b.h = f.h;
  b.saved = f.saved;
  b.scratch = f.scratch;
  b.dx = tensor2(dx.data(), DType::kBF16, kT, kD);
  b.dweights = tensor2(dweights.data(), DType::kF32, kT, kK);
  b.grads = halves(dw1);
  b.grads.down = tensor3(dw2.data(), DType::kBF16, kE, kD, kN);
  const auto step = [&] {
    moe_forward(problem, f, exec);
    moe_backward(problem, b, exec);
  };

  ids.set(routing(10, kE));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step();
  must(cudaStreamEndCapture(stream, &graph));
  must(cudaGraphInstantiate(&replay, graph, 0));
  for (const auto& [seed, experts] : {std::pair{10u, 9}, {11u, 9}, {12u, 1}, {13u, 0}, {14u, 5}}) {
    ids.set(routing(seed, experts));
    step();
    must(cudaStreamSynchronize(stream));
    const std::vector<std::vector<std::uint8_t>> direct = {out.get(), dx.get(), dw1.get(),
                                                           dw2.get(), dweights.get()};
    for (Array* a : {&out, &dx, &dw1, &dw2, &dweights}) a->fill(0xff);
    must(cudaGraphLaunch(replay, stream));
    must(cudaStreamSynchronize(stream));
    EXPECT_EQ(direct[0], out.get());
    EXPECT_EQ(direct[1], dx.get());
    EXPECT_EQ(direct[2], dw1.get());
    EXPECT_EQ(direct[3], dw2.get());
    EXPECT_EQ(direct[4], dweights.get());
  }
  must(cudaGraphExecDestroy(replay));
  must(cudaGraphDestroy(graph));
  must(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace sonicmoe
