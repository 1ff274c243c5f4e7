// Tensor memory: allocation, loads, stores and fences of tcgen05, by PTX ISA 9.7.16.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernel_fixture.h"
#include "matrix_fixture.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kThreads = 256;
constexpr Target kTarget{100, false, true};

/// 256 threads. %r1: thread; %r2: warp; %p1: warp 0; %p2: thread 0; %p3: warps 0 to 3; %r4: where
/// the address of the allocation goes; %r5: an mbarrier; %rd1: a word of global memory for each
/// thread.
std::string kernel(const std::string& body) {
  return R"(.visible .entry test(.param .u64 out) {
.reg .pred %p<10>;
.reg .b32 %r<160>;
.reg .b64 %rd<10>;
.shared .align 8 .b64 barrier;
.shared .align 4 .b32 place;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 5;
setp.eq.u32 %p1, %r2, 0;
setp.eq.u32 %p2, %r1, 0;
setp.lt.u32 %p3, %r1, 128;
mov.u32 %r4, place;
mov.u32 %r5, barrier;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd1, %rd1, %rd2;
)" + body +
         "ret;\n}\n";
}

const std::string kAlloc = R"(
@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], 128;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
)";
/// %r6: the address of the warp's lanes in the allocation.
const std::string kAddress = R"(
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.u32 %r3, [%r4];
and.b32 %r6, %r2, 3;
shl.b32 %r6, %r6, 21;
add.s32 %r6, %r6, %r3;
)";
const std::string kBefore = "tcgen05.fence::before_thread_sync;\n";
const std::string kAfter = "tcgen05.fence::after_thread_sync;\n";
const std::string kBarrier = "bar.sync 0;\n";
const std::string kDealloc = "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 128;\n";
const std::string kFree = kBefore + kBarrier + kDealloc;
const std::string kStore = "@%p3 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1};\n";
const std::string kStored = "@%p3 tcgen05.wait::st.sync.aligned;\n";
/// By warps 4 to 7, which have the same lanes.
const std::string kLoad = "@!%p3 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6];\n";
const std::string kLoaded = "@!%p3 tcgen05.wait::ld.sync.aligned;\n";
const std::string kOut = "@!%p3 st.global.u32 [%rd1], %r10;\n";

std::vector<std::uint32_t> run(const std::string& body, std::uint64_t seed = 1) {
  Arrays memory;
  auto* out = memory.add(std::vector<std::uint32_t>(kThreads));
  run_kernel(kernel(body), {.block = {kThreads, 1, 1}, .target = kTarget}, memory, {word_of(out)},
             seed);
  return {out, out + kThreads};
}

constexpr std::uint64_t kSeeds = 4;

void expect_fault(const std::string& body, const char* sentence) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    try {
      run(body, seed);
      ADD_FAILURE() << "no fault: " << sentence;
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(sentence), std::string::npos) << fault.what();
    }
  }
}

TEST(TensorMemory, OtherWarpsLoadWhatWasStored) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const auto out = run(kAlloc + kAddress + kStore + kStored + kBefore + kBarrier + kAfter +
                             kLoad + kLoaded + kOut + kFree,
                         seed);
    for (std::uint32_t t = 0; t < 128; ++t) EXPECT_EQ(out[128 + t], t);
  }
}

TEST(TensorMemory, EveryWidth) {
  for (int columns = 1; columns <= 128; columns *= 2) {
    std::string body = kAlloc + kAddress;
    std::string sum;
    for (int c = 0; c < columns; ++c) {
      const std::string r = "%r" + std::to_string(20 + c);
      body += "mad.lo.u32 " + r + ", %r1, 1000, " + std::to_string(c) + ";\n";
      sum += "mad.lo.u32 %r11, %r11, 3, " + r + ";\n";
    }
    const std::string list = registers("%r", 20, columns);
    const std::string form = ".sync.aligned.32x32b.x" + std::to_string(columns) + ".b32 ";
    body += "@%p3 tcgen05.st" + form + "[%r6], " + list + ";\n" + kStored + "@%p3 tcgen05.ld" +
            form + list + ", [%r6];\n@%p3 tcgen05.wait::ld.sync.aligned;\nmov.u32 %r11, 0;\n" +
            sum + "@%p3 st.global.u32 [%rd1], %r11;\n" + kFree;
    const auto out = run(body);
    for (std::uint32_t t = 0; t < 128; ++t) {
      std::uint32_t expected = 0;
      for (int c = 0; c < columns; ++c)
        expected = expected * 3 + 1000 * t + static_cast<unsigned>(c);
      EXPECT_EQ(out[t], expected) << columns;
    }
  }
}

