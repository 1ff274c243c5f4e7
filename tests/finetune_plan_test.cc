#include <gtest/gtest.h>

#include <map>
#include <string>

#include "core/finetune.h"
#include "core/plan.h"

namespace sonicmoe {
namespace {

// 2 layers, d 8, vocabulary 100, widths of queries 8 and keys 4, 4 experts, 2 a token, n 16.
constexpr ModelShape kModel{2, 8, 100, 8, 4, 4, 2, 16};
const FinetunePlan kPlan{.sequence = 16, .batch = 2, .rank = 2, .weights = "nf4"};  // T 32, C 64
const Machine kMachine{"one", 1e12, 1e12, 90, 0, 0.0, ""};

template <class Rows>
std::map<std::string, double> by_name(const Rows& rows) {
  std::map<std::string, double> found;
  for (const auto& [name, value] : rows) found[name] = value;
  return found;
}

TEST(FinetunePlan, MemoryIsWhatAHandComputes) {
  const FinetuneCost cost = finetune_cost(kModel, kPlan, kMachine);
  EXPECT_EQ(cost.trained, 2 * 2 * (4 * (2 * 8 + 3 * 16) + 4 * 8 + 2 * 8 + 2 * 4));  // 1248
  const std::map<std::string, double> want = {
      {"experts", 3072 * 0.5625},
      {"other weights", 2 * (384 + 2 * 100 * 8 + 64)},  // attention, embedding and head, router
      {"factors", 1248 * 4},
      {"gradients", 1248 * 4},
      {"optimizer", 1248 * 8},
      {"kept of layers", 2 * 32 * 8 * 2},
      {"one layer in backward", 64 * (5 * 16 + 8) * 2 + 32 * (20 * 8 + 14 * 8 + 10 * 4)},
      {"logits", 32 * 100 * 12},
      {"unpacked weights", 4 * 3 * 16 * 8 * 2}};
  EXPECT_EQ(by_name(cost.memory), want);
  // Gradients are more than what layers keep, and logits more than a layer.
  EXPECT_EQ(cost.peak, 1728 + 4096 + 4992 + 9984 + 3072 + 4992 + 38400);
}

TEST(FinetunePlan, OptionsChangeTheirItems) {
  FinetunePlan plan = kPlan;
  plan.weights = "bf16", plan.factors = "bf16", plan.optimizer = "adamw-8bit";
  plan.checkpointing = false;
  ModelShape tied = kModel;
  tied.tied = true;
  std::map<std::string, double> memory = by_name(finetune_cost(tied, plan, kMachine).memory);
  EXPECT_EQ(memory["experts"], 3072 * 2);
  EXPECT_EQ(memory["unpacked weights"], 0);
  EXPECT_EQ(memory["other weights"], 2 * (384 + 100 * 8 + 64));
  EXPECT_EQ(memory["factors"], 1248 * 2);
  EXPECT_EQ(memory["optimizer"], 1248 * 2);
  EXPECT_EQ(memory["kept of layers"], 1 * (32 * 8 * 2 + 9984 + 64 * 2 * 16 * 2));
  const std::map<std::string, double> bytes = {{"nf4-nested", 3072 * (0.5 + (1 + 4.0 / 256) / 64)},
                                               {"mxfp4", 1632},
                                               {"fp8", 3072 * (1 + 4.0 / 16384)}};
  for (const auto& [format, want] : bytes) {
    plan.weights = format;
    EXPECT_DOUBLE_EQ(by_name(finetune_cost(kModel, plan, kMachine).memory)["experts"], want);
  }
}

TEST(FinetunePlan, LessMemoryOfOtherWeightsOfUnpackedOnesAndOfLogits) {
  FinetunePlan plan = kPlan;
  plan.optimizer = "adafactor", plan.dense = "nf4", plan.logits = 8;
  plan.offload_embedding = true;
  std::map<std::string, double> memory = by_name(finetune_cost(kModel, plan, kMachine).memory);
  EXPECT_EQ(memory["optimizer"], 0);
  EXPECT_EQ(memory["other weights"], 384 * 0.5625 + (100 * 8 + 2 * 4 * 8) * 2);
  EXPECT_EQ(memory["logits"], 8 * 100 * 12);
  // A layer of 4 experts of 3 * 1024 * 1024 elements, in MiB: 24; w_up of an expert: 4.
  const ModelShape large{2, 1024, 100, 8, 4, 4, 2, 1024};
  const std::pair<std::int64_t, double> limits[] = {{0, 24}, {3, 4}, {10, 10}, {30, 24}};
  for (const auto& [limit, mib] : limits) {
    plan.unpack_mib = limit;
    const FinetuneCost cost = finetune_cost(large, plan, kMachine);
    EXPECT_EQ(by_name(cost.memory)["unpacked weights"], mib * 1048576);
    const double times = mib < 24 ? 3 : 2;  // forward, recomputation and backward
    EXPECT_NEAR(by_name(cost.step)["unpacking"] * 1e12, times * 2 * 4 * 3 * 1048576 * (0.5625 + 2),
                1.0);
  }
}

TEST(FinetunePlan, TimesAreWhatAHandComputes) {
  const FinetuneCost cost = finetune_cost(kModel, kPlan, kMachine);
  std::map<std::string, double> step = by_name(cost.step);
  for (auto& [name, seconds] : step) seconds *= 1e12;
  const auto near = [&](const char* name, double want) {
    EXPECT_NEAR(step[name], want, 1e-6 * want) << name;
  };
  near("attention", 2 * (2 * 32 * 192 * 3 + 2 * 32 * 16 * 8 * 4.5));
  near("norms", 2 * 9984 * 3);
  near("head and loss", 2 * 32 * 8 * 100 * 3);
  near("optimizer", 1248 * (3 * 4 + 4 * 4));
  near("unpacking", 2 * 3072 * (0.5625 + 2));
  const double forward = 2 * 64 * 64 * (2 * 16 + 8) + 2 * 64 * (8 + 16);
  const double backward = 2 * 64 * 64 * (16 + 8) + 2 * 64 * (3 * 8 + 6 * 16);
  near("factors", 2 * (2 * forward + backward));
  double experts = 0;
  for (const KernelCost& k :
       kernel_costs(problem_of({32, 8, 16, 4, 2}, DType::kBF16, {}), kMachine)) {
    const std::string name = k.name;
    if (name != "dW1" && name != "dW2") experts += k.seconds * 1e12 * (k.backward ? 1 : 2);
  }
  near("experts", 2 * experts);
  double sum = 0;
  for (const auto& [name, seconds] : step) sum += seconds;
  EXPECT_NEAR(cost.seconds * 1e12, sum, 1e-6 * sum);
}

TEST(FinetunePlan, HugeSizesAreRefusedOrReal) {
  FinetunePlan plan = kPlan;
  plan.sequence = plan.batch = INT32_MAX;
  EXPECT_THROW(finetune_cost(kModel, plan, kMachine), Error);
  ModelShape model = kModel;
  model.experts = std::int64_t{1} << 31;
  EXPECT_THROW(finetune_cost(model, kPlan, kMachine), Error);
  model = kModel;
  model.layers = 0;
  EXPECT_THROW(finetune_cost(model, kPlan, kMachine), Error);
}

}  // namespace
}  // namespace sonicmoe
