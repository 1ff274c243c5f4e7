// sonicmoe bench: checks a slice of the layer against the oracle, then measures it.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "bench_layer.h"
#include "command.h"
#include "core/check_tensor.h"
#include "cpu/threads.h"
#include "gpu.h"
#include "peak.h"
#include "stopwatch.h"
#include "target.h"
#include "verify/harness.h"

namespace sonicmoe::cli {
namespace {

struct Options {
  ShapeOptions shape;
  LayerOptions layer;
  TargetOptions target;
  std::string pass = "both";
  std::string routing = "topk";
  std::int32_t repeats = 7;
  bool kernels = false;
  bool json = false;
};

BenchRouting routing_from_name(const std::string& name) {
  if (name == "topk") return BenchRouting::kTopK;
  if (name == "rounded") return BenchRouting::kRounded;
  if (name == "skewed") return BenchRouting::kSkewed;
  checks::refuse("routing is \"" + name + "\", must be one of: topk, rounded, skewed");
}

struct Measurement {
  const char* pass;
  std::vector<double> seconds;
  double flops = 0.0;     ///< of the routed rows
  double roofline = 0.0;  ///< seconds at the machine's peak; 0 if the peak is not known

  double median_seconds() const { return median(seconds); }
  bool covers(const KernelCost& kernel) const {
    return std::string_view(pass) == "both" ||
           (std::string_view(pass) == "backward") == kernel.backward;
  }
};

/// The time of a kernel and its roofline. flops and roofline are 0 if the cost model lacks the
/// kernel.
struct KernelTime {
  std::string name;
  double seconds = 0.0, flops = 0.0, roofline = 0.0;
};

struct Report {
  LayerShape shape;
  Machine machine;
  std::size_t samples = 0;  ///< of the machine's peak, where it is measured
  double steadiness = 1.0;  ///< of those samples
  std::int64_t rows = 0;
  std::int32_t threads = 0;
  std::string engine;  ///< empty on the CPU
  std::string engine_note;
  Precision precision = Precision::kTensors;
  verify::CaseResult check;
  std::vector<Measurement> passes;
  std::vector<double> quantise_seconds;  ///< of the weights; fp8 only
  std::vector<KernelTime> kernels;

