// Measures expert parallelism over the GPUs of this machine and prints a JSON object a line:
//   - bare dispatch and combine in GB/s that leave a rank, all ranks at once;
//   - forward and backward of layers, compared with the same layer without an exchange: each GPU
//     alone with E/W experts and as many routed rows. Slices of the two alternate; the times are
//     medians over the slices.
//
//   exchange_bench [--seconds S] [--ranks W] [--ways WAY,...] [CONFIG ...]
//
// S: seconds of load before a config is measured. W: number of ranks, by default the number of
// GPUs; if there are more ranks than GPUs, ranks share GPUs. WAY: auto (the default), copy or push,
// then a digit for the groups of other ranks (layer.cc), then w if tiles wait for their rows (not
// with ranks that share GPUs) or x if they do not: copy2, copyw. The ways of a config alternate in
// one process. CONFIG: a layer of core/named_shapes.inc, whose T are the tokens of one rank.
#include <cuda_runtime.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "core/configs.h"
#include "cuda/pretended_ranks.h"
#include "device_memory.h"

namespace {

using namespace sonicmoe;
using bench::Memory;
using sonicmoe::testing::GroupOptions;
using sonicmoe::testing::must;
using sonicmoe::testing::PretendedRanks;

/// A named layer with the tokens of one rank.
struct Config : LayerShape {
  std::string name;
};

/// The tensors and buffers of one rank, or of a layer alone (E/W experts, no exchange). `experts`:
/// experts that the rank has; `named`: experts that its ids may name.
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

/// Measures step(), which enqueues work for all ranks: milliseconds on the slowest rank. As many
/// steps that are not timed come first. Else the GPU's clock would depend on the work before.
class Clock {
 public:
  explicit Clock(const PretendedRanks& ranks)
      : ranks_(ranks), begin_(ranks.size()), end_(ranks.size()) {
    each(ranks, [&](std::int32_t r) {
      must(cudaEventCreate(&begin_[r]));
      must(cudaEventCreate(&end_[r]));
    });
  }
  ~Clock() {
    each(ranks_, [&](std::int32_t r) {
      cudaEventDestroy(begin_[r]);
      cudaEventDestroy(end_[r]);
    });
  }
  Clock(const Clock&) = delete;

  template <class Step>
  double time(int repeats, const Step& step) const {
    ranks_.wait();
    for (int i = 0; i < repeats; ++i) step();
    each(ranks_, [&](std::int32_t r) { must(cudaEventRecord(begin_[r], ranks_.stream(r))); });
    for (int i = 0; i < repeats; ++i) step();
    each(ranks_, [&](std::int32_t r) { must(cudaEventRecord(end_[r], ranks_.stream(r))); });
    double slowest = 0.0;
    each(ranks_, [&](std::int32_t r) {
      must(cudaEventSynchronize(end_[r]));
      float ms = 0.0f;
      must(cudaEventElapsedTime(&ms, begin_[r], end_[r]));
      slowest = std::max(slowest, static_cast<double>(ms) / repeats);
    });
    return slowest;
  }

 private:
  const PretendedRanks& ranks_;
  std::vector<cudaEvent_t> begin_, end_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// A step that is captured once for each rank.
class Replay {
 public:
  template <class Capture>
  Replay(const PretendedRanks& ranks, const Capture& capture)
      : ranks_(ranks), graphs_(ranks.size()) {
    each(ranks, [&](std::int32_t r) {
      cudaGraph_t graph = nullptr;
      must(cudaStreamBeginCapture(ranks.stream(r), cudaStreamCaptureModeThreadLocal));
      capture(r);
      must(cudaStreamEndCapture(ranks.stream(r), &graph));
      must(cudaGraphInstantiate(&graphs_[r], graph, 0));
      must(cudaGraphUpload(graphs_[r], ranks.stream(r)));
      must(cudaGraphDestroy(graph));
    });
  }
  ~Replay() {
    for (cudaGraphExec_t graph : graphs_) cudaGraphExecDestroy(graph);
  }
  Replay(const Replay&) = delete;
  void operator()() const {
    each(ranks_, [&](std::int32_t r) { must(cudaGraphLaunch(graphs_[r], ranks_.stream(r))); });
  }

