// sonicmoe plan: the cost of a layer, computed without running it.
#include "core/plan.h"

#include <cstdio>
#include <memory>
#include <optional>

#include "command.h"
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/fp8_layout.h"
#include "core/layer_model.h"
#include "peak.h"
#include "plan_finetune.h"
#include "target.h"

namespace sonicmoe::cli {
namespace {

// The device of a plan on a machine without a GPU whose data sheet is known.
constexpr const char* kFallback = "h200";

struct Options {
  ShapeOptions shape;
  LayerOptions layer;
  FinetuneOptions finetune;
  std::string device;   ///< empty: this machine's GPU, else kFallback
  std::string engine;   ///< empty: the engine that serves the device
  std::string backend;  ///< empty: the backend of the device
  std::int64_t tile = 128;
  bool json = false;
};

struct Plan {
  LayerShape shape;
  bool fallback = false;  ///< whether the machine is kFallback
  Problem problem;
  Machine machine;  ///< its rate is the peak of the engine's instructions
  EngineRate engine;
  std::vector<KernelCost> kernels;
  double padding = 0.0;
  MemoryCost memory;
  Backend backend = Backend::kCpu;
  std::optional<WorkspaceCost> workspace;    ///< none where this build has no kernels
  std::map<std::string, std::string> tiles;  ///< by kernel, where the backend has them