  /// Routed rows over T*K: rounding changes flops and bytes by this factor.
  double share() const {
    if (shape.tokens == 0) return 0.0;
    return static_cast<double>(rows) / static_cast<double>(shape.tokens * shape.top_k);
  }
};

// The same kernels on a slice small enough for the oracle: T from 64 to 200, d and n from 32 to 64
// (for fp8 64 to 192: with a last block of 64 if the layer has one). Smaller layers are checked at
// these least sizes: in a few rows of a few elements one sum that cancels decides, and its error
// may be twice that of the same sum in another order.
verify::CaseResult check_slice(const Problem& problem, const Target& target) {
  verify::Case c;
  c.name = "slice";
  c.problem = problem;
  c.problem.tokens = std::clamp<std::int64_t>(problem.tokens, 64, 200);
  const auto sliced = [&](std::int64_t size) -> std::int64_t {
    if (problem.precision == Precision::kFp8) return std::min<std::int64_t>(size, size % 128 + 128);
    return std::clamp<std::int64_t>(size, 32, 64);
  };
  c.problem.hidden = sliced(problem.hidden);
  c.problem.width = sliced(problem.width);
  c.problem.experts = std::min<std::int64_t>(problem.experts, 16);
  c.problem.top_k = std::min(problem.top_k, c.problem.experts);
  c.grad_dtype = problem.dtype;
  return verify::run_case(c, implementation_of(target));
}

// The data sheet's rates of the GPU; 0 for a board whose data sheet is not known.
Machine gpu_machine() {
  const std::string name = verify::device_info().name;
  const std::string machine(machine_of_gpu(name));
  if (!machine.empty()) return machine_from_name(machine);
  Machine unknown;
  unknown.name = name;
  unknown.source = "no data sheet of \"" + name + "\" is known";
  return unknown;
}

bool has_roofline(const Report& r) { return r.machine.flops_per_second > 0; }

// Samples of a CPU's peak during the measurement. Another sample follows at its end.
constexpr std::int32_t kPeakSamples = 3;

// `peak` is null on CUDA.
void measure(const Options& o, const BenchLayer& layer, verify::Clock& clock, CpuPeak* peak,
             Report& report) {
  ProgressLine progress(!o.json);
  Measurement forward{"forward", {}}, backward{"backward", {}};
  const std::int32_t samples = peak == nullptr ? 1 : kPeakSamples;
  const std::int32_t stride = (o.repeats + samples - 1) / samples;
  for (std::int32_t i = 0; i < o.repeats; ++i) {
    progress.show("measuring " + std::to_string(i + 1) + "/" + std::to_string(o.repeats) +
                      (peak == nullptr ? " on the GPU" : " on the CPU"),
                  static_cast<double>(i) / o.repeats);
    if (i % stride == 0) {
      if (peak != nullptr) peak->sample();
      layer.forward();  // untimed: fills pages, caches and the tensors that backward reads
      if (o.pass != "fwd") layer.backward();
    }
    if (o.pass != "bwd") forward.seconds.push_back(seconds_of(clock, [&] { layer.forward(); }));
    if (o.pass != "fwd") backward.seconds.push_back(seconds_of(clock, [&] { layer.backward(); }));
  }
  for (std::int32_t i = 0; report.precision == Precision::kFp8 && i < o.repeats; ++i) {
    report.quantise_seconds.push_back(seconds_of(clock, [&] { layer.quantize_weights(); }));
  }
  if (o.pass != "bwd") report.passes.push_back(forward);
  if (o.pass != "fwd") report.passes.push_back(backward);
  if (o.pass != "both") return;
  Measurement both{"both", {}};
  for (std::size_t i = 0; i < forward.seconds.size(); ++i) {
    both.seconds.push_back(forward.seconds[i] + backward.seconds[i]);
  }
  report.passes.push_back(both);
}

void measure_kernels(const Options& o, const BenchLayer& layer, verify::Clock& clock,
                     Report& report) {
  ProgressLine progress(!o.json);
  clock.restart();
  KernelTimes times(clock);
  for (std::int32_t i = 0; i < o.repeats; ++i) {
    progress.show("measuring every kernel", static_cast<double>(i) / o.repeats);
    layer.forward(&times);
    times.finish_call();
    if (o.pass == "fwd") continue;
    layer.backward(&times);
    times.finish_call();
  }
  for (const std::string& name : times.names()) {
    report.kernels.push_back({name, times.median_seconds(name)});
  }
}

// Fills in flops and rooflines. Runs last: the peak is sampled until the measurement ends.
void add_costs(const Problem& problem, Report& report) {
  for (const KernelCost& cost : kernel_costs(problem, report.machine)) {
    const double flops = cost.flops * report.share();
    const double seconds = has_roofline(report) ? cost.seconds * report.share() : 0.0;
    for (Measurement& m : report.passes) {
      if (m.covers(cost)) m.flops += flops, m.roofline += seconds;
    }
    for (KernelTime& k : report.kernels) {
      if (k.name == cost.name) k.flops = flops, k.roofline = seconds;
    }
  }
}

Report run(const Options& o) {
  if (o.pass != "fwd" && o.pass != "bwd" && o.pass != "both") {
    checks::refuse("pass is \"" + o.pass + "\", must be one of: fwd, bwd, both");
  }
  checks::at_least("repeats", o.repeats, 1);
  const BenchRouting routing = routing_from_name(o.routing);
  const Target target = target_from_options(o.target);
  Report report;
  report.engine = engine_of(target);
  report.engine_note = engine_note_of(target);
  report.shape = o.shape.resolve("laptop");
  const Problem problem = o.layer.problem(report.shape, target.exec);
  report.precision = problem.precision;
  refuse_above_memory(bench_bytes(problem, target.exec), target);
  ProgressLine progress;
  progress.show("checking a slice against the oracle");
  report.check = check_slice(problem, target);
  if (!report.check.passed()) return report;
  report.threads = cpu::thread_count(target.exec, 1e18);
  progress.show("generating values");
  const BenchLayer layer(report.shape, problem, routing, target);
  report.rows = layer.rows();
  progress.clear();
  const std::unique_ptr<verify::Clock> clock = clock_of(target);
  std::unique_ptr<CpuPeak> peak;
  if (!target.on_cuda()) peak = std::make_unique<CpuPeak>(problem.dtype, target.exec);
  measure(o, layer, *clock, peak.get(), report);
  if (o.kernels) measure_kernels(o, layer, *clock, report);
  if (peak != nullptr) {
    peak->sample();
    report.samples = peak->samples();
    report.steadiness = peak->steadiness();
  }
  report.machine = peak != nullptr ? peak->machine() : gpu_machine();
  add_costs(problem, report);
  return report;
}

Json machine_json(const Report& r) {
  Json machine = {{"source", r.machine.source}};
  if (has_roofline(r)) {
    machine["gflops"] = r.machine.flops_per_second / 1e9;
    machine["gbytes_per_second"] = r.machine.bytes_per_second / 1e9;
  }
  if (r.samples > 0) {
    machine["samples"] = r.samples;
    machine["steadiness"] = r.steadiness;
  }
  return machine;
}

Json document(const Options& o, const Report& r) {
  Json passes = Json::array();
  for (const Measurement& m : r.passes) {
    const double median_s = m.median_seconds();
    const auto [low, high] = std::minmax_element(m.seconds.begin(), m.seconds.end());
    passes.push_back({{"pass", m.pass},
                      {"median_ms", 1e3 * median_s},
                      {"min_ms", 1e3 * *low},
                      {"max_ms", 1e3 * *high},
                      {"gflops", m.flops / median_s / 1e9}});
    if (has_roofline(r)) passes.back()["share_of_roofline"] = m.roofline / median_s;
  }
  Json kernels = Json::array();
  for (const KernelTime& k : r.kernels) {
    Json entry = {{"name", k.name}, {"median_us", 1e6 * k.seconds}};
    if (k.flops > 0) entry["gflops"] = k.flops / k.seconds / 1e9;
    if (k.roofline > 0) {
      entry["roofline_us"] = 1e6 * k.roofline;
      entry["share_of_roofline"] = k.roofline / k.seconds;
    }
    kernels.push_back(entry);
  }
  return {
      {"config", o.shape.label()},
      {"shape", to_json(r.shape)},
      {"dtype", o.layer.dtype},
      {"activation", o.layer.activation},
      {"precision", precision_name(r.precision)},
      {"quantise_ms", r.quantise_seconds.empty() ? Json() : Json(1e3 * median(r.quantise_seconds))},
      {"backend", r.engine.empty() ? "cpu" : "cuda"},
      {"engine", r.engine.empty() ? Json() : Json(r.engine)},
      {"engine_note", r.engine_note},
      {"routing", o.routing},
      {"rows", r.rows},
      {"threads", r.threads},
      {"repeats", o.repeats},
      {"check", {{"passed", r.check.passed()}, {"message", r.check.message}}},
      {"machine", machine_json(r)},
      {"passes", passes},
      {"kernels", kernels}};
}

void print_kernels(const Report& r) {
  std::printf("\n%-10s %12s %12s %12s %14s\n", "kernel", "median us", "GFLOP/s", "roofline us",
              "of roofline");
  for (const KernelTime& k : r.kernels) {
    std::printf("%-10s %12.1f", k.name.c_str(), 1e6 * k.seconds);
    if (k.flops > 0) std::printf(" %12.1f", k.flops / k.seconds / 1e9);
    if (k.roofline > 0) {
      std::printf(" %12.1f %13.1f%%", 1e6 * k.roofline, 100 * k.roofline / k.seconds);
    }
    std::printf("\n");
  }
}

std::string where(const Report& r) {
  if (!r.engine.empty()) return "CUDA, engine " + r.engine;
  return std::to_string(r.threads) + (r.threads == 1 ? " thread" : " threads");
}

std::string peak_text(const Report& r) {
  if (!has_roofline(r)) return "no roofline, " + r.machine.source;
  return "peak " + fixed(r.machine.flops_per_second / 1e9, 0) + " GFLOP/s, " +
         fixed(r.machine.bytes_per_second / 1e9, 1) + " GB/s (" + r.machine.source + ")";
}

void print_text(const Options& o, const Report& r) {
  if (!r.check.passed()) {
    std::printf("the check failed, nothing was measured: %s\n", r.check.message.c_str());
    return;
  }
  const std::string numbers =
      o.layer.dtype + (r.precision == Precision::kFp8 ? ", products in fp8" : "");
  std::printf("%s, %s, %s, routing %s (%lld rows), %s\n", to_text(r.shape).c_str(), numbers.c_str(),
              o.layer.activation.c_str(), o.routing.c_str(), static_cast<long long>(r.rows),
              where(r).c_str());
  std::printf("checked against the oracle on a slice; %s\n\n", peak_text(r).c_str());
  std::printf("%-10s %12s %12s%s\n", "pass", "median ms", "GFLOP/s",
              has_roofline(r) ? "    of roofline" : "");
  double largest = 0.0;
  for (const Measurement& m : r.passes) {
    const double seconds = m.median_seconds();
    std::printf("%-10s %12.3f %12.1f", m.pass, 1e3 * seconds, m.flops / seconds / 1e9);
    if (has_roofline(r)) std::printf(" %13.1f%%", 100 * m.roofline / seconds);
    std::printf("\n");
    largest = std::max(largest, m.roofline / seconds);
  }
  if (!r.quantise_seconds.empty()) {
    std::printf("%-10s %12.3f  once for each value of the weights\n", "quantise",
                1e3 * median(r.quantise_seconds));
  }
  if (!r.kernels.empty()) print_kernels(r);
  if (largest > 1.0 && r.samples > 0) {
    std::printf(
        "\nabove 100%%: operands stayed in the cache, or other load lowered the measured peak\n"
        "(the slowest of its samples was %.0f%% of the fastest)\n",
        100 * r.steadiness);
  }
}

}  // namespace

Command add_bench(CLI::App& app) {
  Command command(app, "bench",
                  "Compare a slice of a layer with the oracle, then measure the layer");
  auto o = std::make_shared<Options>();
  o->shape.add_to(command);
  o->layer.add_to(command);
  o->target.add_to(command);
  command.option("--pass", o->pass, "Passes to measure: fwd, bwd or both");
  command.option("--routing", o->routing,
                 "Routing: topk, rounded (token rounding) or skewed (uneven experts)");
  command.option("--repeats", o->repeats, "Number of timed runs; the median is reported");
  command.flag("--kernels", o->kernels, "Also time each kernel");
  command.flag("--json", o->json, "Print one JSON document to stdout");
  command.run = [o] {
    if (o->shape.list) return print_configs(o->json);
    const Report report = run(*o);
    o->json ? print_json(document(*o, report)) : print_text(*o, report);
    return report.check.passed() ? kGood : kCheckFailed;
  };
  return command;
}

}  // namespace sonicmoe::cli
