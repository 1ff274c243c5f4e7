// Measures expert parallelism over the GPUs of this machine, one rank each, and prints a JSON
// object a line:
//   - bare dispatch and combine in GB/s that leave a rank, all ranks at once;
//   - forward and backward of layers, beside the same layer alone on one GPU with as many routed
//     rows and E/W experts.
//
//   exchange_bench [SECONDS_TO_HEAT] [CONFIG ...]     all configs by default
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/pretended_ranks.h"

namespace {

using namespace sonicmoe;
using sonicmoe::testing::GroupOptions;
using sonicmoe::testing::must;
using sonicmoe::testing::PretendedRanks;

struct Config {
  const char* name;
  std::int64_t tokens, hidden, width, experts, top_k;
};
constexpr Config kConfigs[] = {{"7B-n256", 24576, 1536, 256, 128, 8},
                               {"30B-n256", 16384, 4096, 256, 256, 16},
                               {"qwen3-30b", 16384, 2048, 768, 128, 8},
                               {"qwen3-235b", 16384, 4096, 1536, 128, 8}};

/// Device memory of one GPU, filled with zeros or with random bf16.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) {
    must(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 256))));
    must(cudaMemset(data_, 0, static_cast<std::size_t>(bytes)));
    bytes_ = bytes;
  }
  Memory(std::int64_t count, double scale) : Memory(2 * count) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
    std::vector<std::uint16_t> values(1048573);  // a prime
    for (std::uint16_t& v : values) {
      const float f = normal(random);
      std::uint32_t word = 0;
      __builtin_memcpy(&word, &f, 4);
      v = static_cast<std::uint16_t>((word + 0x8000) >> 16);
    }
    upload(values);
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;

  /// Repeats `values` over the whole memory.
  template <class T>
  void upload(const std::vector<T>& values) {
    const std::int64_t size = static_cast<std::int64_t>(values.size() * sizeof(T));
    for (std::int64_t at = 0; at < bytes_; at += size) {
      must(cudaMemcpy(static_cast<char*>(data_) + at, values.data(), std::min(size, bytes_ - at),
                      cudaMemcpyHostToDevice));
    }
  }
  void* data() const { return data_; }
  Buffer buffer() const { return {data_, bytes_}; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// The tensors and buffers of one rank, or of a layer alone (E/W experts, no exchange).
struct Layer {
  Layer(const Config& c, std::int64_t experts, std::int64_t named, unsigned seed)
      : x(c.tokens * c.hidden, 1.0),
        dout(c.tokens * c.hidden, 1.0),
        up(experts * 2 * c.width * c.hidden, 1.0 / std::sqrt(static_cast<double>(c.hidden))),
        down(experts * c.hidden * c.width, 1.0 / std::sqrt(static_cast<double>(c.width))),
        dup(experts * 2 * c.width * c.hidden * 2),
        ddown(experts * c.hidden * c.width * 2),
        ids(c.tokens * c.top_k * 4),
        weights(c.tokens * c.top_k * 4),
        out(c.tokens * c.hidden * 2),
        dx(c.tokens * c.hidden * 2),
        dweights(c.tokens * c.top_k * 4) {
    problem.tokens = c.tokens;
    problem.hidden = c.hidden;
    problem.width = c.width;
    problem.experts = named;
    problem.top_k = c.top_k;
    problem.dtype = DType::kBF16;
    std::mt19937 random(seed);
    std::vector<std::int32_t> chosen(c.tokens * c.top_k), all(named);
    for (std::int64_t e = 0; e < named; ++e) all[e] = static_cast<std::int32_t>(e);
    for (std::int64_t t = 0; t < c.tokens; ++t) {
      for (std::int64_t k = 0; k < c.top_k; ++k) {
        std::swap(all[k], all[k + static_cast<std::int64_t>(random() % (named - k))]);
        chosen[t * c.top_k + k] = all[k];
      }
    }
    ids.upload(chosen);
    weights.upload(std::vector<float>(c.tokens * c.top_k, 1.0f / static_cast<float>(c.top_k)));
    forward.x = rows(x);
    forward.routing.ids = tensor2(ids.data(), DType::kI32, c.tokens, c.top_k);
    forward.routing.weights = tensor2(weights.data(), DType::kF32, c.tokens, c.top_k);
    forward.weights = matrices(up, down, experts);
    forward.out = rows(out);
    backward.x = forward.x;
    backward.routing = forward.routing;
    backward.weights = forward.weights;
    backward.dout = rows(dout);
    backward.dx = rows(dx);
    backward.dweights = tensor2(dweights.data(), DType::kF32, c.tokens, c.top_k);
    backward.grads = matrices(dup, ddown, experts);
  }
  void lend(const Sizes& f, const Sizes& b) {
    for (const std::int64_t bytes :
         {f.h_bytes, f.saved_bytes, std::max(f.scratch_bytes, b.scratch_bytes)}) {
      buffers.push_back(std::make_unique<Memory>(bytes));
    }
    forward.h = backward.h = buffers[0]->buffer();
    forward.saved = backward.saved = buffers[1]->buffer();
    forward.scratch = backward.scratch = buffers[2]->buffer();
  }
  Tensor rows(const Memory& m) const {
    return tensor2(m.data(), DType::kBF16, problem.tokens, problem.hidden);
  }
  Weights matrices(const Memory& u, const Memory& d, std::int64_t experts) const {
    Weights w;
    w.gate = tensor3(u.data(), DType::kBF16, experts, problem.width, problem.hidden);
    w.gate.stride[0] *= 2;
    w.up = w.gate;
    w.up.data = static_cast<std::uint16_t*>(u.data()) + problem.width * problem.hidden;
    w.down = tensor3(d.data(), DType::kBF16, experts, problem.hidden, problem.width);
    return w;
  }

  Memory x, dout, up, down, dup, ddown, ids, weights, out, dx, dweights;
  std::vector<std::unique_ptr<Memory>> buffers;
  Problem problem;
  ForwardArgs forward;
  BackwardArgs backward;
};

/// Calls f(r) for every rank with its GPU current.
template <class F>
void each(const PretendedRanks& ranks, const F& f) {
  for (std::int32_t r = 0; r < ranks.size(); ++r) {
    must(cudaSetDevice(ranks.ordinal(r)));
    f(r);
  }
}

/// Milliseconds of step(), which enqueues work for all ranks, on the slowest rank; the best of
/// three.
template <class Step>
double time_of(const PretendedRanks& ranks, int repeats, const Step& step) {
  double best = 1e30;
  std::vector<cudaEvent_t> begin(ranks.size()), end(ranks.size());
  each(ranks, [&](std::int32_t r) {
    must(cudaEventCreate(&begin[r]));
    must(cudaEventCreate(&end[r]));
  });
  for (int round = 0; round < 3; ++round) {
    ranks.wait();
    each(ranks, [&](std::int32_t r) { must(cudaEventRecord(begin[r], ranks.stream(r))); });
    for (int i = 0; i < repeats; ++i) step();
    each(ranks, [&](std::int32_t r) { must(cudaEventRecord(end[r], ranks.stream(r))); });
    double slowest = 0.0;
    each(ranks, [&](std::int32_t r) {
      must(cudaEventSynchronize(end[r]));
      float ms = 0.0f;
      must(cudaEventElapsedTime(&ms, begin[r], end[r]));
      slowest = std::max(slowest, static_cast<double>(ms) / repeats);
    });
    best = std::min(best, slowest);
  }
  ranks.wait();
  each(ranks, [&](std::int32_t r) {
    cudaEventDestroy(begin[r]);
    cudaEventDestroy(end[r]);
  });
  return best;
}

/// Milliseconds of a step that is captured once for each rank and replayed.
template <class Capture>
double replay_time(const PretendedRanks& ranks, int repeats, const Capture& capture) {
  std::vector<cudaGraphExec_t> replays(ranks.size());
  each(ranks, [&](std::int32_t r) {
    cudaGraph_t graph = nullptr;
    must(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal));
    capture(r);
    must(cudaStreamEndCapture(ranks.stream(r), &graph));
    must(cudaGraphInstantiate(&replays[r], graph, 0));
    must(cudaGraphUpload(replays[r], ranks.stream(r)));
    must(cudaGraphDestroy(graph));
  });
  const double ms = time_of(ranks, repeats, [&] {
    each(ranks, [&](std::int32_t r) { must(cudaGraphLaunch(replays[r], ranks.stream(r))); });
  });
  for (cudaGraphExec_t replay : replays) must(cudaGraphExecDestroy(replay));
  return ms;
}

