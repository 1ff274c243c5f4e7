// Measures a layer in fp8 and in bf16 on one GPU. Bursts of the two precisions alternate in one
// run. Each output line is a JSON object: milliseconds of forward, of forward + backward, of each
// step of both passes and of quantising the weights, and MiB kept for backward.
//
//   fp8_bench SECONDS_PER_CONFIG CONFIG ...     layers of core/named_shapes.inc, or T,d,n,E,K
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/configs.h"
#include "core/observer.h"
#include "cuda/engines.h"
#include "device_memory.h"
#include "sonicmoe/moe.h"

namespace {

using namespace sonicmoe;
using bench::Memory;
using bench::must;

struct Config : LayerShape {
  std::string name;
};

/// Inputs and outputs of a layer; the layers of both precisions use the same tensors.
struct Tensors {
  explicit Tensors(const Config& config) : c(config) {
    std::mt19937 random(5);
    std::vector<std::int32_t> chosen(c.tokens * c.top_k), all(c.experts);
    std::iota(all.begin(), all.end(), 0);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (std::int64_t k = 0; k < c.top_k; ++k) {
        std::swap(all[k], all[k + static_cast<std::int64_t>(random() % (c.experts - k))]);
        chosen[t * c.top_k + k] = all[k];
      }
    }
    ids.upload(chosen);
    scores.upload(std::vector<float>(c.tokens * c.top_k, 1.0f / static_cast<float>(c.top_k)));
  }
  static double scale(std::int64_t fan_in) { return 1.0 / std::sqrt(static_cast<double>(fan_in)); }

  Config c;
  std::int64_t rows = c.tokens * c.hidden, matrices = c.experts * c.width * c.hidden;
  std::int64_t slots = c.tokens * c.top_k;
  Memory x{rows, 1.0, 1}, dout{rows, 1.0, 2};
  Memory up{2 * matrices, scale(c.hidden), 3}, down{matrices, scale(c.width), 4};
  Memory dup{2 * matrices * 2}, ddown{matrices * 2}, out{rows * 2}, dx{rows * 2};
  Memory ids{slots * 4}, scores{slots * 4}, dscores{slots * 4};
};

/// A layer in one precision.
class Layer {
 public:
  Layer(const Config& c, Precision precision, const Tensors& t, const Exec& exec) : exec_(exec) {
    problem_.tokens = c.tokens;
    problem_.hidden = c.hidden;
    problem_.width = c.width;
    problem_.experts = c.experts;
    problem_.top_k = c.top_k;
    problem_.dtype = DType::kBF16;
    problem_.precision = precision;
    sizes_ = moe_sizes(problem_, Pass::kForward, exec);
    const Sizes backward = moe_sizes(problem_, Pass::kBackward, exec);
    fp8_weights_ = std::make_unique<Memory>(fp8_weights_bytes(problem_, exec));
    h_ = std::make_unique<Memory>(sizes_.h_bytes);
    saved_ = std::make_unique<Memory>(sizes_.saved_bytes);
    scratch_ = std::make_unique<Memory>(std::max(sizes_.scratch_bytes, backward.scratch_bytes));
    const auto rows = [&](const Memory& m) {
      return tensor2(m.data(), DType::kBF16, c.tokens, c.hidden);
    };
    const auto slots = [&](const Memory& m, DType dtype) {
      return tensor2(m.data(), dtype, c.tokens, c.top_k);
    };
    forward_.x = rows(t.x);
    forward_.routing.ids = slots(t.ids, DType::kI32);
    forward_.routing.weights = slots(t.scores, DType::kF32);
    forward_.weights = matrices(c, t.up, t.down);
    forward_.out = rows(t.out);
    forward_.h = h_->buffer();
    forward_.saved = saved_->buffer();
    forward_.scratch = scratch_->buffer();
    if (precision == Precision::kFp8) forward_.fp8_weights = fp8_weights_->buffer();
    backward_.x = forward_.x;
    backward_.routing = forward_.routing;
    backward_.weights = forward_.weights;
    backward_.dout = rows(t.dout);
    backward_.h = forward_.h;
    backward_.saved = forward_.saved;
    backward_.scratch = forward_.scratch;
    backward_.fp8_weights = forward_.fp8_weights;
    backward_.dx = rows(t.dx);
    backward_.dweights = slots(t.dscores, DType::kF32);
    backward_.grads = matrices(c, t.dup, t.ddown);
  }
  void quantize() const {
    quantize_weights(problem_, forward_.weights, forward_.fp8_weights, exec_);
  }
  void forward() const { moe_forward(problem_, forward_, exec_); }
  void both() const {
    forward();
    moe_backward(problem_, backward_, exec_);
  }
  void observe(KernelObserver* observer) { exec_.observer = observer; }
  double kept_mib() const {
    return static_cast<double>(sizes_.h_bytes + sizes_.saved_bytes) / (1 << 20);
  }

 private:
  static Weights matrices(const Config& c, const Memory& up, const Memory& down) {
    Weights w;
    w.gate = tensor3(up.data(), DType::kBF16, c.experts, c.width, c.hidden);
    w.gate.stride[0] *= 2;
    w.up = w.gate;
    w.up.data = static_cast<std::uint16_t*>(up.data()) + c.width * c.hidden;
    w.down = tensor3(down.data(), DType::kBF16, c.experts, c.hidden, c.width);
    return w;
  }

