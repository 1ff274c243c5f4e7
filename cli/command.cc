#include "command.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "core/backend_table.h"
#include "core/check_tensor.h"
#include "core/checks.h"
#include "verify/device.h"

namespace sonicmoe::cli {

void ShapeOptions::add_to(CLI::App& app) {
  app.add_option("--config", config,
                 "A named shape, e.g. 7B-n256 (an unknown name lists them all)");
  app.add_option("--shape", shape, "T,d,n,E,K: tokens, model width, expert width, experts, top-k");
}

LayerShape ShapeOptions::resolve(const char* fallback) const {
  if (!config.empty() && !shape.empty()) {
    checks::refuse("config and shape are both given, must be one of them");
  }
  if (!shape.empty()) return shape_from_text(shape);
  if (!config.empty()) return config_from_name(config);
  if (fallback == nullptr) {
    checks::refuse("shape is missing, must be --shape T,d,n,E,K or --config NAME");
  }
  return config_from_name(fallback);
}

std::string ShapeOptions::label() const {
  if (!config.empty()) return config;
  return shape.empty() ? "laptop" : shape;
}

void LayerOptions::add_to(CLI::App& app) {
  app.add_option("--dtype", dtype, "f32, bf16, f16 or f64")->capture_default_str();
  app.add_option("--activation", activation, "swiglu, geglu, silu, ...")->capture_default_str();
}

Backend backend_from_name(const std::string& name) {
  if (name == "cpu") return Backend::kCpu;
  if (name == "cuda") return Backend::kCuda;
  checks::refuse("backend is \"" + name + "\", must be one of: cpu, cuda");
}

Target target_from_options(const std::string& backend, std::int32_t threads) {
  Target target;
  target.exec.num_threads = threads;
  target.exec.backend = backend_from_name(backend);
  target.memory = verify::host_memory();
  if (target.on_cuda()) {
    if (const CudaBackend* cuda = cuda_backend(); cuda != nullptr) {
      target.device = {cuda->device_open(0), cuda->device_close};
      target.exec.device = target.device.get();
      target.memory = verify::device_memory();
    }
  }
  checks::exec(target.exec);
  return target;
}

verify::Implementation implementation_of(const Target& target) {
  return target.on_cuda() ? verify::cuda_implementation(target.exec)
                          : verify::public_api(target.exec);
}

void print_json(const Json& document) { std::printf("%s\n", document.dump(2).c_str()); }

ProgressLine::ProgressLine() : terminal_(isatty(STDERR_FILENO) != 0) {}
ProgressLine::~ProgressLine() { clear(); }

void ProgressLine::show(const std::string& text) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void ProgressLine::clear() {
  if (shown_) std::fprintf(stderr, "\r\033[K");
  shown_ = false;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return fixed(bytes, unit == 0 ? 0 : 1) + " " + kUnits[unit];
}

Json to_json(const LayerShape& s) {
  return {{"T", s.tokens}, {"d", s.hidden}, {"n", s.width}, {"E", s.experts}, {"K", s.top_k}};
}

std::string to_text(const LayerShape& s) {
  return "T " + std::to_string(s.tokens) + ", d " + std::to_string(s.hidden) + ", n " +
         std::to_string(s.width) + ", E " + std::to_string(s.experts) + ", K " +
         std::to_string(s.top_k);
}

}  // namespace sonicmoe::cli