TEST(TensorMemory, EachWaitAndFenceIsNeeded) {
  const std::string load = kLoad + kLoaded + kOut + kFree;
  const std::string stored = kAlloc + kAddress + kStore + kStored + kBefore;
  expect_fault(kAlloc + kAddress + kStore + kBefore + kBarrier + kAfter + load, "tcgen05.wait::st");
  const char* const race = "has not waited for the";
  expect_fault(kAlloc + kAddress + kStore + kStored + kBarrier + kAfter + load, race);
  expect_fault(stored + kBarrier + load, race);
  expect_fault(stored + kBarrier + kAfter + kLoad + kOut + kFree, "tcgen05.wait::ld");
  // Without the barrier, a warp of the second half may come first.
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_THROW(run(stored + kAfter + load, seed), Fault);
  }
  expect_fault(
      kAlloc + kAddress + kStore + "@%p3 tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r6];\n",
      race);
  // A store over what another warp may still load.
  expect_fault(stored + kBarrier + kAfter + kLoad + kStore, race);
  expect_fault(stored + kBarrier + kAfter + kLoad + kLoaded + kBarrier + kAfter + kStore, race);
}

TEST(TensorMemory, Allocations) {
  const std::string all = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r4], ";
  const std::string give_up = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n";
  expect_fault(kAlloc + kAddress + "@%p1 " + all + "32;\n", "follows tcgen05.relinquish");
  expect_fault(kAlloc + kAddress, "has not freed its tensor memory");
  expect_fault("@%p1 " + all + "128;\n" + kAddress + kFree, "without tcgen05.relinquish");
  for (const char* columns : {"16;\n", "96;\n", "1024;\n"}) {
    expect_fault("@%p1 " + all + columns, "powers of two from 32 to 512");
  }
  expect_fault("@%p2 " + all + "32;\n", "a part of its warp");
  expect_fault("@%p1 " + all + "256;\n@%p1 " + all + "512;\n", "deadlock");
  expect_fault(kAlloc + kAddress + kBarrier +
                   "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 64;\n",
               "which are no allocation");
  expect_fault(kAlloc + kAddress + kFree + kBarrier + kDealloc, "which are no allocation");
  expect_fault(kAlloc + kAddress + kStore + kStored + kBarrier + kDealloc, "has not waited for");
  expect_fault(kAlloc + kAddress + kFree + kBarrier + kStore, "are not allocated");
  expect_fault(kAlloc + "@%p1 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r4], 32;\n",
               "needs a cluster of pairs");
  // Another warp waits until the first one frees the columns.
  run("@%p1 " + all + "512;\n@%p1 ld.shared.u32 %r3, [%r4];\n" +
      "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;\nsetp.eq.u32 %p4, %r2, 1;\n" +
      "add.s32 %r4, %r5, 0;\n@%p4 " + all + "512;\n@%p4 ld.shared.u32 %r3, [%r4];\n" +
      "@%p4 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512;\nbar.sync 0;\n@%p4 " + give_up);
}

TEST(TensorMemory, AccessFaults) {
  const std::string begin = kAlloc + kAddress;
  expect_fault(begin + kLoad, "nobody has written it");
  expect_fault(begin +
                   "add.s32 %r6, %r6, 127;\n@%p3 tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6], "
                   "{%r1, %r1};\n",
               "are not allocated");
  expect_fault(begin + "@%p3 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r1};\n",
               "its lanes begin at");
  expect_fault(begin + "and.b32 %r7, %r1, 1;\nadd.s32 %r6, %r6, %r7;\n" + kStore,
               "different addresses");
  expect_fault(begin + "@%p2 tcgen05.st.sync.aligned.32x32b.x1.b32 [%r6], {%r1};\n",
               "a part of its warp");
  expect_fault(begin + "@%p3 tcgen05.st.sync.aligned.16x64b.x1.b32 [%r6], {%r1};\n",
               "does not know this instruction");
  EXPECT_THROW(run("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10}, [%r6];\n"), Fault);
}

}  // namespace
}  // namespace sonicmoe::emulator
