// The stand-in for the CUDA runtime: streams, events and graphs.
#include "runtime_fixture.h"

namespace sonicmoe::emulator {
namespace {

TEST_F(RuntimeTest, AStreamKeepsItsOrder) {
  Words words(1);
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(double_first(words.data(), first_), cudaSuccess);
    ASSERT_EQ(add(words.data(), 1, first_), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(words.get(), Values{(1u << 20) - 1});
}

TEST_F(RuntimeTest, KernelsOfTwoStreamsRunAtOnce) {
  Words word(1);
  ASSERT_EQ(wait_for_word(word.data(), first_), cudaSuccess);
  ASSERT_EQ(add(word.data(), 1, second_), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
}

TEST_F(RuntimeTest, ADependentKernelOverlapsAndWaits) {
  for (int i = 0; i < 20; ++i) {
    Words gate(1), done(1), seen(1);
    std::uint32_t *g = gate.data(), *d = done.data(), *s = seen.data();
    ASSERT_EQ(launch_overlapping("early", 2, {&g, &d}, first_), cudaSuccess);
    ASSERT_EQ(launch_overlapping("dependent", 1, {&g, &d, &s}, first_), cudaSuccess);
    ASSERT_EQ(add(s, 1, first_), cudaSuccess);  // waits for both
    ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
    EXPECT_EQ(seen.get(), Values{2});
  }
}

TEST_F(RuntimeTest, AKernelWithoutTheAttributeDoesNotOverlap) {
  Words gate(1), done(1);
  std::uint32_t *g = gate.data(), *d = done.data();
  ASSERT_EQ(launch_overlapping("early", 2, {&g, &d}, first_), cudaSuccess);
  ASSERT_EQ(double_first(d, first_), cudaSuccess);
  ASSERT_EQ(add(g, 1, second_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(done.get(), Values{2});
}

TEST_F(RuntimeTest, EventsOrderStreams) {
  Words word(1), sum(1);
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, event, 0), cudaSuccess);  // not recorded: no wait
  ASSERT_EQ(wait_for_word(word.data(), first_), cudaSuccess);
  ASSERT_EQ(add(sum.data(), 3, first_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, event, 0), cudaSuccess);
  ASSERT_EQ(double_first(sum.data(), second_), cudaSuccess);
  ASSERT_EQ(add(word.data(), 1, nullptr), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second_), cudaSuccess);
  EXPECT_EQ(sum.get(), Values{6});
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, event), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, first_), cudaErrorInvalidResourceHandle);
}

TEST_F(RuntimeTest, EventsMeasureTime) {
  Words words(32);
  cudaEvent_t begin = nullptr, end = nullptr;
  ASSERT_EQ(cudaEventCreate(&begin), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&end), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(begin, first_), cudaSuccess);
  ASSERT_EQ(add(words.data(), 1, first_, 32), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(end, first_), cudaSuccess);
  ASSERT_EQ(cudaEventSynchronize(end), cudaSuccess);
  float milliseconds = -1;
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
  EXPECT_GT(milliseconds, 0.0f);
  EXPECT_EQ(words.get(), Values(32, 1));
  EXPECT_EQ(cudaEventDestroy(begin), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(end), cudaSuccess);
}

