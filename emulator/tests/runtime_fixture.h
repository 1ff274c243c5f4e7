// Kernels of a hand-made module, registered as the stubs of nvcc register theirs.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

extern "C" {
void emulator_add_ptx(const char* begin, const char* end);
void** __cudaRegisterFatBinary(void* wrapper);
void __cudaRegisterFatBinaryEnd(void** module);
void __cudaUnregisterFatBinary(void** module);
void __cudaRegisterFunction(void** module, const char* host, char* device, const char* name,
                            int threads, uint3*, uint3*, dim3*, dim3*, int*);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream);
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* host);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream);
}

namespace sonicmoe::emulator {

// Read when the runtime is first used.
inline const bool kTwoDevices = setenv("SONICMOE_EMULATED_GPUS", "2", 1) == 0;

inline constexpr char kPtx[] = R"(
.version 9.0
.target sm_90a
.address_size 64

.const .align 4 .u32 table[2] = {40, 2};

.visible .entry _Z3addPji(.param .u64 out, .param .u32 value)  // to each thread's element
{
  .reg .b32 %r<6>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [out];
  ld.param.u32 %r1, [value];
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mov.u32 %r4, %tid.x;
  mad.lo.s32 %r2, %r2, %r3, %r4;
  mul.wide.u32 %rd2, %r2, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.u32 %r5, [%rd3];
  add.s32 %r5, %r5, %r1;
  st.global.u32 [%rd3], %r5;
  ret;
}

.visible .entry double_first(.param .u64 out)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  ld.global.u32 %r1, [%rd1];
  add.s32 %r1, %r1, %r1;
  st.global.u32 [%rd1], %r1;
  ret;
}

.visible .entry wait_for_word(.param .u64 word)
{
  .reg .pred %p<2>;
  .reg .b32 %r<2>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [word];
again:
  ld.acquire.sys.global.u32 %r1, [%rd1];
  setp.eq.s32 %p1, %r1, 0;
  @%p1 bra again;
  ret;
}

// Lets the next kernel start, waits for `gate`, then sets `done`. Two CTAs.
.visible .entry early(.param .u64 gate, .param .u64 done)
{
  .reg .pred %p<2>;
  .reg .b32 %r<2>;
  .reg .b64 %rd<3>;
  ld.param.u64 %rd1, [gate];
  ld.param.u64 %rd2, [done];
  griddepcontrol.wait;
  griddepcontrol.launch_dependents;
again:
  ld.acquire.sys.global.u32 %r1, [%rd1];
  setp.eq.s32 %p1, %r1, 0;
  @%p1 bra again;
  mov.u32 %r1, 1;
  st.global.u32 [%rd2], %r1;
  ret;
}

// Opens `gate` of the kernel before it, waits for that kernel, then copies `done` to `seen`.
.visible .entry dependent(.param .u64 gate, .param .u64 done, .param .u64 seen)
{
  .reg .b32 %r<2>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [gate];
  ld.param.u64 %rd2, [done];
  ld.param.u64 %rd3, [seen];
  mov.u32 %r1, 1;
  st.release.sys.global.u32 [%rd1], %r1;
  griddepcontrol.wait;
  ld.global.u32 %r1, [%rd2];
  st.global.u32 [%rd3], %r1;
  ret;
}

.visible .entry mixed(.param .u8 a, .param .u64 b, .param .u16 c, .param .u64 out)
{
  .reg .b16 %rs<2>;
  .reg .b32 %r<2>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [out];
  ld.param.u8 %rs1, [a];
  cvt.u32.u16 %r1, %rs1;
  st.global.u32 [%rd1], %r1;
  ld.param.u64 %rd2, [b];
  st.global.u64 [%rd1+8], %rd2;
  ld.param.u16 %rs1, [c];
  cvt.u32.u16 %r1, %rs1;
  st.global.u32 [%rd1+4], %r1;
  ret;
}

.visible .entry sum_of_table(.param .u64 out)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [out];
  ld.const.u32 %r1, [table];
  ld.const.u32 %r2, [table+4];
  add.s32 %r1, %r1, %r2;
  st.global.u32 [%rd1], %r1;
  ret;
}

