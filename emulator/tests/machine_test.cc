// Warps, barriers and memories of the emulator, by small kernels.
#include <gtest/gtest.h>

#include <numeric>

#include "kernel_fixture.h"

namespace sonicmoe::emulator {
namespace {

using Words = std::vector<std::uint32_t>;

std::string kernel(const std::string& body) {
  return R"(.visible .entry test(.param .u64 out, .param .u64 in) {
.reg .pred %p<10>;
.reg .b32 %r<30>;
.reg .b64 %rd<20>;
.shared .align 16 .b8 table[256];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [in];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mad.lo.s32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd3, %r4, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.u32 %r5, [%rd5];
)" + body +
         R"(
st.global.u32 [%rd4], %r6;
ret;
}
)";
}

/// Runs `body`, which computes %r6 from %r5, the thread's word of 0, 1, 2...
Words run(const std::string& body, const BenchShape& shape = {}, std::uint64_t seed = 1) {
  Arrays memory;
  Words in(shape.grid.count() * shape.block.count());
  std::iota(in.begin(), in.end(), 0u);
  const std::uint32_t* source = memory.add(in);
  auto* out = reinterpret_cast<std::uint32_t*>(memory.add(in.size() * 4));
  run_kernel(kernel(body), shape, memory, {word_of(out), word_of(source)}, seed);
  return {out, out + in.size()};
}

TEST(Machine, LanesThatBranchMeetAgain) {
  const Words out = run(R"(
setp.lt.u32 %p1, %r1, 10;
mov.u32 %r6, 100;
@%p1 bra $low;
add.s32 %r6, %r6, %r5;
bra.uni $end;
$low:
sub.s32 %r6, %r6, %r5;
$end:
shfl.sync.bfly.b32 %r6, %r6, 1, 31, -1;
)");
  for (std::uint32_t i = 0; i < 32; ++i) {
    const std::uint32_t other = i ^ 1;
    EXPECT_EQ(out[i], other < 10 ? 100 - other : 100 + other);
  }
}

TEST(Machine, LoopsOfDifferentLengths) {
  const Words out = run(R"(
mov.u32 %r6, 0;
mov.u32 %r7, 0;
$loop:
add.s32 %r6, %r6, %r7;
add.s32 %r7, %r7, 1;
setp.le.u32 %p1, %r7, %r5;
@%p1 bra $loop;
)");
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i * (i + 1) / 2);
}

TEST(Machine, ALaneMayWaitForAnotherOfItsWarp) {
  const Words out = run(R"(
mov.u32 %r7, table;
mov.u32 %r8, 0;
mov.u32 %r6, 1;
setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.u32 [%r7], %r8;
bar.warp.sync -1;
setp.eq.u32 %p2, %r1, 5;
@%p2 bra $set;
$spin:
ld.volatile.shared.u32 %r9, [%r7];
setp.eq.u32 %p3, %r9, 0;
@%p3 bra $spin;
bra.uni $end;
$set:
st.volatile.shared.u32 [%r7], %r6;
$end:
)");
  EXPECT_EQ(out, Words(32, 1));
}

TEST(Machine, ThreadsOfACtaMeetAtABarrier) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const Words out = run(R"(
mov.u32 %r7, table;
shr.u32 %r8, %r1, 5;
shl.b32 %r9, %r8, 2;
add.s32 %r10, %r7, %r9;
st.shared.u32 [%r10], %r5;
bar.sync 0;
xor.b32 %r9, %r9, 4;
add.s32 %r10, %r7, %r9;
ld.shared.u32 %r6, [%r10];
shr.u32 %r6, %r6, 5;
)",
                          {.block = {64, 1, 1}}, seed);
    for (std::uint32_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], i < 32 ? 1 : 0);
  }
}

TEST(Machine, BarriersCountPredicates) {
  const Words out = run(R"(
setp.lt.u32 %p1, %r1, 40;
bar.red.popc.u32 %r6, 0, %p1;
)",
                        {.block = {64, 1, 1}});
  EXPECT_EQ(out, Words(64, 40));
}

TEST(Machine, AClusterReadsItsSharedMemory) {
  const Words out = run(R"(
mov.u32 %r7, table;
st.shared.u32 [%r7], %r2;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r8, %cluster_ctarank;
xor.b32 %r8, %r8, 1;
mapa.shared::cluster.u32 %r9, %r7, %r8;
ld.shared::cluster.u32 %r6, [%r9];
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
)",
                        {.grid = {4, 1, 1}, .cluster = {2, 1, 1}});
  for (std::uint32_t i = 0; i < 128; ++i) EXPECT_EQ(out[i], (i / 32) ^ 1);
}