TEST_F(RuntimeTest, BlockingStreamsWaitForTheDefaultStream) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  Words word(1), sum(1);
  ASSERT_EQ(wait_for_word(word.data(), nullptr), cudaSuccess);
  ASSERT_EQ(add(sum.data(), 3, nullptr), cudaSuccess);
  ASSERT_EQ(double_first(sum.data(), blocking), cudaSuccess);
  ASSERT_EQ(add(word.data(), 1, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
  EXPECT_EQ(sum.get(), Values{6});
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(RuntimeTest, TheDefaultStreamWaitsForBlockingStreams) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  Words word(1), sum(1);
  ASSERT_EQ(wait_for_word(word.data(), blocking), cudaSuccess);
  ASSERT_EQ(add(sum.data(), 1, blocking), cudaSuccess);
  ASSERT_EQ(double_first(sum.data(), nullptr), cudaSuccess);
  ASSERT_EQ(add(sum.data(), 1, blocking), cudaSuccess);
  ASSERT_EQ(double_first(sum.data(), cudaStreamLegacy), cudaSuccess);
  ASSERT_EQ(add(word.data(), 1, first_), cudaSuccess);  // would not run if it waited as well
  ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  EXPECT_EQ(sum.get(), Values{6});
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_F(RuntimeTest, ADestroyedStreamEndsItsWork) {
  Words word(1), sum(1);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -1), cudaSuccess);
  ASSERT_EQ(wait_for_word(word.data(), stream), cudaSuccess);
  ASSERT_EQ(add(sum.data(), 1, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  ASSERT_EQ(add(word.data(), 1, first_), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(sum.get(), Values{1});
  EXPECT_EQ(add(sum.data(), 1, stream), cudaErrorInvalidResourceHandle);
}

class RuntimeGraphTest : public RuntimeTest {
 protected:
  void SetUp() override {
    RuntimeTest::SetUp();
    ASSERT_EQ(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaEventDestroy(fork_), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(join_), cudaSuccess);
    RuntimeTest::TearDown();
  }
  void begin() {
    ASSERT_EQ(cudaStreamBeginCapture(first_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  }
  cudaError_t end() {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(first_, &graph);
    EXPECT_EQ(graph != nullptr, status == cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph),
              graph != nullptr ? cudaSuccess : cudaErrorInvalidResourceHandle);
    return status;
  }

  cudaEvent_t fork_ = nullptr, join_ = nullptr;
};

TEST_F(RuntimeGraphTest, ReplaysWhatForkedStreamsDid) {
  Words words(2);
  begin();
  ASSERT_EQ(cudaMemsetAsync(words.data(), 0, 4, first_), cudaSuccess);
  ASSERT_EQ(add(words.data(), 3, first_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(fork_, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, fork_, 0), cudaSuccess);
  ASSERT_EQ(double_first(words.data(), second_), cudaSuccess);
  ASSERT_EQ(add(words.data() + 1, 1, first_), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(join_, second_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(first_, join_, 0), cudaSuccess);
  ASSERT_EQ(add(words.data(), 1, first_), cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(first_, &graph), cudaSuccess);
  EXPECT_EQ(words.get(), (Values{0, 0})) << "nothing ran while it was captured";
  cudaGraphExec_t replay = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaGraphUpload(replay, second_), cudaSuccess);
  for (std::uint32_t i = 1; i < 4; ++i) {
    ASSERT_EQ(cudaGraphLaunch(replay, second_), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(second_), cudaSuccess);
    EXPECT_EQ(words.get(), (Values{7, i}));
  }
  EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(replay, second_), cudaErrorInvalidResourceHandle);
}

TEST_F(RuntimeGraphTest, RefusesCallsThatWouldWait) {
  Words words(1);
  const auto expect_refused = [&](auto call) {
    begin();
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  };
  expect_refused([&] { return cudaStreamSynchronize(first_); });
  expect_refused([&] { return cudaDeviceSynchronize(); });
  void *memory = nullptr;
  expect_refused([&] { return cudaMalloc(&memory, 4); });
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(add(words.data(), 1, first_), cudaSuccess) << "the stream can be used again";
}

TEST_F(RuntimeGraphTest, RefusesWorkThatIsNotJoined) {
  Words words(1);
  begin();
  ASSERT_EQ(cudaEventRecord(fork_, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(second_, fork_, 0), cudaSuccess);
  ASSERT_EQ(add(words.data(), 1, second_), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(fork_), cudaErrorCapturedEvent);
  EXPECT_EQ(end(), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(end(), cudaErrorIllegalState);
}

TEST_F(RuntimeGraphTest, RefusesToMixCapturesAndOtherWork) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(fork_, second_), cudaSuccess);
  begin();
  EXPECT_EQ(cudaStreamWaitEvent(first_, fork_, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  begin();
  ASSERT_EQ(cudaStreamBeginCapture(second_, cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(join_, second_), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(first_, join_, 0), cudaErrorStreamCaptureMerge);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(second_, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(end(), cudaErrorStreamCaptureInvalidated);
  ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
  std::uint32_t word = 0;
  EXPECT_EQ(cudaMemcpy(&word, &word, 4, cudaMemcpyDefault), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

}  // namespace
}  // namespace sonicmoe::emulator
