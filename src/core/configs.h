// Layer shapes of published models and of the method's paper, by name, for the command and the
// benchmarks.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace sonicmoe {

struct LayerShape {
  std::int64_t tokens = 0, hidden = 0, width = 0, experts = 0, top_k = 0;
};

struct NamedConfig {
  const char* name;
  LayerShape shape;
};

std::span<const NamedConfig> named_configs();
/// The layer of a name, with T tokens if -T<tokens> follows it ("olmoe-T64"). Refuses an unknown
/// name with the list of known ones.
LayerShape config_from_name(const std::string& name);
/// "24576,1536,256,128,8", the order T,d,n,E,K; refuses anything else.
LayerShape shape_from_text(const std::string& text);

}  // namespace sonicmoe