 private:
  const PretendedRanks& ranks_;
  std::vector<cudaGraphExec_t> graphs_;
};

/// How an exchange sends, and in how many groups it multiplies.
struct Way {
  std::string name = "auto";
  ExchangeTransport transport = ExchangeTransport::kAuto;
  int groups = 0;
  std::optional<std::int64_t> awaits_from{};
};

struct Options {
  int devices = 0;
  std::int32_t ranks = 0;
  double seconds = 0.7;
  std::vector<Way> ways{Way{}};
  std::vector<Config> configs;
};

GroupOptions group_of(const Options& options, const Config& c) {
  GroupOptions o;
  o.shape = {options.ranks, c.tokens, c.tokens * c.top_k, c.hidden, DType::kBF16};
  o.transport = options.ways[0].transport;
  o.devices = options.devices;
  return o;
}

struct Transfers {
  double dispatch, combine;  // ms
};

/// Times a dispatch of every row to every other rank, and a combine of all their partial sums.
Transfers transfer_times(const Options& options, const Config& c) {
  const std::int32_t count = options.ranks;
  PretendedRanks ranks(group_of(options, c));
  std::vector<std::unique_ptr<Memory>> rows, offsets;
  std::vector<std::int32_t> each_has_a_row(count * c.tokens + 1);
  std::iota(each_has_a_row.begin(), each_has_a_row.end(), 0);
  for (std::int32_t r = 0; r < count; ++r) {
    must(cudaSetDevice(ranks.ordinal(r)));
    rows.push_back(std::make_unique<Memory>(count * c.tokens * c.hidden, 1.0));
    offsets.push_back(std::make_unique<Memory>(each_has_a_row.size() * 4));
    offsets[r]->upload(each_has_a_row);
    // All ranks but this rank: a copy from a rank to itself does not leave the rank.
    const std::uint64_t others = ((1ull << count) - 1) & ~(1ull << r);
    std::vector<std::uint64_t> masks(c.tokens, others);
    must(cudaMemcpy(ranks.at<void>(r, cuda::exchange_layout(ranks.shape()).rank_masks),
                    masks.data(), masks.size() * 8, cudaMemcpyHostToDevice));
  }
  // Rows are sent as in the second transfer of backward, which copies no rows of the own rank.
  const auto step = [&](std::int32_t r, bool combine) {
    Exchange& e = ranks.exchange(r);
    const cudaStream_t stream = ranks.stream(r);
    cuda::begin_phases(*e.device, e.peers, cuda::phase_bit(cuda::kPhasePartials), stream);
    cuda::follow(e, e.sending, stream);
    if (!combine) {
      cuda::send_rows(e, tensor2(rows[r]->data(), DType::kBF16, c.tokens, c.hidden),
                      {e.layout.x, cuda::kPhasePartials});
    }
    for (std::int32_t place = 1; combine && place < count; ++place) {
      cuda::send_partials(e, {rows[r]->data(),
                              c.hidden,
                              static_cast<const std::int32_t*>(offsets[r]->data()),
                              {0, c.tokens, cuda::kPhasePartials},
                              place});
    }
    cuda::follow(e, stream, e.sending);
    cuda::wait_for(*e.device, e.peers, {cuda::kPhasePartials}, e.limits, stream);
  };
  const Clock clock(ranks);
  const auto time = [&](bool combine) {
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      times.push_back(
          clock.time(10, [&] { each(ranks, [&](std::int32_t r) { step(r, combine); }); }));
    }
    ranks.wait();
    return median(times);
  };
  return {time(false), time(true)};
}

const char* name_of(ExchangeTransport transport) {
  return transport == ExchangeTransport::kPush   ? "push"
         : transport == ExchangeTransport::kCopy ? "copy"
                                                 : "auto";
}

void bare(Options options, ExchangeTransport transport) {
  const Config c{{32768, 2048, 0, 0, 1}, "rows of 4 KB"};
  options.ways = {{"", transport}};
  const Transfers t = transfer_times(options, c);
  const double bytes = static_cast<double>(c.tokens * c.hidden * 2 * (options.ranks - 1));
  std::printf("{\"bare\": \"%s\", \"ranks\": %d, \"dispatch_gbs\": %.1f, \"combine_gbs\": %.1f}\n",
              name_of(transport), options.ranks, bytes / t.dispatch / 1e6, bytes / t.combine / 1e6);
  std::fflush(stdout);
}

struct Times {
  double forward = 0.0, backward = 0.0;
  double both() const { return forward + backward; }
};

/// The layers of all ranks, and functions that enqueue a step for all ranks. `parallel`: with an
/// exchange; otherwise each rank has a layer alone.
struct Subject {
  Subject(const Options& options, const Config& c, bool parallel)
      : ranks(parallel ? group_of(options, c) : group_of(options, {{1, 8, 0, 0, 1}, c.name})),
        clock(ranks) {
    const std::int64_t own = c.experts / options.ranks;
    // The average rank's experts get as many rows as its tokens have. This routing is even: no rank
    // gets more than 1 % above the average, so 5 % of spare rows are enough.
    rows = parallel ? c.tokens * c.top_k * 21 / 20 : 0;
    for (std::int32_t r = 0; r < options.ranks; ++r) {
      must(cudaSetDevice(ranks.ordinal(r)));
      layers.push_back(std::make_unique<Layer>(c, own, parallel ? c.experts : own, 5 + r));
      layers[r]->lend(sizes(r, Pass::kForward), sizes(r, Pass::kBackward));
    }
  }
  Sizes sizes(std::int32_t r, Pass pass) const {
    const Problem& p = layers[r]->problem;
    return rows != 0 ? exchange_sizes(ranks.exchange(r), p, rows, pass, ranks.exec(r))
                     : moe_sizes(p, pass, ranks.exec(r));
  }
  void forward(std::int32_t r, ExchangePart part) const {
    const Layer& l = *layers[r];
    if (rows == 0) return moe_forward(l.problem, l.forward, ranks.exec(r));
    exchange_forward(ranks.exchange(r), l.problem, rows, l.forward, part, ranks.exec(r));
  }
  void backward(std::int32_t r, ExchangePart part) const {
    const Layer& l = *layers[r];
    if (rows == 0) return moe_backward(l.problem, l.backward, ranks.exec(r));
    exchange_backward(ranks.exchange(r), l.problem, rows, l.backward, part, ranks.exec(r));
  }
  void use(const Way& way) const {
    each(ranks, [&](std::int32_t r) {
      Exchange& e = ranks.exchange(r);
      if (way.transport != ExchangeTransport::kAuto) e.transport = way.transport;
      e.groups = way.groups;
      e.awaits_from = way.awaits_from.value_or(awaits_from);
    });
  }
  /// One thread enqueues for all ranks, so it enqueues each part for all ranks before the next
  /// part.
  template <class Call>
  void parts(const Call& call) const {
    if (rows == 0) return each(ranks, [&](std::int32_t r) { call(r, ExchangePart::kAll); });
    for (const ExchangePart part : sonicmoe::testing::kParts) {
      each(ranks, [&](std::int32_t r) { call(r, part); });
    }
  }
  void forward_step() const {
    parts([&](std::int32_t r, ExchangePart part) { forward(r, part); });
  }
  void step() const {
    forward_step();
    parts([&](std::int32_t r, ExchangePart part) { backward(r, part); });
  }

