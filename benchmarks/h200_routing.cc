// Times routing on one CUDA device: top-k, metadata and token rounding, alone and in sequence.
//
// usage: h200_routing [ROUNDS [CONFIG...]]     layers of core/named_shapes.inc
// Prints one line for each shape and kind of logits: microseconds of every stage, hot (20 calls in
// a graph, without a pause) and cool (5 ms idle, one warm-up call, one timed call). The times are
// medians over ROUNDS rounds; in a round every stage runs once, in random order. Logits in bf16:
//
//   uniform    | N(0, 1)
//   hot-expert | N(0, 1), but one expert gets ten times the mean number of tokens
//   zipf       | log p + Gumbel noise: experts without replacement, expert i with p ~ 1/(i + 1)
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/configs.h"
#include "cuda/engines.h"
#include "cuda/metadata/metadata.h"
#include "cuda/routing/routing.h"

namespace {

using namespace sonicmoe;

constexpr const char* kConfigs[] = {"kimi-linear", "1.4B-n256", "30B-n256",
                                    "qwen3-next",  "7B-T2048",  "olmoe-T64"};

void must(cudaError_t status) { cuda::check_cuda(status, "a CUDA call"); }

class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::int64_t bytes) : bytes_(std::max<std::int64_t>(bytes, 256)) {
    must(cudaMalloc(&data_, static_cast<std::size_t>(bytes_)));
    must(cudaMemset(data_, 0xff, static_cast<std::size_t>(bytes_)));
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }
  Buffer buffer() const { return {data_, bytes_}; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_;
};

enum class Skew { kUniform, kHotExpert, kZipf };
constexpr const char* kSkewNames[] = {"uniform", "hot-expert", "zipf"};

