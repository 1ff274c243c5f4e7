// sonicmoe info: this build, its backends and the devices that it can run on.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>

#include "command.h"
#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "cpu/gemm_kernels.h"
#include "cpu/threads.h"
#include "gpu.h"
#include "sonicmoe/c_api.h"
#include "sonicmoe/version.h"
#include "target.h"

namespace sonicmoe::cli {
namespace {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::vector<std::string> cpu_features() {
  std::vector<std::string> found;
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
#define SONICMOE_FEATURE(name) \
  if (__builtin_cpu_supports(name)) found.emplace_back(name);
  SONICMOE_FEATURE("avx2")
  SONICMOE_FEATURE("fma")
  SONICMOE_FEATURE("avx512f")
  SONICMOE_FEATURE("avx512bw")
  SONICMOE_FEATURE("avx512vl")
  SONICMOE_FEATURE("avx512dq")
  SONICMOE_FEATURE("avx512bf16")
#undef SONICMOE_FEATURE
#endif
  return found;
}

// The engines of the CUDA backend, in the order in which they are chosen.
Json engines(const BackendTable* cuda) {
  Json list = Json::array();
  if (cuda == nullptr) return list;
  for (const EngineInfo& engine : cuda->engines()) {
    Json choices = Json::array();
    for (const EngineChoice& c : engine.choices) {
      choices.push_back({{"name", c.name}, {"value", c.value}, {"reason", c.reason}});
    }
    list.push_back({{"name", engine.name}, {"serves", engine.serves}, {"choices", choices}});
  }
  return list;
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// Opens the first device and closes it, to learn whether it can be used and by which engine.
Json cuda_state(const std::string& engine) {
  const BackendTable* cuda = find_backend(Backend::kCuda);
  Json state = {{"built", cuda != nullptr},
                {"usable", false},
                {"reason", ""},
                {"archs", words(cuda == nullptr ? "" : cuda->code_names())},
                {"engines", engines(cuda)},
                {"engine", nullptr},
                {"engine_note", ""}};
  const auto is_engine = [&](const Json& e) { return e["name"] == engine; };
  if (!engine.empty() &&
      std::none_of(state["engines"].begin(), state["engines"].end(), is_engine)) {
    std::string names;
    for (const Json& e : state["engines"]) names += ' ' + e["name"].get<std::string>();
    checks::refuse("engine is \"" + engine +
                   "\", must be one of:" + (names.empty() ? " none" : names));
  }
  smoe_device_options options = {};
  options.size = sizeof options;
  options.engine = engine.empty() ? nullptr : engine.c_str();
  smoe_device* device = nullptr;
  if (smoe_device_open_with(&options, &device) != SMOE_OK) {
    state["reason"] = gpu_problem(smoe_last_error(), driver_present());
    return state;
  }
  state["engine"] = smoe_device_engine(device);
  state["engine_note"] = smoe_device_engine_note(device);
  smoe_device_close(device);
  state["usable"] = true;
  return state;
}

Json document(const std::string& engine) {
  return {{"build_type", SONICMOE_BUILD_TYPE},
          {"compiler", SONICMOE_COMPILER},
          {"cpu",
           {{"model", cpu_model()},
            {"features", cpu_features()},
            {"instruction_set", cpu::isa_name(cpu::best_isa())},
            {"threads", cpu::thread_count({}, 1e18)}}},
          {"cuda", cuda_state(engine)}};
}

std::string joined(const Json& list) {
  std::string text;
  for (const auto& item : list) {
    if (!text.empty()) text += ' ';
    text += item.get<std::string>();
  }
  return text.empty() ? "none" : text;
}

void print_text(const Json& d) {
  const Json& cpu = d["cpu"];
  const Json& cuda = d["cuda"];
  const auto line = [](const char* name, const std::string& value) {
    std::printf("%-16s %s\n", name, value.c_str());
  };
  line("sonicmoe", version_string());
  line("build", d["build_type"].get<std::string>() + ", " + d["compiler"].get<std::string>());
  line("CPU", cpu["model"]);
  line("  features", joined(cpu["features"]));
  line("  uses", cpu["instruction_set"]);
  line("  threads", std::to_string(cpu["threads"].get<int>()));
  line("CUDA", cuda["usable"].get<bool>() ? "usable" : cuda["reason"].get<std::string>());
  line("  kernels for", cuda["built"].get<bool>() ? joined(cuda["archs"]) : "none");
  for (const Json& engine : cuda["engines"]) {
    line("  engine", engine["name"].get<std::string>() + ", for " +
                         engine["serves"].get<std::string>() +
                         (engine["name"] == cuda["engine"] ? ": used here" : ""));
  }
  if (const std::string note = cuda["engine_note"]; !note.empty()) line("  note", note);
}

}  // namespace

Command add_info(CLI::App& app) {
  Command command(app, "info",
                  "Print version, build, CPU features, threads and CUDA devices, for bug reports");
  struct Options {
    std::string engine;
    bool json = false;
  };
  auto o = std::make_shared<Options>();
  command.option("--engine", o->engine, "Report on the first GPU with this engine");
  command.flag("--json", o->json, "Print one JSON document to stdout");
  command.run = [o] {
    const Json d = document(o->engine);
    o->json ? print_json(d) : print_text(d);
    return kGood;
  };
  return command;
}

}  // namespace sonicmoe::cli