  PretendedRanks ranks;
  Clock clock;
  std::int64_t rows = 0;
  std::int64_t awaits_from = ranks.exchange(0).awaits_from;  ///< by the exchange's own choice
  std::vector<std::unique_ptr<Layer>> layers;
};

/// The times of a subject, one of each kind for every slice.
struct Slices {
  std::vector<double> both, forward, replayed;

  Times times() const {
    const double f = median(forward);
    return {f, median(both) - f};
  }
};

void report(const Options& options, const Config& c, const Way& way, const Transfers& transfers,
            const Slices& alone, const Slices& ours) {
  const Times a = alone.times(), o = ours.times();
  // Forward sends rows of x and partial sums; backward sends rows of dout, rows of x and partial
  // sums.
  const double sent = 3 * transfers.dispatch + 2 * transfers.combine;
  const double replayed = median(ours.replayed), replayed_alone = median(alone.replayed);
  std::printf(
      "{\"config\": \"%s\", \"T\": %ld, \"d\": %ld, \"n\": %ld, \"E\": %ld, \"K\": %ld, "
      "\"ranks\": %d, \"devices\": %d, \"transport\": \"%s\", "
      "\"alone\": {\"fwd_ms\": %.3f, \"bwd_ms\": %.3f, \"replayed_ms\": %.3f}, "
      "\"ours\": {\"fwd_ms\": %.3f, \"bwd_ms\": %.3f, \"replayed_ms\": %.3f}, "
      "\"ratio\": %.3f, \"replayed_ratio\": %.3f, \"dispatch_ms\": %.3f, \"combine_ms\": %.3f, "
      "\"not_overlapped_ms\": %.3f, \"hidden\": %.3f}\n",
      c.name.c_str(), static_cast<long>(c.tokens), static_cast<long>(c.hidden),
      static_cast<long>(c.width), static_cast<long>(c.experts), static_cast<long>(c.top_k),
      options.ranks, options.devices, way.name.c_str(), a.forward, a.backward, replayed_alone,
      o.forward, o.backward, replayed, o.both() / a.both(), replayed / replayed_alone,
      transfers.dispatch, transfers.combine, a.both() + sent, 1.0 - (o.both() - a.both()) / sent);
  std::fflush(stdout);
}

/// The layer alone (null) or over ranks in some way, and its times.
struct Contender {
  const Subject& subject;
  const Way* way;
  std::unique_ptr<Replay> replay{};
  Slices slices{};

