// The command sonicmoe. Exit codes: 0 good, 1 a check failed, 2 bad usage or a refused argument.
#include <cstdio>
#include <exception>

#include "command.h"
#include "sonicmoe/version.h"

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
    if (command.app->parsed()) return command.run();
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
