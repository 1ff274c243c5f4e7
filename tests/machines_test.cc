#include "core/machines.h"

#include <gtest/gtest.h>

#include "sonicmoe/types.h"

namespace sonicmoe {
namespace {

/// Multiprocessors, tensor-core flops a cycle and multiprocessor of dense bf16 with fp32
/// accumulation, and GHz: another way to the data sheet's rate.
struct Chip {
  const char* machine;
  double multiprocessors, flops_a_cycle, ghz;
};
constexpr Chip kChips[] = {
    {"h100", 132, 4096, 1.830},
    {"h200", 132, 4096, 1.830},
    {"a100", 108, 2048, 1.410},
    {"a100-40gb", 108, 2048, 1.410},
    {"a10", 72, 1024, 1.695},
    {"a40", 84, 1024, 1.740},
    {"rtx-a6000", 84, 1024, 1.800},
    {"rtx-3090", 82, 512, 1.695},
    {"l4", 58, 1024, 2.040},
    {"l40s", 142, 1024, 2.490},
    {"rtx-6000-ada", 142, 1024, 2.505},
    {"rtx-4090", 128, 512, 2.520},
    {"rtx-5090", 170, 512, 2.407},
    {"rtx-pro-6000", 188, 1024, 2.617},
};

TEST(Machines, RatesAreThoseOfTheTensorCores) {
  for (const Chip& c : kChips) {
    const double rate = c.multiprocessors * c.flops_a_cycle * c.ghz * 1e9;
    EXPECT_NEAR(machine_from_name(c.machine).flops_per_second / rate, 1.0, 0.02) << c.machine;
  }
}

TEST(Machines, EachIsComplete) {
  std::string names = machine_names() + ", ";
  int count = 0;
  for (std::size_t end; (end = names.find(", ")) != std::string::npos; ++count) {
    const Machine m = machine_from_name(names.substr(0, end));
    EXPECT_GT(m.bytes_per_second, 1e11) << m.name;
    EXPECT_GE(m.memory_bytes, std::int64_t{24} << 30) << m.name;
    EXPECT_GE(m.capability, 80) << m.name;
    EXPECT_FALSE(m.source.empty()) << m.name;
    EXPECT_EQ(engine_rate(m).name, m.capability == 90 ? "hopper" : "portable") << m.name;
    EXPECT_EQ(engine_rate(m).evidence == Evidence::kEstimated, m.name != "h100" && m.name != "h200")
        << m.name;
    names.erase(0, end + 2);
  }
  EXPECT_EQ(count, 17);
}

TEST(Machines, ThePortableEngineHasItsOwnCeilingOnHopper) {
  const Machine h200 = machine_from_name("h200");
  EXPECT_DOUBLE_EQ(engine_rate(h200).flops_per_second, h200.flops_per_second);
  EXPECT_NEAR(engine_rate(h200, "portable").flops_per_second, 632e12, 1.0);
  EXPECT_EQ(engine_rate(h200, "portable").evidence, Evidence::kMeasured);
  EXPECT_EQ(engine_rate(machine_from_name("h100"), "portable").evidence, Evidence::kEstimated);
  EXPECT_FALSE(engine_rate(machine_from_name("b200")).note.empty());
  EXPECT_TRUE(engine_rate(machine_from_name("rtx-5090")).note.empty());
  EXPECT_THROW(engine_rate(machine_from_name("a100"), "hopper"), Error);
}

}  // namespace
}  // namespace sonicmoe
