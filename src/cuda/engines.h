// The table of engines, and the device handle with the engine that serves the device.
#pragma once

#include <span>
#include <string>

#include "cuda/device/device.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// Every engine of the build. If several serve a device, the first one is used.
std::span<const Engine* const> engines();

/// The first of `candidates` that serves a compute capability; null if none does.
const Engine* engine_for(int capability, std::span<const Engine* const> candidates = engines());

/// The engine that the caller asks for.
struct EngineRequest {
  std::string name;    ///< empty: the first that serves the device
  const char* source;  ///< where the name comes from, for messages
};

/// The request for `name`; if `name` is null, for the name in the environment variable
/// SONICMOE_ENGINE. Refuses a name that no candidate has.
EngineRequest engine_request(const char* name,
                             std::span<const Engine* const> candidates = engines());

/// The requested engine for a compute capability that at least one candidate serves. Refuses an
/// engine that does not serve this capability.
const Engine& choose_engine(int capability, const EngineRequest& request,
                            std::span<const Engine* const> candidates = engines());

/// The handle for Exec::device. `engine` is the name of an engine; null: the engine named by the
/// environment variable SONICMOE_ENGINE, else the first that serves the GPU. If the engine fails
/// its probe, another one serves the GPU and engine_note() says why. Throws if the named engine, or
/// every engine of the build, does not serve the GPU.
const Device* open_device(int ordinal, const char* engine = nullptr);
void close_device(const Device* device);

/// One sentence: why the engine that was asked for does not serve the device of open_device().
/// Empty if it does.
const char* engine_note(const Device& device);

/// A handle without a GPU, for sizes and plans, with the engine that open_device would choose. Null
/// if the build has no code or no engine for the capability.
const Device* device_model(int capability);

/// The engine of exec's device; the first engine if exec has no device (sizes and plans).
const Engine& engine_of(const Exec& exec);

}  // namespace sonicmoe::cuda
