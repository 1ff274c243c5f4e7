// sonicmoe verify: every kernel against the oracle, and broken kernels that must be rejected.
#include <cstdio>
#include <memory>

#include "command.h"
#include "core/backend_table.h"
#include "target.h"
#include "verify/harness.h"
#include "verify/negative.h"

namespace sonicmoe::cli {
namespace {

struct Options {
  TargetOptions target;
  std::string filter;
  std::string precision;  ///< of the cases to run; empty: all
  bool full = false;
  bool list = false;
  bool negative = true;
  bool json = false;
};

struct Outcome {
  std::string backend, engine, engine_note;
  std::vector<verify::CaseResult> cases;
  std::vector<verify::ControlResult> controls;

  bool good() const {
    for (const auto& c : cases) {
      if (!c.passed()) return false;
    }
    for (const auto& c : controls) {
      if (!c.rejected()) return false;
    }
    return true;
  }
};

verify::VerifyOptions extent_of(const Options& o) {
  verify::VerifyOptions options{o.full ? verify::Extent::kFull : verify::Extent::kQuick, o.filter};
  if (!o.precision.empty()) options.precision = precision_from_name(o.precision.c_str());
  return options;
}

// The names that --filter selects from.
ExitCode print_names(const Options& o) {
  const verify::VerifyOptions options = extent_of(o);
  Json names = Json::array();
  for (const verify::Case& c : verify::all_cases(options.extent, options.filter)) {
    if (!verify::asked_for(options, c)) continue;
    names.push_back(c.name);
    if (!o.json) std::printf("%s\n", c.name.c_str());
  }
  if (o.json) {
    print_json({{"cases", names}, {"broken_implementations", verify::negative_control_names()}});
  }
  return kGood;
}

Outcome run(const Options& o) {
  const Target target = target_from_options(o.target);
  const verify::Implementation implementation = implementation_of(target);
  const verify::VerifyOptions options = extent_of(o);
  ProgressLine progress(!o.json);
  Outcome outcome;
  outcome.backend = backend_name(target.exec.backend);
  outcome.engine = engine_of(target);
  outcome.engine_note = engine_note_of(target);
  const auto show = [&](const verify::CaseResult& r, std::size_t done, std::size_t total) {
    const std::string count = std::to_string(done) + "/" + std::to_string(total);
    progress.show(count + " " + r.name, static_cast<double>(done) / static_cast<double>(total));
  };
  outcome.cases = verify::verify(options, implementation, show);
  if (outcome.cases.empty()) {
    throw Error(Status::kInvalidArgument,
                "filter is \"" + o.filter + "\", must be part of a case's name" +
                    (o.precision.empty() ? "" : " in precision " + o.precision));
  }
  if (o.negative) {
    const auto control = [&](const verify::ControlResult& r) {
      progress.show("negative control: " + r.name);
    };
    // Every control runs, whatever the filter: the filter selects cases, and could exclude all the
    // cases that a control breaks.
    outcome.controls =
        verify::negative_controls({options.extent, "", options.precision}, implementation, control);
  }
  return outcome;
}

Json document(const Outcome& outcome) {
  Json cases = Json::array(), controls = Json::array();
  for (const auto& r : outcome.cases) {
    cases.push_back({{"name", r.name},
                     {"passed", r.passed()},
                     {"fault", r.passed() ? "" : verify::fault_name(r.fault)},
                     {"message", r.message},
                     {"worst_ratio", r.worst_ratio()},
                     {"seconds", r.seconds}});
  }
  for (const auto& r : outcome.controls) {
    controls.push_back({{"name", r.name},
                        {"case", r.case_name},
                        {"rejected", r.rejected()},
                        {"expected_fault", verify::fault_name(r.expected)},
                        {"fault", verify::fault_name(r.fault)}});
  }
  return {{"backend", outcome.backend},
          {"engine", outcome.engine.empty() ? Json() : Json(outcome.engine)},
          {"engine_note", outcome.engine_note},
          {"passed", outcome.good()},
          {"cases", cases},
          {"negative_controls", controls}};
}

void print_text(const Outcome& outcome) {
  std::size_t failed = 0, accepted = 0;
  double worst = 0.0;
  for (const auto& r : outcome.cases) {
    worst = std::max(worst, r.worst_ratio());
    if (r.passed()) continue;
    ++failed;
    std::printf("FAILED %s: %s: %s\n", r.name.c_str(), verify::fault_name(r.fault),
                r.message.c_str());
  }
  for (const auto& r : outcome.controls) {
    if (r.rejected()) continue;
    ++accepted;
    std::printf("ACCEPTED BY MISTAKE: negative control %s on %s\n", r.name.c_str(),
                r.case_name.c_str());
  }
  std::printf("%zu cases on %s, %zu failed; largest error %.2f of what is allowed\n",
              outcome.cases.size(), outcome.backend.c_str(), failed, worst);
  std::printf("%zu broken implementations, %zu accepted by mistake\n", outcome.controls.size(),
              accepted);
}

}  // namespace

Command add_verify(CLI::App& app) {
  Command command(app, "verify", "Compare every function with the oracle");
  auto o = std::make_shared<Options>();
  o->target.add_to(command);
  command.option("--filter", o->filter,
                 "Run only the cases whose names contain this text (--list prints the names)");
  command.flag("--list", o->list, "Print the names of the cases and exit");
  command.option("--precision", o->precision,
                 "Run only the cases of this precision: tensors or fp8");
  command.flag("--full", o->full, "Also run the long list of cases");
  command.flag("--negative,!--no-negative", o->negative,
               "Also check that broken implementations are rejected (the default)");
  command.flag("--json", o->json, "Print one JSON document to stdout");
  command.run = [o] {
    if (o->list) return print_names(*o);
    const Outcome outcome = run(*o);
    o->json ? print_json(document(outcome)) : print_text(outcome);
    return outcome.good() ? kGood : kCheckFailed;
  };
  return command;
}

}  // namespace sonicmoe::cli
