// The command sonicmoe. Exit codes: 0 good, 1 a check failed, 2 bad usage or a refused argument.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "command.h"
#include "sonicmoe/version.h"

namespace sonicmoe::cli {

Command::Command(CLI::App& app, const char* name, const char* description)
    : app_(app.add_subcommand(name, description)) {}

template <class T>
void Command::option(const char* name, T& value, const char* description) {
  app_->add_option(name, value, description)->capture_default_str();
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

int complain(const char* sentence) {
  std::fprintf(stderr, "sonicmoe: %s\n", sentence);
  return cli::kBadUsage;
}

int run(int argc, char** argv) {
  CLI::App app{"Mixture-of-Experts layers for training: inspect, verify, measure and plan them.",
               "sonicmoe"};
  app.set_version_flag("--version", std::string("sonicmoe ") + version_string());
  app.require_subcommand(1);
  const cli::Command commands[] = {cli::add_info(app), cli::add_verify(app), cli::add_bench(app),
                                   cli::add_plan(app), cli::add_route(app)};
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    if (argc > 1 && argv[1][0] != '-' && app.get_subcommands().empty()) {
      return complain((std::string("command is \"") + argv[1] +
                       "\", must be one of: info, verify, bench, plan, route")
                          .c_str());
    }
    return complain(e.what());
  }
  for (const cli::Command& command : commands) {
    if (command.chosen()) return command.run();
  }
  return cli::kBadUsage;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    return complain(e.what());
  }
}
