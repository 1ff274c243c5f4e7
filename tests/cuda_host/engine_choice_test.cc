// Which engine computes on a device: the first engine that serves it, or the requested engine.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/device/architectures.h"
#include "cuda/engines.h"
#include "sonicmoe/c_api.h"
#include "stand_in.h"

namespace sonicmoe {
namespace {

using cuda::choose_engine;
using cuda::Engine;
using cuda::engine_request;
using testing::stand_in_engine;

/// An engine for a range of capabilities.
Engine engine_named(const char* name, int first, int last) {
  Engine engine = stand_in_engine();
  engine.name = name;
  engine.service.capabilities = {first, last};
  return engine;
}

const Engine kNarrow = engine_named("narrow", 90, 90);
const Engine kWide = engine_named("wide", 80, 120);
const std::vector<const Engine*> kBoth = {&kNarrow, &kWide};

template <class Call>
std::string refusal(Call&& call, Status status) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), status);
    return e.what();
  }
  return "accepted";
}

/// SONICMOE_ENGINE until the end of a scope.
class Environment {
 public:
  explicit Environment(const char* value) {
    if (const char* old = std::getenv(kName)) old_ = old;
    value == nullptr ? unsetenv(kName) : setenv(kName, value, 1);
  }
  ~Environment() { old_.empty() ? unsetenv(kName) : setenv(kName, old_.c_str(), 1); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static constexpr const char* kName = "SONICMOE_ENGINE";
  std::string old_;
};

TEST(EngineChoice, TheFirstThatServesTheDeviceIsTheDefault) {
  const Environment none(nullptr);
  EXPECT_EQ(cuda::engine_for(90, kBoth), &kNarrow);
  EXPECT_EQ(cuda::engine_for(80, kBoth), &kWide);
  EXPECT_EQ(cuda::engine_for(75, kBoth), nullptr);
  EXPECT_EQ(&choose_engine(90, engine_request(nullptr, kBoth), kBoth), &kNarrow);
  EXPECT_EQ(&choose_engine(120, engine_request(nullptr, kBoth), kBoth), &kWide);
}

TEST(EngineChoice, TheOptionComesBeforeTheEnvironment) {
  const Environment wide("wide");
  EXPECT_EQ(&choose_engine(90, engine_request(nullptr, kBoth), kBoth), &kWide);
  EXPECT_EQ(&choose_engine(90, engine_request("narrow", kBoth), kBoth), &kNarrow);
  const Environment empty("");
  EXPECT_EQ(&choose_engine(90, engine_request(nullptr, kBoth), kBoth), &kNarrow);
}

TEST(EngineChoice, AnUnknownNameIsRefusedByTheNamesThatExist) {
  const Environment abacus("abacus");
  EXPECT_EQ(refusal([] { engine_request(nullptr, kBoth); }, Status::kInvalidArgument),
            "SONICMOE_ENGINE is \"abacus\", must be one of: narrow, wide");
  EXPECT_EQ(refusal([] { engine_request("", kBoth); }, Status::kInvalidArgument),
            "engine is \"\", must be one of: narrow, wide");
}

TEST(EngineChoice, OneThatDoesNotServeTheDeviceIsRefusedByThoseThatDo) {
  const auto choose = [] { choose_engine(86, engine_request("narrow", kBoth), kBoth); };
  EXPECT_EQ(refusal(choose, Status::kUnsupported),
            "engine is \"narrow\", must be one of: wide for compute capability 8.6");
}

// An unknown name is refused before the device is opened, so this test needs no GPU.
TEST(EngineChoice, OpeningADeviceRefusesAnUnknownEngine) {
  const std::string first = cuda::engines().front()->name;
  const std::string sentence =
      refusal([] { cuda::open_device(0, "abacus"); }, Status::kInvalidArgument);
  EXPECT_NE(sentence.find("\"abacus\""), std::string::npos) << sentence;
  EXPECT_NE(sentence.find(first), std::string::npos) << sentence;
}

TEST(EngineChoice, TheCInterfaceNamesTheEngines) {
  const auto engines = cuda::engines();
  for (std::size_t i = 0; i < engines.size(); ++i) {
    EXPECT_STREQ(smoe_engine_name(static_cast<std::int32_t>(i)), engines[i]->name);
  }
  EXPECT_EQ(smoe_engine_name(static_cast<std::int32_t>(engines.size())), nullptr);
}

TEST(EngineChoice, ModelsOfDevicesHaveThemToo) {
  for (const Engine* engine : cuda::engines()) {
    const Environment name(engine->name);
    const int capability = engine->service.capabilities.first;
    if (!cuda::has_code(capability)) continue;
    const cuda::Device* model = cuda::device_model(capability);
    ASSERT_NE(model, nullptr) << engine->name;
    EXPECT_EQ(model->engine, engine);
    EXPECT_EQ(model, cuda::device_model(capability)) << "one model of each kind";
  }
  EXPECT_EQ(cuda::device_model(12), nullptr);
}

TEST(EngineChoice, AModelIsRefusedByName) {
  const int capability = cuda::engines().front()->service.capabilities.first;
  const Exec exec{.backend = Backend::kCuda, .device = cuda::device_model(capability)};
  const std::string sentence = refusal([&] { cuda::device_of(exec); }, Status::kInvalidArgument);
  EXPECT_NE(sentence.find("a model of compute capability " + cuda::dotted(capability)),
            std::string::npos)
      << sentence;
}

}  // namespace
}  // namespace sonicmoe
