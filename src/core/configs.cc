#include "core/configs.h"

#include <charconv>

#include "core/check_tensor.h"

namespace sonicmoe {
namespace {

constexpr NamedConfig kConfigs[] = {
#include "core/named_shapes.inc"
};

/// The T of "olmoe-T64" and the length of "olmoe"; T is 0 if the name does not end in -T<tokens>.
struct Tokens {
  std::size_t name_length;
  std::int64_t count;
};
Tokens tokens_of(const std::string& name) {
  const std::size_t at = name.rfind("-T");
  if (at == std::string::npos) return {name.size(), 0};
  std::int64_t count = 0;
  const char* const end = name.data() + name.size();
  const auto [next, error] = std::from_chars(name.data() + at + 2, end, count);
  return error == std::errc() && next == end && count > 0 ? Tokens{at, count}
                                                          : Tokens{name.size(), 0};
}

}  // namespace

std::span<const NamedConfig> named_configs() { return kConfigs; }

LayerShape config_from_name(const std::string& name) {
  const Tokens tokens = tokens_of(name);
  const std::string layer = name.substr(0, tokens.name_length);
  std::string known;
  for (const NamedConfig& c : kConfigs) {
    if (name == c.name) return c.shape;
    if (tokens.count != 0 && layer == c.name) {
      LayerShape shape = c.shape;
      shape.tokens = tokens.count;
      return shape;
    }
    known += (known.empty() ? "" : ", ") + std::string(c.name);
  }
  checks::refuse("config is \"" + name + "\", must be one of: " + known +
                 "; -T<tokens> may follow");
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
