// Knows every engine, and is above all of them.
#include "cuda/engines.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#if defined(SONICMOE_WITH_BLACKWELL)
#include "cuda/blackwell/blackwell_engine.h"
#endif
#include "cuda/device/architectures.h"
#if defined(SONICMOE_WITH_HOPPER)
#include "cuda/hopper/hopper_engine.h"
#endif
#include "cuda/portable/portable_engine.h"

namespace sonicmoe::cuda {
namespace {

/// The capabilities that the engines of this build serve, as "9.0 (H100, H200)".
std::string served_capabilities() {
  std::string text;
  for (const Engine* engine : engines()) text += (text.empty() ? "" : ", ") + served_by(*engine);
  return text;
}

int attribute(int ordinal, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, ordinal), "reading device attributes");
  return value;
}

/// A device with a GPU, as open_device() makes it.
struct OpenDevice : Device {
  std::string note;  ///< of engine_note()
};

/// Makes `engine` serve the device, or the first other one if `engine` fails its probe there.
void use_engine(const Engine& engine, OpenDevice& device) {
  device.engine = &engine;
  device.engine_state = engine.open(device.ordinal);
  const std::string fault = engine.probe == nullptr ? "" : engine.probe(device, "");
  if (fault.empty()) return;
  std::vector<const Engine*> others(engines().begin(), engines().end());
  std::erase(others, &engine);
  const std::string asked = std::string("the engine ") + engine.name + " does not serve device " +
                            std::to_string(device.ordinal) + ": " + fault;
  const Engine* other = engine_for(device.capability, others);
  if (other == nullptr) throw Error(Status::kUnsupported, asked + ".");
  use_engine(*other, device);
  device.note = asked + ", so the engine " + other->name + " serves it.";
}

}  // namespace

std::span<const Engine* const> engines() {
  static constexpr const Engine* kEngines[] = {
#if defined(SONICMOE_WITH_HOPPER)
      &kHopperEngine,
#endif
      &kPortableEngine,
#if defined(SONICMOE_WITH_BLACKWELL)
      &kBlackwellEngine,  // last: used only if it is named, because no GPU has run it
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
  checks::refuse(std::string(request.source) + " is \"" + request.name +
                 "\", must be one of: " + names);
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
  checks::refuse(Status::kUnsupported, std::string(request.source) + " is \"" + request.name +
                                           "\", must be one of: " + serving +
                                           " for compute capability " + dotted(capability));
}

const Device* open_device(int ordinal, const char* engine) {
  const EngineRequest request = engine_request(engine);
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess) cudaGetLastError();
  if (counted != cudaSuccess && counted != cudaErrorNoDevice) {
    throw Error(Status::kUnsupported,
                std::string("no CUDA device can be used: ") + cudaGetErrorString(counted) + ".");
  }
  if (ordinal < 0 || ordinal >= count) {
    throw Error(Status::kInvalidArgument, "ordinal is " + std::to_string(ordinal) +
                                              " but this machine has " + std::to_string(count) +
                                              " CUDA devices.");
  }
  auto device = std::make_unique<OpenDevice>();
  device->ordinal = ordinal;
  device->capability = attribute(ordinal, cudaDevAttrComputeCapabilityMajor) * 10 +
                       attribute(ordinal, cudaDevAttrComputeCapabilityMinor);
  device->multiprocessors = attribute(ordinal, cudaDevAttrMultiProcessorCount);
  device->block_shared = attribute(ordinal, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (!has_code(device->capability)) {
    throw Error(Status::kUnsupported, "device " + std::to_string(ordinal) +
                                          " has compute capability " + dotted(device->capability) +
                                          " but this build has code for " + code_names() +
                                          " only (SONICMOE_CUDA_ARCHITECTURES).");
  }
  if (engine_for(device->capability) == nullptr) {
    throw Error(Status::kUnsupported, "device " + std::to_string(ordinal) +
                                          " has compute capability " + dotted(device->capability) +
                                          " but the kernels of this build need " +
                                          served_capabilities() + ".");
  }
  use_engine(choose_engine(device->capability, request), *device);
  return device.release();
}

void close_device(const Device* device) { delete static_cast<const OpenDevice*>(device); }

const char* engine_note(const Device& device) {
  return device.ordinal < 0 ? "" : static_cast<const OpenDevice&>(device).note.c_str();
}

const Device* device_model(int capability) {
  static std::mutex mutex;
  static std::map<std::pair<int, const Engine*>, Device> models;
  const EngineRequest request = engine_request(nullptr);
  if (!has_code(capability) || engine_for(capability) == nullptr) return nullptr;
  const Engine& engine = choose_engine(capability, request);
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = models.try_emplace({capability, &engine});
  if (is_new) {  // other threads may already read an existing entry
    entry->second.capability = capability;
    entry->second.engine = &engine;
  }
  return &entry->second;
}

const Engine& engine_of(const Exec& exec) {
  return exec.device == nullptr ? *engines().front()
                                : *static_cast<const Device*>(exec.device)->engine;
}

}  // namespace sonicmoe::cuda
