// The memory and time of a fine-tune by low-rank factors on frozen weights, by arithmetic alone.
// A model, not a measurement. examples/tune/memory.py has the same items for a loaded model.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/machines.h"

namespace sonicmoe {

/// Sizes of a decoder whose layers all have attention (queries, keys, values, output) and experts.
/// Shared experts, dense layers and biases are not counted.
struct ModelShape {
  std::int64_t layers = 0, hidden = 0, vocab = 0;
  std::int64_t queries = 0, keys = 0;  ///< widths: heads times the size of a head
  std::int64_t experts = 0, top_k = 0, width = 0;
  bool tied = false;  ///< whether the head is the embedding
};
struct NamedModel {
  const char* name;
  ModelShape shape;
};
std::span<const NamedModel> named_models();
/// Refuses an unknown name with the list of known ones.
ModelShape model_from_name(const std::string& name);

struct FinetunePlan {
  std::int64_t sequence = 4096, batch = 1, rank = 16;
  std::string weights = "bf16";  ///< format of the experts: bf16, nf4, nf4-nested, mxfp4, fp8
  std::string factors = "fp32";  ///< dtype of factors and gradients: fp32, bf16
  /// adamw: two moments in the factors' dtype; adamw-8bit; adafactor: nearly none
  std::string optimizer = "adamw";
  std::string dense = "bf16";      ///< format of attention's weights: bf16, nf4
  std::int64_t unpack_mib = 0;     ///< most unpacked experts at a time; 0: those of a layer
  std::int64_t logits = 256;       ///< tokens whose logits exist at a time
  bool offload_embedding = false;  ///< the embedding is in the memory of the CPU
  bool checkpointing = true;       ///< layers keep only their inputs

  bool operator==(const FinetunePlan&) const = default;
};

struct FinetuneCost {
  struct Bytes {
    const char* name;
    double bytes;
  };
  struct Part {
    const char* name;
    double seconds;  ///< at the roofline
  };
  std::int64_t trained = 0;  ///< parameters of the factors, on experts and attention
  std::vector<Bytes> memory;
  double peak = 0.0;  ///< the most of `memory` that exists at the same time
  std::vector<Part> step;
  double seconds = 0.0;  ///< their sum

  double peak_in_gib() const { return peak / 1024 / 1024 / 1024; }
};
/// Refuses sizes below 1 or too large, and unknown names.
FinetuneCost finetune_cost(const ModelShape& model, const FinetunePlan& plan,
                           const Machine& machine);

}  // namespace sonicmoe
