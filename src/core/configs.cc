#include "core/configs.h"

#include <charconv>

#include "core/check_tensor.h"

namespace sonicmoe {
namespace {

// Entries 1 to 12: the model sizes of the SonicMoE paper (arXiv 2512.14080) at several
// granularities. The others: layers of public models at a training batch, three layers at a smaller
// batch (their names end in -T<tokens>), and a small layer for a laptop.
constexpr NamedConfig kConfigs[] = {
    {"1.4B-n256", {40960, 768, 256, 128, 8}},     {"1.4B-n512", {40960, 768, 512, 64, 4}},
    {"1.4B-n1024", {40960, 768, 1024, 32, 2}},    {"7B-n256", {24576, 1536, 256, 128, 8}},
    {"7B-n512", {24576, 1536, 512, 64, 4}},       {"7B-n1024", {24576, 1536, 1024, 32, 2}},
    {"30B-n256", {32768, 4096, 256, 256, 16}},    {"30B-n512", {32768, 4096, 512, 128, 8}},
    {"30B-n1024", {32768, 4096, 1024, 64, 4}},    {"120B-n512", {32768, 4096, 512, 256, 16}},
    {"120B-n1024", {32768, 4096, 1024, 128, 8}},  {"120B-n2048", {32768, 4096, 2048, 64, 4}},
    {"olmoe", {32768, 2048, 1024, 64, 8}},        {"gpt-oss-20b", {32768, 2880, 2880, 32, 4}},
    {"kimi-linear", {32768, 2304, 1024, 256, 8}}, {"qwen3-next", {32768, 2048, 512, 512, 10}},
    {"qwen3-235b", {32768, 4096, 1536, 128, 8}},  {"dsv3.2", {32768, 7168, 2048, 256, 8}},
    {"7B-T2048", {2048, 1536, 256, 128, 8}},      {"qwen3-235b-T4096", {4096, 4096, 1536, 128, 8}},
    {"olmoe-T64", {64, 2048, 1024, 64, 8}},       {"laptop", {4096, 512, 256, 64, 8}},
};

}  // namespace

std::span<const NamedConfig> named_configs() { return kConfigs; }

LayerShape config_from_name(const std::string& name) {
  std::string known;
  for (const NamedConfig& c : kConfigs) {
    if (name == c.name) return c.shape;
    known += (known.empty() ? "" : ", ") + std::string(c.name);
  }
  checks::refuse("config is \"" + name + "\", must be one of: " + known);
}

LayerShape shape_from_text(const std::string& text) {
  std::int64_t values[5];
  const char* at = text.data();
  const char* const end = at + text.size();
  for (int i = 0; i < 5; ++i) {
    const auto [next, error] = std::from_chars(at, end, values[i]);
    const bool separated = i == 4 ? next == end : next != end && *next == ',';
    if (error != std::errc() || !separated) {
      checks::refuse("shape is \"" + text + "\", must be T,d,n,E,K: five integers and commas");
    }
    at = next + 1;
  }
  return {values[0], values[1], values[2], values[3], values[4]};
}

}  // namespace sonicmoe
