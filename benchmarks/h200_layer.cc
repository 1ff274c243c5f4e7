// Times the layer on one CUDA device through the C++ interface.
//
// usage: h200_layer [CONFIG...]
// One line a configuration: milliseconds and TFLOP/s of forward (6 T K n d flops) and backward
// (12), hot (back to back, the first 40 % of a burst dropped) and cool (30 ms of idling, one warm
// call, one timed). Routing is top-K of uniform noise. Compare with a bound measured in the same
// session only.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "sonicmoe/moe.h"

namespace {

using namespace sonicmoe;

struct Config {
  const char* name;
  std::int64_t tokens, hidden, width, experts, top_k;
};
constexpr Config kConfigs[] = {
    {"1.4B-n256", 40960, 768, 256, 128, 8},     {"1.4B-n512", 40960, 768, 512, 64, 4},
    {"1.4B-n1024", 40960, 768, 1024, 32, 2},    {"7B-n256", 24576, 1536, 256, 128, 8},
    {"7B-n512", 24576, 1536, 512, 64, 4},       {"7B-n1024", 24576, 1536, 1024, 32, 2},
    {"30B-n256", 32768, 4096, 256, 256, 16},    {"30B-n512", 32768, 4096, 512, 128, 8},
    {"30B-n1024", 32768, 4096, 1024, 64, 4},    {"120B-n512", 32768, 4096, 512, 256, 16},
    {"120B-n1024", 32768, 4096, 1024, 128, 8},  {"120B-n2048", 32768, 4096, 2048, 64, 4},
    {"olmoe", 32768, 2048, 1024, 64, 8},        {"gpt-oss-20b", 32768, 2880, 2880, 32, 4},
    {"kimi-linear", 32768, 2304, 1024, 256, 8}, {"qwen3-next", 32768, 2048, 512, 512, 10},
    {"qwen3-235b", 32768, 4096, 1536, 128, 8},  {"dsv3.2", 32768, 7168, 2048, 256, 8},
    {"7B-T2048", 2048, 1536, 256, 128, 8},      {"olmoe-T64", 64, 2048, 1024, 64, 8},
};

void must(cudaError_t status, const char* what) { cuda::check_cuda(status, what); }

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::int64_t bytes) : bytes_(bytes) {
    must(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))),
         "cudaMalloc");
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  void* data() const { return data_; }
  Buffer buffer() const { return {data_, bytes_}; }
  void upload(const void* host) {
    must(cudaMemcpy(data_, host, static_cast<std::size_t>(bytes_), cudaMemcpyHostToDevice),
         "upload");
  }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_;
};

/// N(0, scale^2) in bf16: one random block, repeated.
void fill_normal(DeviceBuffer& buffer, std::int64_t count, float scale, unsigned seed) {
  constexpr std::int64_t kBlock = 1 << 22;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<std::uint16_t> block(static_cast<std::size_t>(std::min(count, kBlock)));
  for (std::uint16_t& bits : block) {
    const float value = normal(random);
    std::uint32_t word;
    static_assert(sizeof(word) == sizeof(value));
    __builtin_memcpy(&word, &value, sizeof(word));
    bits = static_cast<std::uint16_t>((word + 0x8000u) >> 16);
  }
  for (std::int64_t at = 0; at < count; at += kBlock) {
    const std::int64_t part = std::min(kBlock, count - at);
    must(cudaMemcpy(static_cast<std::uint16_t*>(buffer.data()) + at, block.data(),
                    static_cast<std::size_t>(part * 2), cudaMemcpyHostToDevice),
         "upload");
  }
}