  void use() const {
    if (way != nullptr) subject.use(*way);
  }
};

void measure(const Options& options, const Config& c) {
  constexpr int kSlices = 5;
  constexpr double kSliceMs = 100.0;
  const Transfers transfers = transfer_times(options, c);
  const Subject alone(options, c, false), ours(options, c, true);
  std::vector<Contender> contenders;
  contenders.push_back({alone, nullptr});
  for (const Way& way : options.ways) contenders.push_back({ours, &way});
  double once = 0.0;
  for (Contender& contender : contenders) {
    const Subject& s = contender.subject;
    contender.use();
    once = s.clock.time(3, [&] { s.step(); });
    contender.replay = std::make_unique<Replay>(s.ranks, [&](std::int32_t r) {
      s.forward(r, ExchangePart::kAll);
      s.backward(r, ExchangePart::kAll);
    });
  }
  const int repeats = std::max(3, static_cast<int>(kSliceMs / once));
  // time() runs twice as many steps as it times.
  for (double heated = 0.0; heated < options.seconds * 1e3;) {
    for (const Contender& contender : contenders) {
      contender.use();
      contender.subject.clock.time(repeats, [&] { contender.subject.step(); });
      heated += 2 * repeats * once;
    }
  }
  for (int i = 0; i < kSlices; ++i) {
    for (std::size_t j = 0; j < contenders.size(); ++j) {
      // The contenders take turns in being first: a GPU that has just worked is slower.
      Contender& contender = contenders[(i + j) % contenders.size()];
      const Subject& s = contender.subject;
      contender.use();
      contender.slices.both.push_back(s.clock.time(repeats, [&] { s.step(); }));
      contender.slices.forward.push_back(s.clock.time(repeats, [&] { s.forward_step(); }));
      contender.slices.replayed.push_back(s.clock.time(repeats, *contender.replay));
    }
  }
  ours.ranks.wait();
  for (std::size_t i = 1; i < contenders.size(); ++i) {
    report(options, c, *contenders[i].way, transfers, contenders[0].slices, contenders[i].slices);
  }
}

template <class T>
T number_of(const std::string& name, const std::string& value) {
  T number{};
  const char* end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc{} || at != end || !(number > 0)) {
    throw std::runtime_error(name + " is '" + value + "' but must be a positive number");
  }
  return number;
}

std::vector<Way> ways_of(const std::string& list) {
  std::vector<Way> ways;
  std::istringstream names(list);
  for (std::string name; std::getline(names, name, ',');) {
    const bool push = name.rfind("push", 0) == 0, copy = name.rfind("copy", 0) == 0;
    if (!push && !copy && name != "auto") {
      throw std::runtime_error("the way is '" + name + "' but must be auto, copy or push");
    }
    std::string groups = name.substr(4);
    std::optional<std::int64_t> awaits_from;
    if (!groups.empty() && (groups.back() == 'w' || groups.back() == 'x')) {
      awaits_from = groups.back() == 'w' ? 0 : Exchange::kNever;
      groups.pop_back();
    }
    ways.push_back({name,
                    push   ? ExchangeTransport::kPush
                    : copy ? ExchangeTransport::kCopy
                           : ExchangeTransport::kAuto,
                    groups.empty() ? 0 : number_of<int>("groups", groups), awaits_from});
  }
  return ways;
}

Options options_of(int count, char** arguments) {
  Options options;
  must(cudaGetDeviceCount(&options.devices));
  options.ranks = options.devices;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const std::string value = i + 1 < count ? arguments[i + 1] : "";
    if (name.rfind("--", 0) != 0) {
      options.configs.push_back({config_from_name(name), name});
      continue;
    }
    ++i;
    if (name == "--seconds") {
      options.seconds = number_of<double>(name, value);
    } else if (name == "--ranks") {
      options.ranks = number_of<std::int32_t>(name, value);
    } else if (name == "--ways") {
      options.ways = ways_of(value);
    } else {
      throw std::runtime_error("unknown option " + name + " " + value);
    }
  }
  return options;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Options options = options_of(count, arguments);
    if (options.devices < 2) {
      std::fprintf(stderr, "this machine has %d GPU, the benchmark needs two or more\n",
                   options.devices);
      return 1;
    }
    bare(options, ExchangeTransport::kPush);
    bare(options, ExchangeTransport::kCopy);
    for (const Config& c : options.configs) measure(options, c);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