std::vector<std::uint16_t> logits_of(const LayerShape& s, Skew skew) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::uniform_real_distribution<float> uniform(1e-7f, 1.0f);
  std::vector<std::uint16_t> logits(static_cast<std::size_t>(s.tokens * s.experts));
  const double fraction = 10.0 * static_cast<double>(s.top_k) / static_cast<double>(s.experts);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const bool boosted = uniform(random) < fraction;
    for (std::int64_t e = 0; e < s.experts; ++e) {
      float v = normal(random);
      if (skew == Skew::kHotExpert && e == 3) v = boosted ? 9.0f : -9.0f;
      if (skew == Skew::kZipf) {
        v = -std::log(static_cast<float>(e + 1)) - std::log(-std::log(uniform(random)));
      }
      std::uint32_t word;
      __builtin_memcpy(&word, &v, 4);
      logits[static_cast<std::size_t>(t * s.experts + e)] =
          static_cast<std::uint16_t>((word + 0x8000u) >> 16);
    }
  }
  return logits;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Timer {
 public:
  Timer() {
    must(cudaEventCreate(&begin_));
    must(cudaEventCreate(&end_));
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  double microseconds(int calls, const std::function<void()>& run) {
    must(cudaEventRecord(begin_));
    for (int i = 0; i < calls; ++i) run();
    must(cudaEventRecord(end_));
    must(cudaEventSynchronize(end_));
    float ms = 0.0f;
    must(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3 / calls;
  }

 private:
  cudaEvent_t begin_{}, end_{};
};

/// A call captured 20 times in a graph, so that the host's launch rate is no limit, and once in
/// another graph.
class Replay {
 public:
  static constexpr int kCalls = 20;
  explicit Replay(const std::function<void(cudaStream_t)>& run) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const int calls : {kCalls, 1}) {
      must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < calls; ++i) run(stream);
      must(cudaStreamEndCapture(stream, &graph));
      must(cudaGraphInstantiate(calls == 1 ? &one_ : &many_, graph, 0));
      must(cudaGraphDestroy(graph));
    }
    must(cudaStreamDestroy(stream));
  }
  ~Replay() {
    cudaGraphExecDestroy(one_);
    cudaGraphExecDestroy(many_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;
  void many() const { must(cudaGraphLaunch(many_, nullptr)); }
  void one() const { must(cudaGraphLaunch(one_, nullptr)); }

 private:
  cudaGraphExec_t one_ = nullptr;
  cudaGraphExec_t many_ = nullptr;
};

struct Stage {
  std::string name;
  std::function<void(cudaStream_t)> run;
};

/// The memory and the stages of one shape.
class Bench {
 public:
  Bench(const LayerShape& s, Skew skew)
      : shape_(s),
        logits_(s.tokens * s.experts * 2),
        dlogits_(s.tokens * s.experts * 2),
        ids_(s.tokens * s.top_k * 8),
        weights_(s.tokens * s.top_k * 4),
        list_(4 * most_pairs() * 4),
        offsets_((s.experts + 1) * 8),
        round_scratch_(cuda::round_scratch_bytes(rounding(RoundingMode::kUp), s.tokens, s.experts,
                                                 {Backend::kCuda})),
        saved_(metadata_bytes()),
        scratch_(scratch_bytes()),
        counters_(256) {
    const auto logits = logits_of(s, skew);
    must(cudaMemcpy(logits_.data(), logits.data(), logits.size() * 2, cudaMemcpyHostToDevice));
  }

  std::vector<Stage> stages() {
    std::vector<Stage> list;
    list.push_back(
        {"route", [this](cudaStream_t s) { run_route(s, ScoreMode::kSoftmaxAfterTopK); }});
    list.push_back({"sigmoid", [this](cudaStream_t s) { run_route(s, ScoreMode::kSigmoid); }});
    list.push_back({"route-bwd", [this](cudaStream_t s) { run_route_backward(s); }});
    list.push_back({"round-bwd", [this](cudaStream_t s) { run_round_backward(s); }});
    list.push_back({"meta-ids", [this](cudaStream_t s) { run_ids(s); }});
    list.push_back({"route+meta", [this](cudaStream_t s) {
                      run_route(s, ScoreMode::kSoftmaxAfterTopK);
                      run_ids(s);
                    }});
    for (int m = 0; m < 6; ++m) {
      const auto mode = static_cast<RoundingMode>(m);
      list.push_back(
          {rounding_mode_name(mode), [this, mode](cudaStream_t s) { run_round(s, mode); }});
    }
    list.push_back(
        {"meta-pairs", [this](cudaStream_t s) { run_pairs(s, RoundingMode::kNearest); }});
    for (int m = 0; m < 6; ++m) {
      const auto mode = static_cast<RoundingMode>(m);
      list.push_back(
          {std::string(rounding_mode_name(mode)) + "+meta", [this, mode](cudaStream_t s) {
             run_round(s, mode);
             run_pairs(s, mode);
           }});
    }
    return list;
  }
  /// Computes the ids and pairs that some stages only read.
  void prepare() {
    run_route(nullptr, ScoreMode::kSoftmaxAfterTopK);
    run_round(nullptr, RoundingMode::kNearest);
    run_ids(nullptr);
    run_pairs(nullptr, RoundingMode::kNearest);
    must(cudaDeviceSynchronize());
  }

 private:
  RoundOptions rounding(RoundingMode mode) const {
    RoundOptions o;
    o.route.top_k = shape_.top_k;
    o.mode = mode;
    return o;
  }
  std::int64_t most_pairs() const {
    return std::max(
        round_capacity(rounding(RoundingMode::kUp), shape_.tokens, shape_.experts),
        round_capacity(rounding(RoundingMode::kNearest), shape_.tokens, shape_.experts));
  }
  Problem problem(RoutingForm form, RoundingMode mode) const {
    Problem p;
    p.tokens = shape_.tokens;
    p.experts = shape_.experts;
    p.hidden = p.width = 8;
    p.form = form;
    if (form == RoutingForm::kIds) {
      p.top_k = shape_.top_k;
    } else {
      p.capacity = round_capacity(rounding(mode), shape_.tokens, shape_.experts);
    }
    return p;
  }
  std::int64_t metadata_bytes() const {
    std::int64_t bytes = cuda::metadata_layout(problem(RoutingForm::kIds, {}), nullptr).bytes;
    for (const RoundingMode mode : {RoundingMode::kUp, RoundingMode::kNearest}) {
      const Problem p = problem(RoutingForm::kPairs, mode);
      bytes = std::max(bytes, cuda::metadata_layout(p, nullptr).bytes);
    }
    return bytes;
  }
  std::int64_t scratch_bytes() const {
    std::int64_t bytes = cuda::metadata_scratch(problem(RoutingForm::kIds, {}));
    for (const RoundingMode mode : {RoundingMode::kUp, RoundingMode::kNearest}) {
      bytes = std::max(bytes, cuda::metadata_scratch(problem(RoutingForm::kPairs, mode)));
    }
    return bytes;
  }
  Tensor logits() const {
    return tensor2(logits_.data(), DType::kBF16, shape_.tokens, shape_.experts);
  }
  Tensor dlogits() const {
    return tensor2(dlogits_.data(), DType::kBF16, shape_.tokens, shape_.experts);
  }
  Tensor ids() const { return tensor2(ids_.data(), DType::kI64, shape_.tokens, shape_.top_k); }
  Pairs pairs(std::int64_t capacity) const {
    auto* words = static_cast<std::int32_t*>(list_.data());
    return {tensor1(words, DType::kI32, capacity),
            tensor1(words + most_pairs(), DType::kI32, capacity),
            tensor1(words + 2 * most_pairs(), DType::kF32, capacity),
            tensor1(offsets_.data(), DType::kI64, shape_.experts + 1)};
  }

  Exec exec(cudaStream_t stream) const {
    Exec exec;
    exec.backend = Backend::kCuda;
    exec.device = device_.get();
    exec.stream = stream;
    return exec;
  }

  void run_route(cudaStream_t stream, ScoreMode score) {
    RouteOptions o;
    o.top_k = shape_.top_k;
    o.score = score;
    cuda::route(o, logits(), ids(),
                tensor2(weights_.data(), DType::kF32, shape_.tokens, shape_.top_k), exec(stream));
  }
  void run_route_backward(cudaStream_t stream) {
    RouteOptions o;
    o.top_k = shape_.top_k;
    cuda::route_backward(o, logits(), ids(),
                         tensor2(weights_.data(), DType::kF32, shape_.tokens, shape_.top_k),
                         dlogits(), exec(stream));
  }
  void run_round_backward(cudaStream_t stream) {
    const RoundOptions o = rounding(RoundingMode::kNearest);
    const Pairs lists = pairs(round_capacity(o, shape_.tokens, shape_.experts));
    cuda::token_round_backward(o, logits(), lists, lists.weight, dlogits(), round_scratch_.buffer(),
                               exec(stream));
  }
  void run_round(cudaStream_t stream, RoundingMode mode) {
    cuda::token_round(rounding(mode), logits(),
                      pairs(round_capacity(rounding(mode), shape_.tokens, shape_.experts)),
                      round_scratch_.buffer(), exec(stream));
  }
  void build(const Problem& p, const Routing& routing, cudaStream_t stream) {
    cuda::build_metadata(*device_, p, routing, cuda::metadata_layout(p, saved_.data()),
                         {scratch_.data(), static_cast<unsigned*>(counters_.data()), 64}, stream);
  }
  void run_ids(cudaStream_t stream) {
    Routing routing;
    routing.ids = ids();
    build(problem(RoutingForm::kIds, {}), routing, stream);
  }
  void run_pairs(cudaStream_t stream, RoundingMode mode) {
    const Problem p = problem(RoutingForm::kPairs, mode);
    const Pairs lists = pairs(p.capacity);
    Routing routing;
    routing.token = lists.token;
    routing.expert = lists.expert;
    build(p, routing, stream);
  }

  std::shared_ptr<const cuda::Device> device_{cuda::open_device(0), cuda::close_device};
  LayerShape shape_;
  DeviceBuffer logits_, dlogits_, ids_, weights_, list_, offsets_, round_scratch_, saved_, scratch_,
      counters_;
};

void measure(const char* config, Skew skew, int rounds) {
  Bench bench(config_from_name(config), skew);
  bench.prepare();
  const auto stages = bench.stages();
  std::vector<Replay*> replays;
  for (const Stage& s : stages) replays.push_back(new Replay(s.run));
  std::vector<std::vector<double>> hot(stages.size()), cool(stages.size());
  Timer timer;
  std::mt19937 random(5);
  std::vector<std::size_t> order(stages.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = 0; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      const Replay& replay = *replays[i];
      timer.microseconds(3, [&] { replay.many(); });
      hot[i].push_back(timer.microseconds(10, [&] { replay.many(); }) / Replay::kCalls);
    }
    for (const std::size_t i : order) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      replays[i]->one();
      cool[i].push_back(timer.microseconds(1, [&] { replays[i]->one(); }));
    }
  }
  std::printf("%s %s (us hot, cool):", config, kSkewNames[static_cast<int>(skew)]);
  for (std::size_t i = 0; i < stages.size(); ++i) {
    std::printf("  %s %.1f %.1f", stages[i].name.c_str(), median(hot[i]), median(cool[i]));
    delete replays[i];
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7;
  std::vector<const char*> configs(std::begin(kConfigs), std::end(kConfigs));
  if (argc > 2) configs.assign(argv + 2, argv + argc);
  for (const char* config : configs) {
    for (const Skew skew : {Skew::kUniform, Skew::kHotExpert, Skew::kZipf}) {
      if (skew != Skew::kUniform && config_from_name(config).tokens < 10000) continue;
      measure(config, skew, rounds);
    }
  }
  return 0;
}