std::vector<std::int64_t> random_ids(const Config& c) {
  std::mt19937 random(7);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.tokens * c.top_k));
  std::vector<std::int64_t> experts(static_cast<std::size_t>(c.experts));
  for (std::int64_t e = 0; e < c.experts; ++e) experts[e] = e;
  for (std::int64_t t = 0; t < c.tokens; ++t) {
    for (std::int64_t k = 0; k < c.top_k; ++k) {
      std::uniform_int_distribution<std::int64_t> pick(k, c.experts - 1);
      std::swap(experts[k], experts[pick(random)]);
      ids[t * c.top_k + k] = experts[k];
    }
  }
  return ids;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    must(cudaEventCreate(&begin_), "cudaEventCreate");
    must(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  template <class F>
  double milliseconds(int calls, F run) {
    must(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    for (int i = 0; i < calls; ++i) run();
    must(cudaEventRecord(end_, stream_), "cudaEventRecord");
    must(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0.0f;
    must(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return ms / calls;
  }

 private:
  cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

template <class F>
double hot_ms(Timer& timer, F run) {
  const double once = timer.milliseconds(3, run);
  const int burst = std::max(1, static_cast<int>(100.0 / once));
  std::vector<double> bursts;
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < burst * 2 / 5; ++j) run();
    bursts.push_back(timer.milliseconds(std::max(1, burst * 3 / 5), run));
  }
  return median(bursts);
}

template <class F>
double cool_ms(Timer& timer, F run) {
  std::vector<double> calls;
  for (int i = 0; i < 5; ++i) {
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    run();
    calls.push_back(timer.milliseconds(1, run));
  }
  return median(calls);
}

void measure(const Config& c, const cuda::Device* device, cudaStream_t stream) {
  constexpr DType kType = DType::kBF16;
  Problem problem;
  problem.tokens = c.tokens;
  problem.hidden = c.hidden;
  problem.width = c.width;
  problem.experts = c.experts;
  problem.top_k = c.top_k;
  problem.dtype = kType;
  Exec exec;
  exec.backend = Backend::kCuda;
  exec.device = device;
  exec.stream = stream;
  const std::int64_t x_count = c.tokens * c.hidden;
  const std::int64_t w1_count = c.experts * 2 * c.width * c.hidden;
  DeviceBuffer x(x_count * 2), w1(w1_count * 2), w2(w1_count), out(x_count * 2);
  fill_normal(x, x_count, 1.0f, 1);
  fill_normal(w1, w1_count, 1.0f / std::sqrt(static_cast<float>(c.hidden)), 2);
  fill_normal(w2, w1_count / 2, 1.0f / std::sqrt(static_cast<float>(c.width)), 3);
  const std::vector<std::int64_t> host_ids = random_ids(c);
  const std::vector<float> host_weights(host_ids.size(), 1.0f / static_cast<float>(c.top_k));
  DeviceBuffer ids(static_cast<std::int64_t>(host_ids.size()) * 8);
  DeviceBuffer weights(static_cast<std::int64_t>(host_ids.size()) * 4);
  ids.upload(host_ids.data());
  weights.upload(host_weights.data());

  ForwardArgs args;
  args.x = tensor2(x.data(), kType, c.tokens, c.hidden);
  args.out = tensor2(out.data(), kType, c.tokens, c.hidden);
  args.routing.ids = tensor2(ids.data(), DType::kI64, c.tokens, c.top_k);
  args.routing.weights = tensor2(weights.data(), DType::kF32, c.tokens, c.top_k);
  args.weights.gate = tensor3(w1.data(), kType, c.experts, c.width, c.hidden);
  args.weights.gate.stride[0] *= 2;
  args.weights.up = args.weights.gate;
  args.weights.up.data = static_cast<std::uint16_t*>(w1.data()) + c.width * c.hidden;
  args.weights.down = tensor3(w2.data(), kType, c.experts, c.hidden, c.width);
  const Sizes sizes = moe_sizes(problem, Pass::kForward, exec);
  DeviceBuffer h(sizes.h_bytes), saved(sizes.saved_bytes), scratch(sizes.scratch_bytes);
  args.h = h.buffer();
  args.saved = saved.buffer();
  args.scratch = scratch.buffer();

  Timer timer(stream);
  const auto forward = [&] { moe_forward(problem, args, exec); };
  forward();
  must(cudaStreamSynchronize(stream), "the first forward");
  const double hot = hot_ms(timer, forward);
  const double cool = cool_ms(timer, forward);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20; ++i) forward();
  const double host =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  must(cudaStreamSynchronize(stream), "forward");
  const Sizes back = moe_sizes(problem, Pass::kBackward, exec);
  DeviceBuffer back_scratch(back.scratch_bytes), dout(x_count * 2), dx(x_count * 2);
  DeviceBuffer dw1(w1_count * 2), dw2(w1_count),
      dweights(static_cast<std::int64_t>(host_ids.size()) * 4);
  fill_normal(dout, x_count, 1.0f, 4);
  BackwardArgs grads;
  grads.x = args.x;
  grads.routing = args.routing;
  grads.weights = args.weights;
  grads.dout = tensor2(dout.data(), kType, c.tokens, c.hidden);
  grads.h = args.h;
  grads.saved = args.saved;
  grads.scratch = back_scratch.buffer();
  grads.dx = tensor2(dx.data(), kType, c.tokens, c.hidden);
  grads.dweights = tensor2(dweights.data(), DType::kF32, c.tokens, c.top_k);
  grads.grads = args.weights;
  grads.grads.gate.data = dw1.data();
  grads.grads.up.data = static_cast<std::uint16_t*>(dw1.data()) + c.width * c.hidden;
  grads.grads.down.data = dw2.data();
  const auto backward = [&] { moe_backward(problem, grads, exec); };
  backward();
  must(cudaStreamSynchronize(stream), "the first backward");
  const double back_hot = hot_ms(timer, backward);
  const double back_cool = cool_ms(timer, backward);
  const double flops = 6.0 * static_cast<double>(c.tokens * c.top_k) * c.width * c.hidden;
  std::printf(
      "%-12s fwd hot %8.4f ms %6.1f cool %8.4f ms %6.1f TFLOP/s, host %5.1f us; bwd hot "
      "%8.4f ms %6.1f cool %8.4f ms %6.1f TFLOP/s\n",
      c.name, hot, flops / hot * 1e-9, cool, flops / cool * 1e-9, host / 20, back_hot,
      2 * flops / back_hot * 1e-9, back_cool, 2 * flops / back_cool * 1e-9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const cuda::Device* device = cuda::open_device(0);
    cudaStream_t stream = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    for (const Config& config : kConfigs) {
      bool wanted = argc == 1;
      for (int i = 1; i < argc; ++i) wanted |= config.name == std::string(argv[i]);
      if (wanted) measure(config, device, stream);
    }
    must(cudaStreamDestroy(stream), "cudaStreamDestroy");
    cuda::close_device(device);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "h200_layer: %s\n", error.what());
    return 1;
  }
  return 0;
}
