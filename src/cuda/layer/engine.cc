#include "cuda/layer/engine.h"

#include "cuda/device/device.h"

namespace sonicmoe::cuda {

std::string served_by(const Engine& engine) {
  const Capabilities& c = engine.service.capabilities;
  return dotted(c.first) + (c.last == c.first ? "" : " to " + dotted(c.last)) + " (" +
         engine.service.devices + ")";
}

}  // namespace sonicmoe::cuda
