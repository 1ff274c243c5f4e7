#include "cuda/layer/engine.h"

#include "cuda/device/device.h"
#if defined(SONICMOE_WITH_HOPPER)
#include "cuda/hopper/hopper_engine.h"
#endif

namespace sonicmoe::cuda {

std::span<const Engine* const> engines() {
  static constexpr const Engine* kEngines[] = {
#if defined(SONICMOE_WITH_HOPPER)
      &kHopperEngine,
#endif
  };
  return kEngines;
}

const Engine* engine_for(int capability, std::span<const Engine* const> candidates) {
  for (const Engine* engine : candidates) {
    if (engine->service.capabilities.contain(capability)) return engine;
  }
  return nullptr;
}

const Engine& engine_of(const Exec& exec) {
  return exec.device == nullptr ? *engines().front()
                                : *static_cast<const Device*>(exec.device)->engine;
}

}  // namespace sonicmoe::cuda
