// sonicmoe plan --ranks: the cost of expert parallelism over several GPUs.
#pragma once

#include <cstdint>
#include <string>

#include "command.h"
#include "core/plan_ranks.h"

namespace sonicmoe::cli {

/// --ranks and the options that need it.
struct RanksOptions {
  std::string ranks;  ///< "2" or "2,4,8"; empty: one GPU is planned
  std::string transport;
  double link_gbytes = 0.0, network_gbits = 0.0, tflops = 0.0;  ///< 0: not given
  double imbalance = 1.0, arena = 1.3, hidden = 0.0;
  std::int64_t ranks_per_node = 8, layers = 1;

  void add_to(Command& command);
  bool asked() const { return !ranks.empty(); }
  /// Refuses the options of this group that were given without --ranks.
  void refuse_alone() const;
};

/// The layer and machine of the plan; the problem has the tokens of one rank.
struct RanksSubject {
  LayerShape shape;
  Problem problem;
  Machine machine;  ///< its rate is the peak of the engine's instructions
  EngineRate engine;
  LayerOptions layer;
};
ExitCode print_rank_plans(const RanksOptions& options, const RanksSubject& subject, bool json);

}  // namespace sonicmoe::cli