GroupOptions options_of(std::int32_t ranks, std::int64_t tokens, std::int64_t top_k,
                        std::int64_t hidden, ExchangeTransport transport) {
  GroupOptions o;
  o.shape = {ranks, tokens, tokens * top_k, hidden, DType::kBF16};
  o.transport = transport;
  o.devices = ranks;
  return o;
}

/// Every row goes to every rank and every partial sum comes back.
void bare(std::int32_t count, ExchangeTransport transport) {
  constexpr std::int64_t kTokens = 32768, kHidden = 2048;  // rows of 4 KB
  PretendedRanks ranks(options_of(count, kTokens, 1, kHidden, transport));
  const double bytes = static_cast<double>(kTokens * kHidden * 2 * (count - 1));
  std::vector<std::unique_ptr<Memory>> rows, marks;
  for (std::int32_t r = 0; r < count; ++r) {
    must(cudaSetDevice(ranks.ordinal(r)));
    rows.push_back(std::make_unique<Memory>(count * kTokens * kHidden, 1.0));
    marks.push_back(std::make_unique<Memory>(count * kTokens));
    marks[r]->upload(std::vector<std::uint8_t>(kTokens, 1));
    // All ranks but this one: the copy to itself leaves no rank.
    const std::uint64_t others = ((1ull << count) - 1) & ~(1ull << r);
    std::vector<std::uint64_t> masks(kTokens, others);
    must(cudaMemcpy(ranks.at<void>(r, cuda::exchange_layout(ranks.shape()).rank_masks),
                    masks.data(), kTokens * 8, cudaMemcpyHostToDevice));
  }
  const auto step = [&](std::int32_t r, bool combine) {
    Exchange& e = ranks.exchange(r);
    cuda::fork(e, ranks.stream(r));
    if (combine) {
      const Tensor sums = tensor2(rows[r]->data(), DType::kBF16, count * kTokens, kHidden);
      cuda::send_partials(e, sums, static_cast<const std::uint8_t*>(marks[r]->data()));
      cuda::signal(e.peers, cuda::kPhasePartials, e.sending);
    } else {
      const Tensor x = tensor2(rows[r]->data(), DType::kBF16, kTokens, kHidden);
      cuda::send_rows(e, x, e.layout.x, cuda::kPhaseRows);
    }
    cuda::mark_sent(e, cuda::kAllSent);
    cuda::join(e, cuda::kAllSent, ranks.stream(r));
    cuda::wait_for(e.peers, combine ? cuda::kPhasePartials : cuda::kPhaseRows, e.limits,
                   ranks.stream(r));
  };
  const char* name = transport == ExchangeTransport::kPush ? "push" : "copy";
  const auto all = [&](bool combine) { each(ranks, [&](std::int32_t r) { step(r, combine); }); };
  const double dispatch = time_of(ranks, 10, [&] { all(false); });
  const double combine = time_of(ranks, 10, [&] { all(true); });
  std::printf("{\"bare\": \"%s\", \"ranks\": %d, \"dispatch_gbs\": %.1f, \"combine_gbs\": %.1f}\n",
              name, count, bytes / dispatch / 1e6, bytes / combine / 1e6);
  std::fflush(stdout);
}

