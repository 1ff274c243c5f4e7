// Shared by the subcommands: registration with main, shape options, output and progress.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "core/configs.h"
#include "sonicmoe/moe.h"

namespace CLI {
class App;
}

namespace sonicmoe::cli {

using Json = nlohmann::ordered_json;

enum ExitCode : int { kGood = 0, kCheckFailed = 1, kBadUsage = 2 };

/// A subcommand, its options, and the function that runs it after they are parsed. Only main.cc
/// includes the parser: it costs a file 8 seconds of compilation, 27 with sanitizers.
class Command {
 public:
  Command(CLI::App& app, const char* name, const char* description);
  /// The default is the value that `value` has at the call. T: std::string, std::int32_t,
  /// std::int64_t, std::uint64_t or double.
  template <class T>
  void option(const char* name, T& value, const char* description);
  /// "--x", or "--x,!--no-x".
  void flag(const char* names, bool& value, const char* description);
  bool chosen() const;

  std::function<ExitCode()> run;

 private:
  CLI::App* app_;
};
Command add_info(CLI::App& app);
Command add_verify(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_route(CLI::App& app);

/// --config NAME or --shape T,d,n,E,K; --list.
struct ShapeOptions {
  std::string config;
  std::string shape;
  bool list = false;

  void add_to(Command& command);
  /// The requested shape, or the shape named `fallback`; without a fallback, --config or --shape
  /// is required.
  LayerShape resolve(const char* fallback = nullptr) const;
  std::string label() const;

 private:
  LayerShape named_or_given(const char* fallback) const;
};

/// --activation, --dtype, --precision.
struct LayerOptions {
  std::string dtype = "bf16";
  std::string activation = "swiglu";
  std::string precision = "tensors";

  void add_to(Command& command);
  /// Refuses a dtype that no layer can have, such as an integer dtype.
  DType layer_dtype() const;
  /// The ids form of a shape; "auto" takes auto_precision() for `exec`.
  Problem problem(const LayerShape& shape, const Exec& exec) const;
};

/// The version of the output of --json: it grows when a field changes its meaning or goes away.
inline constexpr int kJsonFormat = 1;

/// The only thing a --json run writes to stdout: `document` after its "version" and "format".
void print_json(const Json& document);

/// Prints every named shape: the output of --list.
ExitCode print_configs(bool json);

/// One line of progress on stderr, rewritten in place on a terminal that can (TERM is set and not
/// "dumb"). Elsewhere, if `lines`, a line of its own after each half minute.
class ProgressLine {
 public:
  explicit ProgressLine(bool lines = false);
  ~ProgressLine();
  /// `done`: the share of the work that is done, from which the time left is estimated; 0: unknown.
  void show(const std::string& text, double done = 0);
  void clear();

 private:
  using Time = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kBetweenLines{30};

  bool terminal_ = false;
  bool lines_ = false;
  bool shown_ = false;
  Time::time_point began_, last_;
};

/// "1.23 GiB".
std::string bytes_text(double bytes);
std::string fixed(double value, int digits);

Json to_json(const LayerShape& shape);
std::string to_text(const LayerShape& shape);

}  // namespace sonicmoe::cli
