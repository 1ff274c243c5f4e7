#include "cuda/layer/engine.h"

#include <cstdlib>

#include "cuda/device/device.h"
#if defined(SONICMOE_WITH_HOPPER)
#include "cuda/hopper/hopper_engine.h"
#endif
#include "cuda/portable/portable_engine.h"

namespace sonicmoe::cuda {

std::span<const Engine* const> engines() {
  static constexpr const Engine* kEngines[] = {
#if defined(SONICMOE_WITH_HOPPER)
      &kHopperEngine,
#endif
      &kPortableEngine,
  };
  return kEngines;
}

const Engine* engine_for(int capability, std::span<const Engine* const> candidates) {
  for (const Engine* engine : candidates) {
    if (engine->service.capabilities.contain(capability)) return engine;
  }
  return nullptr;
}

EngineRequest engine_request(const char* name, std::span<const Engine* const> candidates) {
  EngineRequest request{name == nullptr ? "" : name, "engine"};
  if (const char* variable = std::getenv("SONICMOE_ENGINE"); name == nullptr && variable) {
    request = {variable, "SONICMOE_ENGINE"};
  }
  std::string names;
  for (const Engine* engine : candidates) {
    if (request.name == engine->name) return request;
    names += (names.empty() ? "" : ", ") + std::string(engine->name);
  }
  if (name == nullptr && request.name.empty()) return request;
  throw Error(Status::kInvalidArgument, std::string(request.source) + " is \"" + request.name +
                                            "\" but the engines of this build are: " + names + ".");
}

const Engine& choose_engine(int capability, const EngineRequest& request,
                            std::span<const Engine* const> candidates) {
  std::string serving;
  const Engine* first = nullptr;
  for (const Engine* engine : candidates) {
    if (!engine->service.capabilities.contain(capability)) continue;
    if (request.name == engine->name) return *engine;
    if (first == nullptr) first = engine;
    serving += (serving.empty() ? "" : ", ") + std::string(engine->name);
  }
  if (request.name.empty() && first != nullptr) return *first;
  throw Error(Status::kUnsupported, std::string(request.source) + " is \"" + request.name +
                                        "\" but compute capability " + dotted(capability) +
                                        " is served by: " + serving + ".");
}

std::string served_by(const Engine& engine) {
  const Capabilities& c = engine.service.capabilities;
  return dotted(c.first) + (c.last == c.first ? "" : " to " + dotted(c.last)) + " (" +
         engine.service.devices + ")";
}

std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

const Engine& engine_of(const Exec& exec) {
  return exec.device == nullptr ? *engines().front()
                                : *static_cast<const Device*>(exec.device)->engine;
}

}  // namespace sonicmoe::cuda