/// Thread 0 of warp 0 arrives for the other warp, which waits.
constexpr const char* kMbarrier = R"(
mov.u32 %r7, table;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r7], COUNT;
@%p1 st.shared.u32 [%r7+16], 77;
bar.sync 0;
mov.u32 %r6, 77;
setp.lt.u32 %p2, %r1, 32;
@%p2 bra $first;
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r7], 0;
@!%p3 bra $wait;
ld.shared.u32 %r6, [%r7+16];
bra.uni $end;
$first:
@%p1 st.shared.u32 [%r7+16], 99;
@%p1 mbarrier.arrive.shared::cta.b64 _, [%r7];
$end:
)";

std::string with_count(const char* count) {
  std::string text = kMbarrier;
  text.replace(text.find("COUNT"), 5, count);
  return text;
}

TEST(Machine, MbarriersOrderWarps) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    const Words out = run(with_count("1"), {.block = {64, 1, 1}}, seed);
    for (std::uint32_t i = 32; i < 64; ++i) EXPECT_EQ(out[i], 99);
  }
}

std::string fault_of(const std::string& body, const BenchShape& shape = {}) {
  try {
    run(body, shape);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

TEST(Machine, AMissingArrivalIsADeadlock) {
  const std::string fault = fault_of(with_count("2"), {.block = {64, 1, 1}});
  EXPECT_NE(fault.find("deadlock"), std::string::npos) << fault;
  EXPECT_NE(fault.find("mbarrier.try_wait"), std::string::npos) << fault;
}

TEST(Machine, AMissingWarpAtABarrierIsADeadlock) {
  const std::string fault = fault_of(R"(
setp.lt.u32 %p1, %r1, 32;
mov.u32 %r6, 0;
@%p1 bra $end;
bar.sync 1, 64;
$end:
)",
                                     {.block = {64, 1, 1}});
  EXPECT_NE(fault.find("deadlock"), std::string::npos) << fault;
}

TEST(Machine, AccessesOutOfBoundsAreFaults) {
  EXPECT_NE(fault_of("ld.global.u32 %r6, [%rd5+4096];").find("out of bounds"), std::string::npos);
  EXPECT_NE(fault_of("ld.shared.u32 %r6, [table+256];").find("shared memory"), std::string::npos);
  EXPECT_NE(fault_of("ld.global.u32 %r6, [%rd5+2];").find("aligned"), std::string::npos);
}

TEST(Machine, UnknownInstructionsFaultOnlyWhenTheyRun) {
  EXPECT_NE(fault_of("frobnicate.b32 %r6, %r5;").find("frobnicate.b32"), std::string::npos);
  EXPECT_EQ(run("mov.u32 %r6, 3;\nsetp.gt.u32 %p1, %r1, 99;\n@%p1 frobnicate.b32 %r6, %r5;"),
            Words(32, 3));
}

TEST(Machine, AtomicsReturnWhatWasThere) {
  const Words out = run(R"(
mov.u32 %r7, table;
setp.eq.u32 %p1, %r1, 0;
mov.u32 %r8, 0;
@%p1 st.shared.u32 [%r7], %r8;
bar.warp.sync -1;
atom.shared.add.u32 %r6, [%r7], 2;
)");
  Words sorted = out;
  std::sort(sorted.begin(), sorted.end());
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(sorted[i], 2 * i);
}

TEST(Machine, LanesVoteMatchAndReduce) {
  EXPECT_EQ(run("setp.lt.u32 %p1, %r5, 4;\nvote.sync.ballot.b32 %r6, %p1, -1;"), Words(32, 15));
  EXPECT_EQ(run("redux.sync.add.s32 %r6, %r5, -1;"), Words(32, 496));
  const Words out = run("and.b32 %r7, %r5, 1;\nmatch.any.sync.b32 %r6, %r7, -1;");
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], i % 2 ? 0xaaaaaaaa : 0x55555555);
}

TEST(Machine, ScopesHaveTheirOwnNames) {
  const Words out = run(R"(
{
.reg .pred done;
.reg .b32 %r5;
mov.u32 %r5, 7;
setp.eq.u32 done, %r5, 7;
again:
selp.b32 %r6, 1, 2, done;
setp.eq.u32 done, %r6, 3;
@done bra again;
}
add.s32 %r6, %r6, %r5;
)");
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(out[i], 1 + i);
}

}  // namespace
}  // namespace sonicmoe::emulator