.visible .entry ranks(.param .u64 out)
{
  .reg .b32 %r<3>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %ctaid.x;
  griddepcontrol.wait;
  mov.u32 %r2, %cluster_ctarank;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  st.global.u32 [%rd3], %r2;
  ret;
}

.visible .entry limited() .maxntid 64, 1, 1
{
  .shared .align 4 .b8 words[4096];
  .reg .b32 %r<3>;
  mov.u32 %r1, words;
  mov.u32 %r2, %tid.x;
  mad.lo.u32 %r1, %r2, 4, %r1;
  st.shared.u32 [%r1], %r1;
  ret;
}
)";

/// A module in the form in which nvcc embeds it.
class TestModule {
 public:
  TestModule() {
    [[maybe_unused]] static const bool is_added = [] {
      emulator_add_ptx(kPtx, kPtx + sizeof(kPtx));
      return true;
    }();
    handle_ = __cudaRegisterFatBinary(this);
    for (const char* name : {"_Z3addPji", "double_first", "wait_for_word", "mixed", "sum_of_table",
                             "ranks", "limited", "early", "dependent", "missing"}) {
      __cudaRegisterFunction(handle_, function(name), nullptr, name, -1, nullptr, nullptr, nullptr,
                             nullptr, nullptr);
    }
    __cudaRegisterFatBinaryEnd(handle_);
  }
  ~TestModule() { __cudaUnregisterFatBinary(handle_); }

  /// Stands for the address of a host function.
  const char* function(const std::string& name) { return &functions_[name]; }

 private:
  void** handle_ = nullptr;
  std::map<std::string, char> functions_;
};

/// An array of words on the current device.
class Words {
 public:
  explicit Words(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0, bytes()), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
  }
  ~Words() { cudaFree(data_); }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  std::uint32_t* data() const { return data_; }
  std::size_t bytes() const { return count_ * sizeof(std::uint32_t); }
  std::vector<std::uint32_t> get() const {
    std::vector<std::uint32_t> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }
  void set(std::uint32_t value) {
    const std::vector<std::uint32_t> values(count_, value);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess);
  }

 private:
  std::size_t count_;
  std::uint32_t* data_ = nullptr;
};

class RuntimeTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { module_ = new TestModule; }
  static void TearDownTestSuite() {
    delete module_;
    module_ = nullptr;
  }
  void SetUp() override {
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&first_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&second_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(first_), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(second_), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaDeviceReset();  // a fault would make the tests that follow fail as well
  }

  static const void* function(const char* name) { return module_->function(name); }
  static cudaError_t launch(const char* name, dim3 grid, dim3 block, std::vector<void*> arguments,
                            cudaStream_t stream = nullptr) {
    return cudaLaunchKernel(function(name), grid, block, arguments.data(), 0, stream);
  }
  static cudaError_t add(std::uint32_t* out, int value, cudaStream_t stream, unsigned threads = 1) {
    return launch("_Z3addPji", 1, threads, {&out, &value}, stream);
  }
  static cudaError_t double_first(std::uint32_t* out, cudaStream_t stream) {
    return launch("double_first", 1, 1, {&out}, stream);
  }
  static cudaError_t wait_for_word(std::uint32_t* word, cudaStream_t stream) {
    return launch("wait_for_word", 1, 1, {&word}, stream);
  }
  /// With programmatic dependent launch.
  static cudaError_t launch_overlapping(const char* name, unsigned grid,
                                        std::vector<void*> arguments, cudaStream_t stream) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = 1;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelExC(&config, function(name), arguments.data());
  }
  static cudaError_t launch_clusters(unsigned grid, unsigned cluster, std::uint32_t* out) {
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {cluster, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = 1;
    config.attrs = attributes;
    config.numAttrs = 2;
    void* arguments[] = {&out};
    return cudaLaunchKernelExC(&config, function("ranks"), arguments);
  }

  inline static TestModule* module_ = nullptr;
  cudaStream_t first_ = nullptr, second_ = nullptr;
};
using Values = std::vector<std::uint32_t>;

}  // namespace sonicmoe::emulator
