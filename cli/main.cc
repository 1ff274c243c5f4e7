// The command sonicmoe.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <limits>
#include <new>
#include <string>
#include <type_traits>

#include "command.h"
#include "core/check_tensor.h"
#include "sonicmoe/version.h"

namespace sonicmoe::cli {

Command::Command(CLI::App& app, const char* name, const char* description)
    : app_(app.add_subcommand(name, description)) {}

namespace {

// Checks the range of an integer option. The parser itself would read -1 as 2^64 - 1, and would
// accept 2^64.
template <class T>
CLI::Validator integer(const char* name) {
  const std::string argument = std::string(name).substr(2);  // without its "--"
  return {[argument](const std::string& text) -> std::string {
            T value = 0;
            const char* last = text.data() + text.size();
            const auto [end, error] = std::from_chars(text.data(), last, value);
            if (std::is_unsigned_v<T> && text.starts_with('-')) {
              checks::refuse(argument + " is " + text + ", must be at least 0");
            }
            if (error == std::errc::result_out_of_range) {
              checks::refuse(argument + " is " + text + ", must be from " +
                             std::to_string(std::numeric_limits<T>::min()) + " to " +
                             std::to_string(std::numeric_limits<T>::max()));
            }
            if (error != std::errc{} || end != last) {
              checks::refuse(argument + " is \"" + text + "\", must be an integer");
            }
            return "";
          },
          ""};
}

}  // namespace

template <class T>
void Command::option(const char* name, T& value, const char* description) {
  CLI::Option* option = app_->add_option(name, value, description)->capture_default_str();
  if constexpr (std::is_integral_v<T>) option->check(integer<T>(name));
}
template void Command::option(const char*, std::string&, const char*);
template void Command::option(const char*, std::int32_t&, const char*);
template void Command::option(const char*, std::int64_t&, const char*);
template void Command::option(const char*, std::uint64_t&, const char*);
template void Command::option(const char*, double&, const char*);

void Command::flag(const char* names, bool& value, const char* description) {
  app_->add_flag(names, value, description);
}

bool Command::chosen() const { return app_->parsed(); }

}  // namespace sonicmoe::cli

namespace {

using namespace sonicmoe;

constexpr const char* kCommands = "must be one of: info, verify, bench, plan, route";

int complain(const std::string& sentence) {
  std::fprintf(stderr, "sonicmoe: %s\n", sentence.c_str());
  return cli::kBadUsage;
}

int run(int argc, char** argv) {
  CLI::App app{"Mixture-of-Experts layers for training: inspect, verify, measure and plan them.",
               "sonicmoe"};
  app.set_version_flag("--version", std::string("sonicmoe ") + version_string());
  app.require_subcommand(1);
  app.footer(  // subcommands print it too
      "Exit codes: 0 done; 1 a check against the oracle failed; 2 an argument is wrong or not "
      "supported, or the output cannot be written (one sentence on stderr says why).\n"
      "The oracle is the library's own reference implementation in fp64. Documentation: "
      "docs/command.md.");
  const cli::Command commands[] = {cli::add_info(app), cli::add_verify(app), cli::add_bench(app),
                                   cli::add_plan(app), cli::add_route(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    if (argc == 1) return complain(std::string("command is missing, ") + kCommands);
    if (argv[1][0] != '-' && app.get_subcommands().empty()) {
      return complain(std::string("command is \"") + argv[1] + "\", " + kCommands);
    }
    return complain(e.what());
  }
  for (const cli::Command& command : commands) {
    if (command.chosen()) return command.run();
  }
  return cli::kBadUsage;
}

/// Output is lost silently unless someone asks: a full disk shows when the buffer is written.
int written(int code) {
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return code;
  return complain(std::string("stdout cannot be written: ") + std::strerror(errno));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return written(run(argc, argv));
  } catch (const std::bad_alloc&) {
    return complain("this machine has not enough memory for the call");
  } catch (const std::exception& e) {
    return complain(e.what());
  }
}
