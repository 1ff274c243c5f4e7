// sonicmoe plan --finetune: memory and time of a fine-tune before a card is rented.
#pragma once

#include "command.h"
#include "core/finetune.h"

namespace sonicmoe::cli {

struct FinetuneOptions {
  std::string model;  ///< a name, or a file config.json of transformers; empty: not asked for
  FinetunePlan plan;

  void add_to(Command& command);
};

/// Prints the plan on a GPU of machine_from_name(); empty: this machine's, else an H200.
ExitCode print_finetune(const FinetuneOptions& options, const std::string& device,
                        const std::string& engine, bool json);

}  // namespace sonicmoe::cli
