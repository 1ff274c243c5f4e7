// Equal inputs give equal bits on any number of multiprocessors and with work on another stream.
#include "device_layer.h"
#include "each_engine.h"
#include "sonicmoe/routing.h"
#include "whole_layer.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::LayerShape;
using testing::must;
using testing::Periodic;
using testing::WholeLayer;

class CudaDeterminism : public testing::EachEngine {
 protected:
  void SetUp() override {
    EachEngine::SetUp();
    if (IsSkipped()) return;
    exec_ = exec();
    must(cudaStreamCreateWithFlags(&busy_, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (busy_ != nullptr) cudaStreamDestroy(busy_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    EachEngine::TearDown();
  }

  Exec exec_;
  cudaStream_t busy_ = nullptr;
  cudaStream_t stream_ = nullptr;
};
SONICMOE_FOR_EACH_ENGINE(CudaDeterminism);

TEST_P(CudaDeterminism, LayerOnFewerMultiprocessors) {
  auto* fewer = const_cast<cuda::Device*>(open());  // a handle that only this test uses
  Exec exec = exec_;
  exec.device = fewer;
  // On 34 multiprocessors the second layer has so few tiles that dX~ begins while dH runs. The
  // third has a dynamic tile order in A; on few multiprocessors a CTA takes more than one tile. The
  // first two layers have a dynamic order in dH, whose last wave is small enough to be split: on 54
  // multiprocessors in both layers, on 34 also in the first layer.
  const LayerShape shapes[] = {
      {3001, 264, 200, 40, 4}, {3001, 264, 520, 40, 4}, {700, 2312, 136, 2, 1}};
  for (const LayerShape& shape : shapes) {
    WholeLayer whole(shape, exec_);
    const Bits want = whole.run(exec_);
    for (const int multiprocessors : {2, 3, 34, 54, 130}) {
      fewer->multiprocessors = multiprocessors;
      ASSERT_EQ(whole.run(exec), want)
          << multiprocessors << " multiprocessors, d = " << shape.hidden << ", n = " << shape.width;
    }
  }
  cuda::close_device(fewer);
}

TEST_P(CudaDeterminism, LayerBesideAnother) {
  WholeLayer whole({3001, 264, 200, 40, 4}, exec_);
  WholeLayer neighbour({2000, 512, 512, 8, 2}, exec_);
  const Bits want = whole.run(exec_);
  Exec beside = exec_;
  beside.stream = stream_;
  Exec busy = exec_;
  busy.stream = busy_;
  for (int repeat = 0; repeat < 3; ++repeat) {
    whole.layer.poison();
    for (int i = 0; i < 20; ++i) neighbour.layer.step(busy);
    whole.layer.step(beside);
    must(cudaDeviceSynchronize());
    Bits bits;
    for (const DeviceArray* a : whole.layer.results()) bits.push_back(a->get());
    ASSERT_EQ(bits, want);
  }
}

TEST_P(CudaDeterminism, RoutingBesideALayer) {
  constexpr std::int64_t kT = 9001, kE = 96, kK = 6;
  WholeLayer neighbour({2000, 512, 512, 8, 2}, exec_);
  const Periodic logits(kT * kE, 5);  // three values: ties everywhere
  RoundOptions options;
  options.route.top_k = kK;
  options.mode = RoundingMode::kScore;
  const std::int64_t capacity = round_capacity(options, kT, kE);
  DeviceArray ids(kT * kK * 8), weights(kT * kK * 4), lists(3 * capacity * 4), offsets(97 * 8);
  DeviceArray scratch(round_scratch_bytes(options, kT, kE, exec_));
  const Tensor x = tensor2(logits.data(), DType::kBF16, kT, kE);
  auto* words = static_cast<std::int32_t*>(lists.data());
  const Pairs pairs{tensor1(words, DType::kI32, capacity),
                    tensor1(words + capacity, DType::kI32, capacity),
                    tensor1(words + 2 * capacity, DType::kF32, capacity),
                    tensor1(offsets.data(), DType::kI64, kE + 1)};
  const auto run = [&](const Exec& exec) {
    for (DeviceArray* a : {&ids, &weights, &lists, &offsets, &scratch}) a->fill(0xff);
    must(cudaStreamSynchronize(nullptr));
    route(options.route, x, tensor2(ids.data(), DType::kI64, kT, kK),
          tensor2(weights.data(), DType::kF32, kT, kK), exec);
    token_round(options, x, pairs, scratch.buffer(), exec);
    must(cudaStreamSynchronize(static_cast<cudaStream_t>(exec.stream)));
    return Bits{ids.get(), weights.get(), lists.get(), offsets.get()};
  };
  const Bits want = run(exec_);
  Exec beside = exec_;
  beside.stream = stream_;
  Exec busy = exec_;
  busy.stream = busy_;
  for (int repeat = 0; repeat < 3; ++repeat) {
    for (int i = 0; i < 20; ++i) neighbour.layer.step(busy);
    ASSERT_EQ(run(beside), want);
    must(cudaDeviceSynchronize());
  }
}

}  // namespace
}  // namespace sonicmoe
