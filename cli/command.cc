#include "command.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "core/check_tensor.h"
#include "core/checks.h"
#include "core/plan.h"
#include "sonicmoe/version.h"

namespace sonicmoe::cli {

void ShapeOptions::add_to(Command& command) {
  command.option("--config", config,
                 "A named shape such as 7B-n256, with another T as olmoe-T64 (--list prints them)");
  command.flag("--list", list, "Print the named shapes and exit");
  command.option("--shape", shape,
                 "T,d,n,E,K: tokens, model width, expert width, experts, experts per token");
}

LayerShape ShapeOptions::resolve(const char* fallback) const {
  const LayerShape found = named_or_given(fallback);
  problem_of(found, DType::kBF16, {});  // refuses impossible shapes before anything is computed
  return found;
}

LayerShape ShapeOptions::named_or_given(const char* fallback) const {
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

void LayerOptions::add_to(Command& command) {
  command.option("--dtype", dtype, "Dtype of the tensors: f32, bf16, f16 or f64");
  command.option("--activation", activation,
                 "Activation: swiglu, geglu, silu, ... (an unknown name lists all)");
  command.option("--precision", precision,
                 "Precision of the products: tensors (that of --dtype), fp8 or auto");
}

DType LayerOptions::layer_dtype() const {
  for (const DType candidate : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    if (dtype == dtype_name(candidate)) return candidate;
  }
  checks::refuse("dtype is \"" + dtype + "\", must be one of: f32, bf16, f16, f64");
}

Problem LayerOptions::problem(const LayerShape& shape, const Exec& exec) const {
  Problem p = problem_of(shape, layer_dtype(), {activation_from_name(activation.c_str())});
  p.precision =
      precision == "auto" ? auto_precision(p, exec) : precision_from_name(precision.c_str());
  checks::problem(p);
  return p;
}

void print_json(const Json& document) {
  Json whole = {{"version", version_string()}, {"format", kJsonFormat}};
  whole.update(document);
  std::printf("%s\n", whole.dump(2).c_str());
}

ExitCode print_configs(bool json) {
  Json configs = Json::array();
  for (const NamedConfig& c : named_configs()) {
    configs.push_back({{"name", c.name}, {"shape", to_json(c.shape)}});
    if (!json) std::printf("%-18s %s\n", c.name, to_text(c.shape).c_str());
  }
  if (json) print_json({{"configs", configs}});
  return kGood;
}

ProgressLine::ProgressLine(bool lines) : lines_(lines), began_(Time::now()), last_(began_) {
  const char* terminal = std::getenv("TERM");
  terminal_ =
      isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::string_view(terminal) != "dumb";
}
ProgressLine::~ProgressLine() { clear(); }

void ProgressLine::show(const std::string& text, double done) {
  using Seconds = std::chrono::duration<double>;
  const Time::time_point now = Time::now();
  if (!terminal_ && (!lines_ || now - last_ < kBetweenLines)) return;
  std::string line = text;
  const double seconds = Seconds(now - began_).count();
  if (done > 0 && seconds > 2) {
    const double left = seconds / done - seconds;
    line += left < 100 ? ", about " + fixed(left, 0) + " s left"
                       : ", about " + fixed(left / 60, 0) + " minutes left";
  }
  last_ = now;
  std::fprintf(stderr, terminal_ ? "\r\033[K%s" : "%s\n", line.c_str());
  std::fflush(stderr);
  shown_ = terminal_;
}

void ProgressLine::clear() {
  if (shown_) std::fprintf(stderr, "\r\033[K");
  shown_ = false;
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