struct Times {
  double forward, backward;
};

template <class Forward, class Backward>
Times times_of(const PretendedRanks& ranks, double heat, const Forward& forward,
               const Backward& backward) {
  const auto both = [&] {
    forward();
    backward();
  };
  const double once = time_of(ranks, 3, both);
  time_of(ranks, std::max(1, static_cast<int>(heat * 1e3 / once / 3)), both);
  const int repeats = std::max(5, static_cast<int>(60.0 / once));
  const double whole = time_of(ranks, repeats, both);
  const double first = time_of(ranks, repeats, forward);
  return {first, whole - first};
}

void layer(const Config& c, std::int32_t count, double heat) {
  Times alone{};
  {
    PretendedRanks ranks(options_of(count, 1, 1, 8, ExchangeTransport::kPush));
    std::vector<std::unique_ptr<Layer>> layers;
    for (std::int32_t r = 0; r < count; ++r) {
      must(cudaSetDevice(ranks.ordinal(r)));
      layers.push_back(std::make_unique<Layer>(c, c.experts / count, c.experts / count, 5 + r));
      const Problem& p = layers[r]->problem;
      layers[r]->lend(moe_sizes(p, Pass::kForward, ranks.exec(r)),
                      moe_sizes(p, Pass::kBackward, ranks.exec(r)));
    }
    alone = times_of(
        ranks, heat,
        [&] {
          each(ranks, [&](std::int32_t r) {
            moe_forward(layers[r]->problem, layers[r]->forward, ranks.exec(r));
          });
        },
        [&] {
          each(ranks, [&](std::int32_t r) {
            moe_backward(layers[r]->problem, layers[r]->backward, ranks.exec(r));
          });
        });
  }
  for (const ExchangeTransport transport : {ExchangeTransport::kCopy, ExchangeTransport::kPush}) {
    PretendedRanks ranks(options_of(count, c.tokens, c.top_k, c.hidden, transport));
    std::vector<std::unique_ptr<Layer>> layers;
    const std::int64_t rows = c.tokens * c.top_k * 21 / 20;  // an even routing has 1 % more at most
    for (std::int32_t r = 0; r < count; ++r) {
      must(cudaSetDevice(ranks.ordinal(r)));
      layers.push_back(std::make_unique<Layer>(c, c.experts / count, c.experts, 5 + r));
      const Problem& p = layers[r]->problem;
      Exchange& e = ranks.exchange(r);
      layers[r]->lend(exchange_sizes(e, p, rows, Pass::kForward, ranks.exec(r)),
                      exchange_sizes(e, p, rows, Pass::kBackward, ranks.exec(r)));
    }
    // One thread drives all ranks, so each part is enqueued for all of them before the next one.
    const auto parts = [&](const auto& call) {
      for (const ExchangePart part :
           {ExchangePart::kBegin, ExchangePart::kCompute, ExchangePart::kFinish}) {
        each(ranks, [&](std::int32_t r) { call(r, part); });
      }
    };
    const Times ours = times_of(
        ranks, heat,
        [&] {
          parts([&](std::int32_t r, ExchangePart part) {
            exchange_forward(ranks.exchange(r), layers[r]->problem, rows, layers[r]->forward, part,
                             ranks.exec(r));
          });
        },
        [&] {
          parts([&](std::int32_t r, ExchangePart part) {
            exchange_backward(ranks.exchange(r), layers[r]->problem, rows, layers[r]->backward,
                              part, ranks.exec(r));
          });
        });
    const int repeats = std::max(5, static_cast<int>(60.0 / (ours.forward + ours.backward)));
    const double replayed = replay_time(ranks, repeats, [&](std::int32_t r) {
      exchange_forward(ranks.exchange(r), layers[r]->problem, rows, layers[r]->forward,
                       ExchangePart::kAll, ranks.exec(r));
      exchange_backward(ranks.exchange(r), layers[r]->problem, rows, layers[r]->backward,
                        ExchangePart::kAll, ranks.exec(r));
    });
    std::printf(
        "{\"config\": \"%s\", \"T\": %ld, \"d\": %ld, \"n\": %ld, \"E\": %ld, \"K\": %ld, "
        "\"ranks\": %d, \"transport\": \"%s\", \"alone\": {\"fwd_ms\": %.3f, \"bwd_ms\": %.3f}, "
        "\"ours\": {\"fwd_ms\": %.3f, \"bwd_ms\": %.3f}, \"ratio\": %.3f, \"replayed_ms\": %.3f}\n",
        c.name, static_cast<long>(c.tokens), static_cast<long>(c.hidden),
        static_cast<long>(c.width), static_cast<long>(c.experts), static_cast<long>(c.top_k), count,
        transport == ExchangeTransport::kCopy ? "copy" : "push", alone.forward, alone.backward,
        ours.forward, ours.backward,
        (ours.forward + ours.backward) / (alone.forward + alone.backward), replayed);
    std::fflush(stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  try {
    int devices = 0;
    must(cudaGetDeviceCount(&devices));
    if (devices < 2) {
      std::fprintf(stderr, "this machine has %d GPU, the benchmark needs two or more\n", devices);
      return 1;
    }
    const double heat = count > 1 ? std::atof(arguments[1]) : 0.7;
    bare(devices, ExchangeTransport::kPush);
    bare(devices, ExchangeTransport::kCopy);
    for (const Config& c : kConfigs) {
      const bool chosen =
          count <= 2 || std::any_of(arguments + 2, arguments + count,
                                    [&](const char* a) { return a == std::string(c.name); });
      if (chosen) layer(c, devices, heat);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
