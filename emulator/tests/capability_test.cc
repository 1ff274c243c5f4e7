// The devices of the capability in SONICMOE_EMULATED_CAPABILITY. cmake/emulator.cmake runs these
// tests once for each of several capabilities.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/configuration.h"
#include "runtime_fixture.h"

namespace sonicmoe::emulator {
namespace {

/// Texts for several targets. `target` stores the target's number.
constexpr char kTexts[] = R"(
.version 9.0
.target sm_80
.visible .entry target(.param .u64 out) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  st.global.u32 [%rd1], 80;
  ret;
}
// sm_80 does not have the instruction behind ret.
.visible .entry too_new() {
  .reg .pred %p<2>;
  .shared .align 8 .b64 barrier;
  ret;
  mbarrier.try_wait.parity.shared.b64 %p1, [barrier], 0;
}
)"
                          "\0"
                          R"(
.version 9.0
.target sm_90
.visible .entry target(.param .u64 out) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  griddepcontrol.wait;
  st.global.u32 [%rd1], 90;
  ret;
}
)"
                          "\0"
                          R"(
.version 9.0
.target sm_120
.visible .entry target(.param .u64 out) {
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  griddepcontrol.wait;
  st.global.u32 [%rd1], 120;
  ret;
}
.visible .entry blackwell() {
  ret;
}
)";

struct Expected {
  int code;  ///< target of the code that the device runs
  int block_shared, multiprocessor_threads;
};
const std::map<int, Expected> kExpected = {
    {80, {80, 166912, 2048}}, {86, {80, 101376, 1536}},  {89, {80, 101376, 1536}},
    {90, {90, 232448, 2048}}, {100, {80, 232448, 2048}}, {120, {120, 101376, 1536}},
};

class Capability : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    emulator_add_ptx(kTexts, kTexts + sizeof kTexts);
    void** const module = __cudaRegisterFatBinary(&functions_);
    for (const char* name : {"target", "too_new", "blackwell"}) {
      __cudaRegisterFunction(module, &functions_[name], nullptr, name, -1, nullptr, nullptr,
                             nullptr, nullptr, nullptr);
    }
    __cudaRegisterFatBinaryEnd(module);
  }
  static const void* function(const char* name) { return &functions_[name]; }
  static int attribute(cudaDeviceAttr which) {
    int value = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&value, which, 0), cudaSuccess);
    return value;
  }
  static cudaError_t launch_with(const cudaLaunchAttribute& attribute, std::uint32_t* out) {
    cudaLaunchAttribute attributes[] = {attribute};
    cudaLaunchConfig_t config{};
    config.gridDim = config.blockDim = 1;
    config.attrs = attributes;
    config.numAttrs = 1;
    void* arguments[] = {&out};
    return cudaLaunchKernelExC(&config, function("target"), arguments);
  }

  const int capability_ = configuration().limits.capability;
  const Expected expected_ = kExpected.at(capability_);

 private:
  inline static std::map<std::string, char> functions_;
};

TEST_F(Capability, DevicesHaveIt) {
  EXPECT_EQ(attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                attribute(cudaDevAttrComputeCapabilityMinor),
            capability_);
  EXPECT_EQ(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), expected_.block_shared);
  EXPECT_EQ(attribute(cudaDevAttrMaxThreadsPerMultiProcessor), expected_.multiprocessor_threads);
  cudaDeviceProp properties{};
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  EXPECT_EQ(properties.major * 10 + properties.minor, capability_);
  EXPECT_EQ(properties.sharedMemPerBlockOptin, static_cast<std::size_t>(expected_.block_shared));
  EXPECT_EQ(properties.clusterLaunch, capability_ >= 90);
}

TEST_F(Capability, ChoosesTheCode) {
  Words words(1);
  std::uint32_t* out = words.data();
  void* arguments[] = {&out};
  ASSERT_EQ(cudaLaunchKernel(function("target"), 1, 1, arguments, 0, nullptr), cudaSuccess);
  EXPECT_EQ(words.get(), Values{static_cast<std::uint32_t>(expected_.code)});
  cudaFuncAttributes attributes{};
  ASSERT_EQ(cudaFuncGetAttributes(&attributes, function("target")), cudaSuccess);
  EXPECT_EQ(attributes.ptxVersion, expected_.code);
  EXPECT_EQ(attributes.binaryVersion / 10, capability_ / 10);
  EXPECT_EQ(cudaLaunchKernel(function("blackwell"), 1, 1, nullptr, 0, nullptr),
            capability_ >= 120 ? cudaSuccess : cudaErrorNoKernelImageForDevice);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  cudaGetLastError();
}

TEST_F(Capability, RefusesAnInstructionThatTheCodesTargetLacks) {
  EXPECT_NE(cudaLaunchKernel(function("too_new"), 1, 1, nullptr, 0, nullptr), cudaSuccess);
  cudaGetLastError();
}

TEST_F(Capability, LimitsSharedMemory) {
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(function("target"), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bytes);
  };
  EXPECT_EQ(allow(expected_.block_shared + 1), cudaErrorInvalidValue);
  EXPECT_EQ(allow(expected_.block_shared), cudaSuccess);
  cudaGetLastError();
}

TEST_F(Capability, ClustersAndDependentLaunchesNeedHopper) {
  Words words(1);
  const cudaError_t expected = capability_ >= 90 ? cudaSuccess : cudaErrorNotSupported;
  cudaLaunchAttribute cluster{}, dependent{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, 1, 1};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  EXPECT_EQ(launch_with(cluster, words.data()), expected);
  // The code of sm_80, which 10.0 runs here, cannot wait for the kernel before.
  const bool can_wait = kExpected.at(capability_).code >= 90;
  if (can_wait || capability_ < 90) EXPECT_EQ(launch_with(dependent, words.data()), expected);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  cudaGetLastError();
}

}  // namespace
}  // namespace sonicmoe::emulator
