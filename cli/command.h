// What the subcommands share: how each presents itself to main, shapes, output and progress.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "core/configs.h"
#include "sonicmoe/types.h"
#include "verify/implementation.h"

namespace sonicmoe::cli {

using Json = nlohmann::ordered_json;

enum ExitCode : int { kGood = 0, kCheckFailed = 1, kBadUsage = 2 };

/// A subcommand and what runs it once its options are parsed.
struct Command {
  CLI::App* app = nullptr;
  std::function<ExitCode()> run;
};
Command add_info(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_route(CLI::App& app);

/// --config NAME or --shape T,d,n,E,K.
struct ShapeOptions {
  std::string config;
  std::string shape;

  void add_to(CLI::App& app);
  /// The shape asked for, or that of `fallback`; without a fallback one of the two is required.
  LayerShape resolve(const char* fallback = nullptr) const;
  std::string label() const;
};

/// --activation, --dtype.
struct LayerOptions {
  std::string dtype = "bf16";
  std::string activation = "swiglu";

  void add_to(CLI::App& app);
};

/// Where a subcommand computes: an Exec with its device, closed with the last copy, and the memory
/// to put tensors in.
struct Target {
  Exec exec;
  std::shared_ptr<void> device;
  verify::Memory memory;

  bool on_cuda() const { return exec.backend == Backend::kCuda; }
};
/// "cpu" or "cuda"; refuses other names.
Backend backend_from_name(const std::string& name);
/// Refuses a backend that this build or machine cannot serve.
Target target_from_options(const std::string& backend, std::int32_t threads);
/// What the harness judges there.
verify::Implementation implementation_of(const Target& target);

/// The only thing a --json run writes to stdout.
void print_json(const Json& document);

/// One line on stderr that is rewritten, and only if stderr is a terminal.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  void show(const std::string& text);
  void clear();

 private:
  bool terminal_ = false;
  bool shown_ = false;
};

double median(std::vector<double> values);
/// "1.23 GiB".
std::string bytes_text(double bytes);
std::string fixed(double value, int digits);

Json to_json(const LayerShape& shape);
std::string to_text(const LayerShape& shape);

}  // namespace sonicmoe::cli
