// Calls from several threads, and with handles of devices that are not current.
#include <atomic>
#include <thread>

#include "each_engine.h"
#include "whole_layer.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::LayerShape;
using testing::must;
using testing::WholeLayer;

class CudaHandle : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaHandle);

// Layers of three widths and numbers of experts need different amounts of shared memory. When the
// limit was set to the size of each launch, one thread could lower it after another had set it and
// before that one launched.
TEST_P(CudaHandle, ThreadsWithWidthsOfTheirOwn) {
  const cuda::Device* device = device_;
  const LayerShape shapes[] = {
      {4096, 1536, 64, 512, 4}, {4096, 2048, 64, 1024, 4}, {4096, 768, 64, 128, 4}};
  constexpr int kSteps = 400;
  std::vector<std::unique_ptr<WholeLayer>> layers;
  std::vector<Bits> want;
  for (const LayerShape& shape : shapes) {
    layers.push_back(std::make_unique<WholeLayer>(shape, exec_on(device)));
    want.push_back(layers.back()->run(exec_on(device)));
  }
  std::atomic<int> steps{0};
  std::string failures[3];
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      cudaStream_t stream = nullptr;
      cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
      Exec exec = exec_on(device);
      exec.stream = stream;
      try {
        for (int step = 0; step < kSteps; ++step, ++steps) layers[i]->layer.step(exec);
      } catch (const Error& error) {
        failures[i] = error.what();
      }
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(steps, 3 * kSteps);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(failures[i], "") << "thread " << i;
    Bits bits;
    for (const DeviceArray* a : layers[i]->layer.results()) bits.push_back(a->get());
    EXPECT_EQ(bits, want[i]) << "thread " << i;
  }
}

// The first calls on a handle are made while its device is current, then while another one is.
TEST_P(CudaHandle, AnotherDeviceIsCurrent) {
  int devices = 0;
  must(cudaGetDeviceCount(&devices));
  if (devices < 2) GTEST_SKIP() << "this machine has one GPU";
  const LayerShape shape{2048, 2048, 520, 64, 4};
  must(cudaSetDevice(0));
  WholeLayer on_first(shape, exec());
  const Bits want = on_first.run(exec());
  for (const int current :
       {0, 1}) {  // 0 first: attributes set on the wrong device would be missing
    must(cudaSetDevice(1));
    const cuda::Device* handle = open(1);
    WholeLayer layer(shape, exec_on(handle));
    layer.layer.poison();
    must(cudaSetDevice(current));
    layer.layer.step(exec_on(handle));
    int after = -1;
    must(cudaGetDevice(&after));
    EXPECT_EQ(after, current);
    must(cudaSetDevice(1));
    must(cudaDeviceSynchronize());
    Bits bits;
    for (const DeviceArray* a : layer.layer.results()) bits.push_back(a->get());
    EXPECT_EQ(bits, want) << "device 1 while device " << current << " was current";
    cuda::close_device(handle);
  }
  must(cudaSetDevice(0));
}

TEST(CudaErrors, AFailureLeavesNoErrorToOthers) {
  EXPECT_THROW(cuda::check_cuda(cudaSetDevice(1 << 20), "choosing no device"), Error);
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
}

TEST_P(CudaHandle, AModelTakesNoCalls) {
  const cuda::Device* model = cuda::device_model(device_->capability);
  ASSERT_NE(model, nullptr);
  EXPECT_THROW(cuda::device_of(exec_on(model)), Error);
}

TEST_P(CudaHandle, HasTheEngineThatWasAskedFor) { EXPECT_EQ(device_->engine->name, GetParam()); }

}  // namespace
}  // namespace sonicmoe
