#include "plan_finetune.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "core/check_tensor.h"
#include "target.h"

namespace sonicmoe::cli {
namespace {

// CUDA's context and gaps between tensors, which torch's peak does not count.
constexpr double kBesideTensors = 0.8e9;

/// The first of `keys` that is a positive integer in `config`.
std::int64_t number(const Json& config, std::initializer_list<const char*> keys,
                    const std::string& file) {
  for (const char* key : keys) {
    const auto found = config.find(key);
    if (found != config.end() && found->is_number_integer() && found->get<std::int64_t>() > 0) {
      return found->get<std::int64_t>();
    }
  }
  checks::refuse("model is " + file + ", which has no positive integer " + *keys.begin());
}

ModelShape model_from_file(const std::string& file) {
  std::ifstream in(file);
  Json config = Json::parse(in, nullptr, false);
  if (!config.is_object()) checks::refuse("model is " + file + ", must be a JSON file with sizes");
  if (const auto text = config.find("text_config"); text != config.end() && text->is_object()) {
    config = Json(*text);
  }
  const auto get = [&](std::initializer_list<const char*> keys) {
    return number(config, keys, file);
  };
  ModelShape m;
  m.layers = get({"num_hidden_layers"});
  m.hidden = get({"hidden_size"});
  m.vocab = get({"vocab_size"});
  m.experts = get({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"});
  m.top_k = get({"num_experts_per_tok"});
  m.width = get({"moe_intermediate_size", "intermediate_size"});
  const std::int64_t heads = get({"num_attention_heads"});
  const std::int64_t keys =
      config.contains("num_key_value_heads") ? get({"num_key_value_heads"}) : heads;
  const std::int64_t head =
      config.contains("head_dim") ? get({"head_dim"}) : std::max<std::int64_t>(1, m.hidden / heads);
  for (const std::int64_t value : {heads, keys, head})
    checks::below_2_31("a number of heads", value);
  m.queries = heads * head;
  m.keys = keys * head;
  m.tied = config.value("tie_word_embeddings", false);
  return m;
}

ModelShape resolve(const std::string& model) {
  return model.ends_with(".json") ? model_from_file(model) : model_from_name(model);
}

struct Planned {
  ModelShape model;
  Machine machine;
  EngineRate engine;
  FinetuneCost cost;

  double expected_seconds() const { return cost.seconds / engine.share.mean; }
  bool fits() const {
    return cost.peak + kBesideTensors <= static_cast<double>(machine.memory_bytes);
  }
};

/// Seconds of whole steps over expected_seconds(): two models, sequences of 4096 tokens, one H200
/// (benchmarks/results/h200/finetune.json). What runs between the layers' kernels is not modelled.
constexpr double kLeastMeasured = 1.9, kMostMeasured = 2.9;

Json document(const FinetuneOptions& o, const Planned& p) {
  const double tokens = static_cast<double>(o.plan.sequence) * static_cast<double>(o.plan.batch);
  Json memory, step;
  for (const auto& [name, bytes] : p.cost.memory) memory[name] = bytes;
  for (const auto& [name, seconds] : p.cost.step) step[name] = seconds * 1e3;
  memory["peak"] = p.cost.peak;
  return {{"model", o.model},
          {"sequence", o.plan.sequence},
          {"batch", o.plan.batch},
          {"rank", o.plan.rank},
          {"weights", o.plan.weights},
          {"factors", o.plan.factors},
          {"optimizer", o.plan.optimizer},
          {"dense", o.plan.dense},
          {"unpack_mib", o.plan.unpack_mib},
          {"logits", o.plan.logits},
          {"offload_embedding", o.plan.offload_embedding},
          {"checkpointing", o.plan.checkpointing},
          {"trained_parameters", p.cost.trained},
          {"memory_bytes", memory},
          {"device", p.machine.name},
          {"device_memory_bytes", p.machine.memory_bytes},
          {"fits", p.fits()},
          {"step_roofline_ms", step},
          {"step_ms", p.expected_seconds() * 1e3},
          {"step_measured_over_model", {kLeastMeasured, kMostMeasured}},
          {"tokens_per_s", tokens / p.expected_seconds()}};
}

void print_text(const FinetuneOptions& o, const Planned& p) {
  const auto integer = [](std::int64_t v) { return static_cast<long long>(v); };
  std::printf("%s: factors of rank %lld on experts and attention, %.0f million parameters\n",
              o.model.c_str(), integer(o.plan.rank), static_cast<double>(p.cost.trained) / 1e6);
  std::printf("%lld x %lld tokens, experts in %s, factors in %s, %s, %s\n", integer(o.plan.batch),
              integer(o.plan.sequence), o.plan.weights.c_str(), o.plan.factors.c_str(),
              o.plan.optimizer.c_str(),
              o.plan.checkpointing ? "layers keep their inputs" : "layers keep all they need");
  std::printf("a model, not a measurement\n\n");
  for (const auto& [name, bytes] : p.cost.memory) {
    std::printf("  %-24s %12s\n", name, bytes_text(bytes).c_str());
  }
  std::printf("  %-24s %12s  of tensors at the same time\n", "peak",
              bytes_text(p.cost.peak).c_str());
  std::printf("\n%s has %s: it %s (with %s for CUDA and gaps)\n\n", p.machine.name.c_str(),
              bytes_text(static_cast<double>(p.machine.memory_bytes)).c_str(),
              p.fits() ? "fits" : "does not fit", bytes_text(kBesideTensors).c_str());
  for (const auto& [name, seconds] : p.cost.step) {
    std::printf("  %-24s %9.1f ms at the roofline\n", name, seconds * 1e3);
  }
  const double seconds = p.expected_seconds();
  std::printf("  %-24s %9.1f ms at %.2f of it, as the layer reaches on an H200: %.0f tokens/s\n",
              "step, at least", seconds * 1e3, p.engine.share.mean,
              static_cast<double>(o.plan.sequence) * static_cast<double>(o.plan.batch) / seconds);
  std::printf("  Whole models took %.1f to %.1f times as long on an H200 (docs/finetune.md).\n",
              kLeastMeasured, kMostMeasured);
}

}  // namespace

void FinetuneOptions::add_to(Command& command) {
  command.option("--finetune", model,
                 "Plan a fine-tune by low-rank factors instead: a model's name (an unknown one "
                 "lists all) or its config.json");
  command.option("--sequence", plan.sequence, "With --finetune: tokens of a sequence");
  command.option("--batch", plan.batch, "With --finetune: sequences of a micro-batch");
  command.option("--rank", plan.rank, "With --finetune: rank of the factors");
  command.option("--weights", plan.weights,
                 "With --finetune: experts in bf16, nf4, nf4-nested, mxfp4 or fp8");
  command.option("--factors", plan.factors, "With --finetune: factors in fp32 or bf16");
  command.option("--optimizer", plan.optimizer, "With --finetune: adamw, adamw-8bit or adafactor");
  command.option("--dense", plan.dense, "With --finetune: attention in bf16 or nf4");
  command.option("--unpack-mib", plan.unpack_mib,
                 "With --finetune: most experts unpacked at a time; 0: those of a layer");
  command.option("--logits", plan.logits, "With --finetune: tokens whose logits exist at a time");
  command.flag("--offload-embedding", plan.offload_embedding,
               "With --finetune: the embedding is in the memory of the CPU");
  command.flag("--checkpointing,!--no-checkpointing", plan.checkpointing,
               "With --finetune: layers keep only their inputs for backward");
}

ExitCode print_finetune(const FinetuneOptions& o, const std::string& device,
                        const std::string& engine, bool json) {
  Planned p;
  p.model = resolve(o.model);
  const std::string here = device.empty() ? machine_here() : device;
  p.machine = machine_from_name(here.empty() ? "h200" : here);
  p.engine = engine_rate(p.machine, engine);
  p.machine.flops_per_second = p.engine.flops_per_second;
  p.cost = finetune_cost(p.model, o.plan, p.machine);
  json ? print_json(document(o, p)) : print_text(o, p);
  return kGood;
}

}  // namespace sonicmoe::cli