  Exec exec_;
  Problem problem_;
  Sizes sizes_;
  std::unique_ptr<Memory> fp8_weights_, h_, saved_, scratch_;
  ForwardArgs forward_;
  BackwardArgs backward_;
};

class Event {
 public:
  Event() { must(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  void record() const { must(cudaEventRecord(event_, nullptr)); }
  double since(const Event& begin) const {
    must(cudaEventSynchronize(event_));
    float ms = 0.0f;
    must(cudaEventElapsedTime(&ms, begin.event_, event_));
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Milliseconds of one call: the mean over the last three fifths of a burst that lasts about `ms`
/// milliseconds.
template <class F>
double hot_time(double ms, const F& call) {
  const Event begin, end;
  begin.record();
  call();
  end.record();
  const double once = end.since(begin);
  const int count = std::max(5, static_cast<int>(ms / once));
  const int skipped = count * 2 / 5;
  for (int i = 0; i < skipped; ++i) call();
  begin.record();
  for (int i = skipped; i < count; ++i) call();
  end.record();
  return end.since(begin) / (count - skipped);
}

/// Sums the times of the steps of a pass by name.
class StepTimes : public KernelObserver {
 public:
  void begin(const char* kernel) override {
    spans_.push_back({kernel, std::make_unique<Event>(), std::make_unique<Event>()});
    spans_.back().begin->record();
  }
  void end() override { spans_.back().end->record(); }
  std::map<std::string, double> take() {
    std::map<std::string, double> times;
    for (const Span& s : spans_) times[s.kernel] += s.end->since(*s.begin);
    spans_.clear();
    return times;
  }

 private:
  struct Span {
    std::string kernel;
    std::unique_ptr<Event> begin, end;
  };
  std::vector<Span> spans_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Median time of each step over several calls, as a JSON object. The events between launches
/// prevent the overlap of steps, so the sum of the steps can exceed the time of a pass.
std::string step_times(Layer& layer) {
  constexpr int kCalls = 9;
  StepTimes observer;
  layer.observe(&observer);
  std::map<std::string, std::vector<double>> all;
  for (int i = 0; i < kCalls; ++i) {
    layer.both();
    for (const auto& [name, ms] : observer.take()) all[name].push_back(ms);
  }
  layer.observe(nullptr);
  std::string text;
  for (const auto& [name, values] : all) {
    char entry[96];
    std::snprintf(entry, sizeof entry, "%s\"%s\": %.4f", text.empty() ? "" : ", ", name.c_str(),
                  median(values));
    text += entry;
  }
  return "{" + text + "}";
}

void measure(const Config& c, double seconds, const Exec& exec) {
  const Tensors tensors(c);
  Layer layers[] = {{c, Precision::kTensors, tensors, exec}, {c, Precision::kFp8, tensors, exec}};
  const double quantize = [&] {
    layers[1].quantize();
    return hot_time(20.0, [&] { layers[1].quantize(); });
  }();
  constexpr int kRounds = 3;
  const double burst = seconds * 1e3 / (4 * kRounds);
  std::vector<double> forward[2], both[2];
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 2; ++i) {
      both[i].push_back(hot_time(burst, [&] { layers[i].both(); }));
      forward[i].push_back(hot_time(burst, [&] { layers[i].forward(); }));
    }
  }
  std::printf(
      "{\"config\": \"%s\", \"T\": %lld, \"d\": %lld, \"n\": %lld, \"E\": %lld, \"K\": %lld, "
      "\"bf16\": {\"fwd_ms\": %.4f, \"fwd_bwd_ms\": %.4f}, "
      "\"fp8\": {\"fwd_ms\": %.4f, \"fwd_bwd_ms\": %.4f}, "
      "\"fwd_ratio\": %.3f, \"fwd_bwd_ratio\": %.3f, \"quantise_ms\": %.4f, "
      "\"kept_mib\": {\"bf16\": %.1f, \"fp8\": %.1f}}\n",
      c.name.c_str(), static_cast<long long>(c.tokens), static_cast<long long>(c.hidden),
      static_cast<long long>(c.width), static_cast<long long>(c.experts),
      static_cast<long long>(c.top_k), median(forward[0]), median(both[0]), median(forward[1]),
      median(both[1]), median(forward[0]) / median(forward[1]), median(both[0]) / median(both[1]),
      quantize, layers[0].kept_mib(), layers[1].kept_mib());
  for (int i = 0; i < 2; ++i) {
    std::printf("{\"config\": \"%s\", \"precision\": \"%s\", \"steps_ms\": %s}\n", c.name.c_str(),
                i == 0 ? "bf16" : "fp8", step_times(layers[i]).c_str());
  }
  std::fflush(stdout);
}

/// The layer of an argument: a name, or T,d,n,E,K.
Config config_of(const char* argument) {
  long long size[5];
  const int count = std::sscanf(argument, "%lld,%lld,%lld,%lld,%lld", &size[0], &size[1], &size[2],
                                &size[3], &size[4]);
  if (count != 5) return {config_from_name(argument), argument};
  return {{size[0], size[1], size[2], size[3], size[4]}, argument};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 3) throw std::runtime_error("usage: fp8_bench SECONDS_PER_CONFIG CONFIG ...");
    const double seconds = std::atof(argv[1]);
    const cuda::Device* device = cuda::open_device(0);
    Exec exec;
    exec.backend = Backend::kCuda;
    exec.device = device;
    for (int i = 2; i < argc; ++i) measure(config_of(argv[i]), seconds, exec);
    cuda::close_device(device);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "fp8_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}
