// The stand-in for the CUDA runtime: launches, memory, devices and faults.
#include <filesystem>

#include "runtime_fixture.h"

namespace sonicmoe::emulator {
namespace {

TEST_F(RuntimeTest, RunsKernelsAsTheStubsLaunchThem) {
  Words words(64);
  std::uint32_t* out = words.data();
  int value = 5;
  void* arguments[] = {&out, &value};
  ASSERT_EQ(__cudaPushCallConfiguration(2, 32, 0, nullptr), 0u);
  dim3 grid, block;
  std::size_t shared = 1;
  cudaStream_t stream = first_;
  ASSERT_EQ(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaSuccess);
  EXPECT_EQ(grid.x, 2u);
  EXPECT_EQ(stream, nullptr);
  cudaKernel_t kernel = nullptr;
  ASSERT_EQ(__cudaGetKernel(&kernel, function("_Z3addPji")), cudaSuccess);
  ASSERT_EQ(__cudaLaunchKernel(kernel, grid, block, arguments, shared, stream), cudaSuccess);
  value = 7;  // the launch has a copy
  EXPECT_EQ(words.get(), Values(64, 5));
}

TEST_F(RuntimeTest, CopiesArgumentsOfAnySize) {
  Words words(4);
  std::uint8_t a = 200;
  std::uint64_t b = 0x0102030405060708;
  std::uint16_t c = 60000;
  std::uint32_t* out = words.data();
  ASSERT_EQ(launch("mixed", 1, 1, {&a, &b, &c, &out}), cudaSuccess);
  EXPECT_EQ(words.get(), (Values{200, 60000, 0x05060708, 0x01020304}));
}

TEST_F(RuntimeTest, PlacesVariablesOfTheModule) {
  Words words(1);
  std::uint32_t* out = words.data();
  ASSERT_EQ(launch("sum_of_table", 1, 1, {&out}), cudaSuccess);
  EXPECT_EQ(words.get(), Values{42});
}

TEST_F(RuntimeTest, LaunchesClusters) {
  Words words(6);
  ASSERT_EQ(launch_clusters(6, 2, words.data()), cudaSuccess);
  EXPECT_EQ(words.get(), (Values{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(launch_clusters(6, 4, words.data()), cudaErrorInvalidClusterSize);
  EXPECT_EQ(launch_clusters(32, 16, words.data()), cudaErrorInvalidClusterSize);
}

TEST_F(RuntimeTest, RefusesLaunchesThatCudaRefuses) {
  Words words(1);
  std::uint32_t* out = words.data();
  int value = 1;
  const auto status = [&](dim3 grid, dim3 block, std::size_t shared = 0) {
    void* arguments[] = {&out, &value};
    return cudaLaunchKernel(function("_Z3addPji"), grid, block, arguments, shared, nullptr);
  };
  EXPECT_EQ(status(0, 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(status(1, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(status(1, 1025), cudaErrorInvalidConfiguration);
  EXPECT_EQ(status(1, dim3(64, 32, 1)), cudaErrorInvalidConfiguration);
  EXPECT_EQ(status(dim3(1, 65536, 1), 1), cudaErrorInvalidConfiguration);
  EXPECT_EQ(status(1, 1, 48 * 1024 + 1), cudaErrorInvalidValue);
  EXPECT_EQ(launch("limited", 1, 65, {}), cudaErrorInvalidValue);
  EXPECT_EQ(launch("limited", 1, 64, {}), cudaSuccess);
  EXPECT_EQ(launch("missing", 1, 1, {}), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(cudaLaunchKernel(&value, 1, 1, nullptr, 0, nullptr), cudaErrorInvalidDeviceFunction);
  EXPECT_EQ(words.get(), Values{0});
}

TEST_F(RuntimeTest, AllowsSharedMemoryByFunctionAndDevice) {
  const void* limited = function("limited");
  cudaFuncAttributes attributes{};
  ASSERT_EQ(cudaFuncGetAttributes(&attributes, limited), cudaSuccess);
  EXPECT_EQ(attributes.sharedSizeBytes, 4096u);
  EXPECT_EQ(attributes.maxThreadsPerBlock, 64);
  EXPECT_EQ(attributes.ptxVersion, 90);
  EXPECT_EQ(attributes.maxDynamicSharedSizeBytes, 44 * 1024);
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(limited, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  const auto status = [&](std::size_t shared) {
    return cudaLaunchKernel(limited, 1, 32, nullptr, shared, nullptr);
  };
  constexpr int kMost = 232448 - 4096;
  EXPECT_EQ(allow(kMost + 1), cudaErrorInvalidValue);
  EXPECT_EQ(status(44 * 1024 + 1), cudaErrorInvalidValue);
  EXPECT_EQ(allow(kMost), cudaSuccess);
  EXPECT_EQ(status(kMost), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(status(kMost), cudaErrorInvalidValue);
}

TEST_F(RuntimeTest, CopiesAndFills) {
  Words words(16), copy(16);
  std::vector<std::uint32_t> values(16);
  for (std::uint32_t i = 0; i < 16; ++i) values[i] = i;
  ASSERT_EQ(
      cudaMemcpyAsync(words.data(), values.data(), words.bytes(), cudaMemcpyHostToDevice, first_),
      cudaSuccess);
  values.assign(16, 99);  // was read before the call returned
  ASSERT_EQ(cudaMemcpy2DAsync(copy.data() + 1, 16, words.data() + 2, 16, 8, 3,
                              cudaMemcpyDeviceToDevice, first_),
            cudaSuccess);
  ASSERT_EQ(cudaMemset2DAsync(copy.data(), 16, 0xff, 4, 4, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  const std::uint32_t f = 0xffffffff;
  EXPECT_EQ(copy.get(), (Values{f, 2, 3, 0, f, 6, 7, 0, f, 10, 11, 0, f, 0, 0, 0}));
  EXPECT_EQ(cudaMemcpy2DAsync(copy.data(), 4, words.data(), 16, 8, 2, cudaMemcpyDefault, first_),
            cudaErrorInvalidPitchValue);
}

TEST_F(RuntimeTest, CopiesStayInsideTheirAllocations) {
  Words words(16);
  std::vector<std::uint32_t> host(32);
  EXPECT_EQ(cudaMemcpy(host.data(), words.data(), words.bytes() + 1, cudaMemcpyDeviceToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(words.data() + 1, 0, words.bytes()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(host.data(), 0, 4), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), words.data(), 4, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(words.data() + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(host.data()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(words.data()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST_F(RuntimeTest, KernelsUsePinnedMemory) {
  std::uint32_t *host = nullptr, *device = nullptr;
  ASSERT_EQ(cudaHostAlloc(reinterpret_cast<void**>(&host), 4, cudaHostAllocMapped), cudaSuccess);
  *host = 20;
  ASSERT_EQ(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device), host, 0), cudaSuccess);
  ASSERT_EQ(add(device, 1, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  EXPECT_EQ(*host, 21u);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
}

TEST_F(RuntimeTest, AllocationsAreAlignedAsOnTheDeviceAndNew) {
  std::size_t free = 0, total = 0;
  ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_LE(free, total);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, total + 1), cudaErrorMemoryAllocation);
  ASSERT_EQ(cudaMalloc(&memory, 1), cudaSuccess);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 512, 0u);
  ASSERT_EQ(cudaFree(memory), cudaSuccess);
  void* other = nullptr;
  ASSERT_EQ(cudaMalloc(&other, 1), cudaSuccess);
  EXPECT_NE(memory, other);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(other), cudaSuccess);
}

/// The bytes of a handle as text, for the environment of a process.
std::string text_of(const cudaIpcMemHandle_t& handle) {
  std::string text;
  for (const char byte : handle.reserved) text += static_cast<char>('a' + (byte >> 4 & 15));
  for (const char byte : handle.reserved) text += static_cast<char>('a' + (byte & 15));
  return text;
}

cudaIpcMemHandle_t handle_of(const std::string& text) {
  cudaIpcMemHandle_t handle;
  for (std::size_t i = 0; i < sizeof(handle.reserved); ++i) {
    const int high = text.at(i) - 'a', low = text.at(i + sizeof(handle.reserved)) - 'a';
    handle.reserved[i] = static_cast<char>(high << 4 | low);
  }
  return handle;
}

// Starts this test once more in a process of its own, which adds to the word.
TEST_F(RuntimeTest, SharesMemoryWithAnotherProcess) {
  constexpr const char* kVariable = "SONICMOE_TEST_HANDLE";
  void* address = nullptr;
  if (const char* shared = std::getenv(kVariable); shared != nullptr) {
    ASSERT_EQ(cudaIpcOpenMemHandle(&address, handle_of(shared), cudaIpcMemLazyEnablePeerAccess),
              cudaSuccess);
    ASSERT_EQ(add(static_cast<std::uint32_t*>(address), 2, first_), cudaSuccess);
    return;
  }
  Words word(1);
  word.set(40);
  cudaIpcMemHandle_t handle;
  ASSERT_EQ(cudaIpcGetMemHandle(&handle, word.data()), cudaSuccess);
  EXPECT_NE(cudaIpcOpenMemHandle(&address, handle, 0), cudaSuccess) << "it is this process's own";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = std::string(kVariable) + "=" + text_of(handle) + " '" + program +
                              "' --gtest_filter=RuntimeTest.SharesMemoryWithAnotherProcess";
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(word.get(), Values{42});
}

class RuntimeFaultTest : public RuntimeTest {
 protected:
  /// Expects that the kernel that was launched last has met a fault, and removes it.
  void expect_fault(cudaError_t status, const std::string& text) {
    EXPECT_EQ(cudaStreamSynchronize(first_), status);
    EXPECT_EQ(cudaGetLastError(), status);
    EXPECT_EQ(cudaGetLastError(), status) << "the fault stays";
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 4), status);
    EXPECT_EQ(cudaDeviceReset(), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    const std::string printed = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(printed.find(text), std::string::npos) << printed;
    EXPECT_NE(printed.find("add(unsigned int*, int)"), std::string::npos) << printed;
  }
  static std::uint32_t* words(std::size_t count) {
    std::uint32_t* data = nullptr;
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), 4 * count), cudaSuccess);
    ::testing::internal::CaptureStderr();
    return data;
  }
};

TEST_F(RuntimeFaultTest, WritesBehindAnAllocation) {
  std::uint32_t* data = words(31);
  ASSERT_EQ(add(data, 1, first_, 32), cudaSuccess);
  expect_fault(cudaErrorIllegalAddress, "the last one below has 124 bytes");
}

TEST_F(RuntimeFaultTest, UsesFreedMemory) {
  std::uint32_t* data = words(1);
  ASSERT_EQ(cudaFree(data), cudaSuccess);
  ASSERT_EQ(add(data, 1, first_), cudaSuccess);
  expect_fault(cudaErrorIllegalAddress, "in no live allocation");
}

TEST_F(RuntimeFaultTest, UsesMemoryOfTheHost) {
  words(1);
  std::uint32_t host = 0;
  ASSERT_EQ(add(&host, 1, first_), cudaSuccess);
  expect_fault(cudaErrorIllegalAddress, "in no live allocation");
  EXPECT_EQ(host, 0u);
}

TEST_F(RuntimeFaultTest, WhatFollowsOnTheDeviceIsNotDone) {
  std::uint32_t *data = words(1), *pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(reinterpret_cast<void**>(&pinned), 4), cudaSuccess);
  *pinned = 0;
  ASSERT_EQ(add(data, 1, first_, 2), cudaSuccess);
  ASSERT_EQ(add(pinned, 1, first_), cudaSuccess);
  expect_fault(cudaErrorIllegalAddress, "in no live allocation");
  EXPECT_EQ(*pinned, 0u);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

TEST_F(RuntimeFaultTest, UsesAnotherDeviceWithoutPeerAccess) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  std::uint32_t* data = words(1);
  ASSERT_EQ(cudaMemset(data, 0, 4), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  ASSERT_EQ(add(data, 1, first_), cudaSuccess);
  expect_fault(cudaErrorIllegalAddress, "device 0 has no access");
  ASSERT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaSuccess);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  ASSERT_EQ(add(data, 1, first_), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(first_), cudaSuccess);
  std::uint32_t value = 0;
  ASSERT_EQ(cudaMemcpy(&value, data, 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(value, 1u);
  EXPECT_EQ(cudaFree(data), cudaSuccess);
}

TEST_F(RuntimeTest, DevicesHaveStreamsOfTheirOwn) {
  int count = 0, current = -1;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  ASSERT_EQ(count, 2);
  EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  ASSERT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(current, 1);
  Words words(1);
  EXPECT_EQ(add(words.data(), 1, first_), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(add(words.data(), 1, nullptr), cudaSuccess);
  EXPECT_EQ(words.get(), Values{1});
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, first_), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(event, nullptr), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(first_, event, 0), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(RuntimeTest, DevicesAreOfHopper) {
  cudaDeviceProp properties{};
  ASSERT_EQ(cudaGetDeviceProperties(&properties, 1), cudaSuccess);
  EXPECT_EQ(properties.major * 10 + properties.minor, 90);
  EXPECT_STREQ(properties.name, "emulated");
  int shared = 0, multiprocessors = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
            cudaSuccess);
  ASSERT_EQ(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0),
            cudaSuccess);
  EXPECT_EQ(shared, 232448);
  EXPECT_EQ(multiprocessors, properties.multiProcessorCount);
}

}  // namespace
}  // namespace sonicmoe::emulator