  std::string tile(const KernelCost& k) const {
    const auto found = tiles.find(k.name);
    return found == tiles.end() ? "" : found->second;
  }
};

/// The Exec that the problem is planned for. Its device is a model, so the machine needs no such
/// GPU; the device is null on the CPU, and if this build has no kernels for the GPU.
Exec exec_of(const Plan& p) {
  Exec exec{.backend = p.backend};
  const BackendTable* table = find_backend(p.backend);
  if (table != nullptr && table->device_model != nullptr && p.machine.capability != 0) {
    exec.device = table->device_model(p.machine.capability);
  }
  return exec;
}

Problem problem_from(const Options& o, const Plan& p) {
  const Exec exec = exec_of(p);
  const bool on_cpu = p.backend == Backend::kCpu;
  if (o.layer.precision == "auto" && !on_cpu && exec.device == nullptr) {
    checks::refuse("precision is auto, must be tensors or fp8: this build has no kernels for " +
                   p.machine.name);
  }
  return o.layer.problem(p.shape, exec);
}

/// The memory of the layer with the sizes of `shape`; none if no layer has these sizes, or fp8 does
/// not serve its width.
std::optional<MemoryCost> memory_at(const Plan& p, const LayerShape& shape) {
  try {
    Problem at = problem_of(shape, p.problem.dtype, p.problem.activation);
    at.precision = p.problem.precision;
    if (at.precision == Precision::kFp8 && at.width % fp8::kStep != 0) return std::nullopt;
    return memory_cost(at);
  } catch (const Error&) {
    return std::nullopt;  // more experts than any layer has, for example
  }
}

/// Refuses what no engine of CUDA serves, also in a build without CUDA (src/cuda/layer/checks.cc
/// has the same limits).
void refuse_off_cuda(const Problem& p) {
  const auto is = [](const char* name, std::int64_t value) {
    return std::string(name) + " is " + std::to_string(value);
  };
  if (dtype_bytes(p.dtype) != 2) {
    checks::refuse(std::string("dtype is ") + dtype_name(p.dtype) +
                   ", must be bf16 or f16 on a GPU (--device cpu plans for this machine's CPU)");
  }
  if (p.hidden % 8 != 0)
    checks::refuse(is("hidden", p.hidden) + ", must be a multiple of 8 on a GPU");
  if (p.width % 8 != 0) checks::refuse(is("width", p.width) + ", must be a multiple of 8 on a GPU");
  if (p.experts > 1024)
    checks::refuse(is("experts", p.experts) + ", must be at most 1024 on a GPU");
}

Plan make_plan(const Options& o) {
  Plan p;
  std::string device = o.device.empty() ? machine_here() : o.device;
  p.fallback = device.empty();
  if (p.fallback) device = kFallback;
  p.shape = o.shape.resolve();
  checks::below_2_31("tile", o.tile);
  p.padding = expected_padding(p.shape, o.tile);
  const DType dtype = o.layer.layer_dtype();
  p.machine = device == "cpu" ? measured_cpu(dtype, {}) : machine_from_name(device);
  p.engine = engine_rate(p.machine, o.engine);
  p.machine.flops_per_second = p.engine.flops_per_second;
  const std::string of_device = device == "cpu" ? "cpu" : "cuda";
  p.backend = backend_from_name(o.backend.empty() ? of_device : o.backend);
  p.problem = problem_from(o, p);
  if (p.backend == Backend::kCuda) refuse_off_cuda(p.problem);
  p.kernels = kernel_costs(p.problem, p.machine);
  p.memory = memory_cost(p.problem);
  // This build may lack the backend. If --backend names it, backend_table() refuses; otherwise the
  // plan has no workspace and no tiles.
  if (o.backend.empty() && find_backend(p.backend) == nullptr) return p;
  const BackendTable& table = backend_table(p.backend);
  const Exec exec = exec_of(p);
  if (table.device_model != nullptr && p.machine.capability != 0) {
    // Each engine has its own tiles and workspace: the values of another engine would mislead.
    if (exec.device == nullptr || table.engine_name(exec.device) != p.engine.name) return p;
  }
  if (table.refusal != nullptr && !table.refusal(p.problem, exec).empty()) return p;
  p.workspace = workspace_cost(p.problem, exec);
  p.tiles = chosen_tiles(p.problem, exec);
  return p;
}

const char* backend_text(const Plan& p) { return p.backend == Backend::kCpu ? "cpu" : "cuda"; }

struct PassTotal {
  double flops = 0.0, bytes = 0.0, seconds = 0.0;
};
PassTotal total(const Plan& p, bool backward) {
  PassTotal t;
  for (const KernelCost& k : p.kernels) {
    if (k.backward != backward) continue;
    t.flops += k.flops;
    t.bytes += k.bytes;
    t.seconds += k.seconds;
  }
  return t;
}

Json to_json(const MemoryCost& m) {
  return {{"x", m.x},
          {"ours", m.ours()},
          {"ours_h", m.h},
          {"ours_metadata", m.metadata},
          {"cache_everything", m.cache_everything},
          {"scatter_style", m.scatter_style},
          {"fp8_weights", m.fp8_weights},
          {"callers", m.callers}};
}

Json to_json(const std::optional<WorkspaceCost>& w) {
  if (!w) return nullptr;
  return {{"forward", w->forward}, {"backward", w->backward}, {"inference", w->inference}};
}

bool share_known(const Plan& p) {
  return p.engine.name != "cpu" && p.engine.evidence != Evidence::kEstimated &&
         dtype_bytes(p.problem.dtype) == 2 && p.problem.precision == Precision::kTensors;
}

Json to_json(const Plan& p, bool backward) {
  const PassTotal t = total(p, backward);
  Json pass = {{"flops", t.flops}, {"bytes", t.bytes}, {"us", t.seconds * 1e6}};
  pass["sustained_us"] =
      share_known(p) ? Json(pass["us"].get<double>() / p.engine.share.mean) : Json(nullptr);
  return pass;
}

Json device_json(const Plan& p) {
  const bool memory = p.machine.memory_bytes != 0;
  const std::string capability = fixed(p.machine.capability / 10.0, 1);
  return {{"name", p.machine.name},
          {"flops_per_second", p.machine.flops_per_second},
          {"bytes_per_second", p.machine.bytes_per_second},
          {"memory_bytes", memory ? Json(p.machine.memory_bytes) : Json(nullptr)},
          {"compute_capability", memory ? Json(capability) : Json(nullptr)},
          {"source", p.machine.source}};
}

Json engine_json(const Plan& p) {
  return {{"name", p.engine.name},
          {"instructions", p.engine.instructions},
          {"evidence", evidence_name(p.engine.evidence)},
          {"note", p.engine.note}};
}

/// Floating-point operations of the products over the seconds of both passes.
double model_rate(const Plan& p, const ModelledLayer& m) {
  return (total(p, false).flops + total(p, true).flops) / (m.forward_seconds + m.backward_seconds);
}

Json model_json(const Plan& p) {
  Json model = Json::array();
  for (const ModelledLayer& m : modelled_layers(p.problem, p.machine)) {
    model.push_back({{"engine", m.engine},
                     {"forward_us", m.forward_seconds * 1e6},
                     {"backward_us", m.backward_seconds * 1e6},
                     {"flops_per_second", model_rate(p, m)}});
  }
  return model;
}

Json document(const Options& o, const Plan& p) {
  Json kernels = Json::array(), sweep = Json::array();
  for (const KernelCost& k : p.kernels) {
    kernels.push_back({{"name", k.name},
                       {"pass", k.backward ? "backward" : "forward"},
                       {"flops", k.flops},
                       {"bytes", k.bytes},
                       {"us", k.seconds * 1e6},
                       {"bound", k.memory_bound ? "memory" : "compute"}});
    if (const std::string tile = p.tile(k); !tile.empty()) kernels.back()["tile"] = tile;
  }
  for (const LayerShape& s : granularity_sweep(p.shape)) {
    const std::optional<MemoryCost> memory = memory_at(p, s);
    if (!memory) continue;
    sweep.push_back(cli::to_json(s));
    sweep.back()["kept_bytes"] = to_json(*memory);
  }
  return {{"shape", cli::to_json(p.shape)},
          {"dtype", o.layer.dtype},
          {"activation", o.layer.activation},
          {"precision", precision_name(p.problem.precision)},
          {"device", device_json(p)},
          {"engine", engine_json(p)},
          {"kernels", kernels},
          {"forward", to_json(p, false)},
          {"backward", to_json(p, true)},
          {"tile", o.tile},
          {"model", model_json(p)},
          {"expected_padding", p.padding},
          {"kept_bytes", to_json(p.memory)},
          {"backend", backend_text(p)},
          {"workspace_bytes", to_json(p.workspace)},
          {"granularity", sweep}};
}

void print_kernels(const Plan& p) {
  std::printf("%-10s %12s %12s %12s  %s\n", "kernel", "GFLOP", "MB", "roofline us", "bound by");
  for (const KernelCost& k : p.kernels) {
    std::printf("%-10s %12.2f %12.2f %12.1f  %-9s %s\n", k.name, k.flops / 1e9, k.bytes / 1e6,
                k.seconds * 1e6, k.memory_bound ? "memory" : "compute", p.tile(k).c_str());
  }
  for (const bool backward : {false, true}) {
    const PassTotal t = total(p, backward);
    std::printf("%-10s %12.2f %12.2f %12.1f", backward ? "backward" : "forward", t.flops / 1e9,
                t.bytes / 1e6, t.seconds * 1e6);
    if (share_known(p)) {
      const ShareOfRoofline& share = p.engine.share;
      std::printf("  sustained %.1f (%.1f to %.1f)", t.seconds * 1e6 / share.mean,
                  t.seconds * 1e6 / share.most, t.seconds * 1e6 / share.least);
    }
    std::printf("\n");
  }
}

void print_model(const Plan& p) {
  const std::vector<ModelledLayer> layers = modelled_layers(p.problem, p.machine);
  if (layers.empty()) return;
  const bool measured = p.machine.capability == 90;
  std::printf("\nmodel of the layer on a hot card, not a measurement; %s\n",
              measured ? "fitted to the records of one H200" : "no such card has run this library");
  for (const ModelledLayer& m : layers) {
    std::printf("  %-10s forward %10.1f us, backward %10.1f us, %6.0f TFLOP/s%s\n",
                m.engine.c_str(), m.forward_seconds * 1e6, m.backward_seconds * 1e6,
                model_rate(p, m) / 1e12,
                m.engine == "blackwell" ? ", only if it is asked for by name" : "");
  }
}

void print_workspace(const Plan& p) {
  if (!p.workspace) {
    std::printf("\nworkspace during a call (%s): not known, this build has no kernels for %s\n",
                backend_text(p), p.machine.name.c_str());
    return;
  }
  std::printf("\nworkspace during a call (%s): forward %s, backward %s, inference %s\n",
              backend_text(p), bytes_text(static_cast<double>(p.workspace->forward)).c_str(),
              bytes_text(static_cast<double>(p.workspace->backward)).c_str(),
              bytes_text(static_cast<double>(p.workspace->inference)).c_str());
}

void print_memory(const Plan& p) {
  const auto line = [](const char* what, std::int64_t bytes, const char* formula) {
    std::printf("  %-26s %12s  %s\n", what, bytes_text(static_cast<double>(bytes)).c_str(),
                formula);
  };
  const MemoryCost& m = p.memory;
  std::printf("\nkept for backward, not counting X (%s, which every method keeps)\n",
              bytes_text(static_cast<double>(m.x)).c_str());
  const bool fp8 = p.problem.precision == Precision::kFp8;
  line("this library", m.ours(),
       fp8 ? "H: G*T*K*n codes and their scales, and metadata"
           : "H: G*T*K*n elements, and metadata");
  line("  of that metadata", m.metadata, "");
  line("cache everything", m.cache_everything, "gathered X, H, A, Y: T*K*(2d + (G+1)n)");
  line("ScatterMoE style", m.scatter_style, "Y, H, A, its factors: T*K*(d + 2Gn)");
  line("the caller's", m.callers, "ids, routing weights, logits");
  if (fp8) line("quantised weights", m.fp8_weights, "shared by micro-batches");

  print_workspace(p);
  std::printf("\nthe same at other granularities: K*n, E*n and flops constant\n");
  std::printf("  %6s %6s %6s %14s %18s %18s\n", "K", "n", "E", "this library", "cache everything",
              "ScatterMoE style");
  for (const LayerShape& s : granularity_sweep(p.shape)) {
    const std::optional<MemoryCost> memory = memory_at(p, s);
    if (!memory) continue;
    const MemoryCost& at = *memory;
    std::printf("  %6lld %6lld %6lld %14s %18s %18s\n", static_cast<long long>(s.top_k),
                static_cast<long long>(s.width), static_cast<long long>(s.experts),
                bytes_text(static_cast<double>(at.ours())).c_str(),
                bytes_text(static_cast<double>(at.cache_everything)).c_str(),
                bytes_text(static_cast<double>(at.scatter_style)).c_str());
  }
}

const char* evidence_text(const Plan& p) {
  switch (p.engine.evidence) {
    case Evidence::kMeasured:
      return "measured on this device";
    case Evidence::kRun:
      return "has run on this device; sustained times by its share of the roofline on an H200";
    case Evidence::kEstimated:
      break;
  }
  return "never run on this device: times are the roofline, an estimate";
}

void print_engine(const Plan& p) {
  std::printf("engine %s (%s): %s\n", p.engine.name.c_str(), p.engine.instructions.c_str(),
              evidence_text(p));
  if (!p.engine.note.empty()) std::printf("  %s\n", p.engine.note.c_str());
  if (p.machine.memory_bytes != 0) {
    std::printf("memory of the device: %s\n",
                bytes_text(static_cast<double>(p.machine.memory_bytes)).c_str());
  }
}

void print_text(const Options& o, const Plan& p) {
  std::printf("%s, %s, %s\n", to_text(p.shape).c_str(), o.layer.dtype.c_str(),
              o.layer.activation.c_str());
  std::printf("roofline of %s (%s)\n", p.machine.name.c_str(), p.machine.source.c_str());
  if (p.fallback) {
    std::printf("  the default where no GPU with a known data sheet is found; --device chooses\n");
  }
  print_engine(p);
  if (p.problem.precision == Precision::kFp8) {
    std::printf("A, Y, dH and dX~ in fp8 at %.1f times the rate of bf16, as measured on one H200\n",
                kFp8Rate);
  }
  std::printf("\n");
  print_kernels(p);
  print_model(p);
  std::printf("\npadding to tiles of %lld rows: %.1f%% more rows, at even random routing\n",
              static_cast<long long>(o.tile), 100 * p.padding);
  print_memory(p);
}

}  // namespace

Command add_plan(CLI::App& app) {
  Command command(
      app, "plan",
      "Compute flops, bytes, roofline, padding and memory of a layer without running it");
  auto o = std::make_shared<Options>();
  o->shape.add_to(command);
  o->layer.add_to(command);
  o->finetune.add_to(command);
  command.option(
      "--device", o->device,
      "A GPU, whose rates are those of its data sheet: h200, a100, rtx-4090, ... (an "
      "unknown name lists all); or cpu, which is measured (default: this machine's GPU, else "
      "h200)");
  command.option("--engine", o->engine,
                 "Engine: hopper, portable or blackwell (default: that of the device)");
  command.option(
      "--backend", o->backend,
      "Backend whose tiles and workspace are reported: cpu or cuda (default: that of the "
      "device)");
  command.option("--tile", o->tile, "Rows of a tile, to compute the padding");
  command.flag("--json", o->json, "Print one JSON document to stdout");
  command.run = [o] {
    if (o->shape.list) return print_configs(o->json);
    if (!o->finetune.model.empty()) {
      if (!o->shape.config.empty() || !o->shape.shape.empty()) {
        checks::refuse("finetune is given, so config and shape must be absent");
      }
      if (!o->backend.empty()) {
        checks::refuse("finetune is given, so backend must be absent, is \"" + o->backend + "\"");
      }
      return print_finetune(o->finetune, o->device, o->engine, o->json);
    }
    if (o->finetune.plan != FinetunePlan{}) {
      checks::refuse(
          "finetune is absent, so sequence, batch, rank, weights, factors, optimizer, dense, "
          "unpack-mib, logits, offload-embedding and no-checkpointing must be absent");
    }
    const Plan p = make_plan(*o);
    o->json ? print_json(document(*o, p)) : print_text(*o, p);
    return kGood;
  };
  return command;
}

}  // namespace sonicmoe::cli
