// Accesses that no wait orders are faults, in whatever order they happen.
#include <gtest/gtest.h>

#include "kernel_fixture.h"

namespace sonicmoe::emulator {
namespace {

/// Of 64 threads, in a cluster of two CTAs. %r1: thread; %p1: warp 0; %p2: thread 0; %p3: warp 1;
/// %r2: 1024 bytes of shared memory; %r3: two mbarriers, of one arrival; %rd1: 1024 bytes of global
/// memory; %p4 of a wait; %r4: the other CTA's %r2; %r5: rank.
std::string kernel(const std::string& body) {
  return R"(.visible .entry test(.param .u64 global) {
.reg .pred %p<10>;
.reg .b32 %r<20>;
.reg .b64 %rd<4>;
.reg .f32 %f<8>;
.shared .align 1024 .b8 data[1024];
.shared .align 8 .b64 barriers[2];
ld.param.u64 %rd1, [global];
mov.u32 %r1, %tid.x;
mov.u32 %r2, data;
mov.u32 %r3, barriers;
setp.lt.u32 %p1, %r1, 32;
setp.eq.u32 %p2, %r1, 0;
setp.ge.u32 %p3, %r1, 32;
mov.u32 %r5, %cluster_ctarank;
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r4, %r2, %r6;
and.b32 %r7, %r1, 31;
shl.b32 %r7, %r7, 2;
add.s32 %r8, %r2, %r7;
add.s32 %r9, %r4, %r7;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
@%p2 mbarrier.init.shared.b64 [%r3+8], 1;
)" + body +
         "ret;\n}\n";
}

constexpr const char* kBarrier = "bar.sync 0;\n";
constexpr const char* kWrite = "@%p1 st.shared.u32 [%r8], %r1;\n";   // by warp 0
constexpr const char* kRead = "@%p3 ld.shared.u32 %r10, [%r8];\n";   // by warp 1
constexpr const char* kWrite1 = "@%p3 st.shared.u32 [%r8], %r1;\n";  // by warp 1
constexpr const char* kArrive = "@%p2 mbarrier.arrive.shared.b64 _, [%r3];\n";
constexpr const char* kWait =
    "$wait:\nmbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0;\n@!%p4 bra $wait;\n";
/// A copy of 128 bytes to shared memory, which counts at the first mbarrier.
constexpr const char* kLoad = R"(
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r3];
)";
constexpr const char* kStore = R"(
fence.proxy.async.shared::cta;
@%p2 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 128;
@%p2 cp.async.bulk.commit_group;
)";
constexpr const char* kStoreWait = "@%p2 cp.async.bulk.wait_group.read 0;\n";
constexpr const char* kCopy = R"(
@%p1 cp.async.ca.shared.global [%r8], [%rd1], 4;
@%p1 cp.async.commit_group;
)";
constexpr const char* kCopyWait = "@%p1 cp.async.wait_group 0;\n";
constexpr const char* kRemoteWrite = "@%p1 st.shared::cluster.u32 [%r9], %r1;\n";
constexpr const char* kCluster = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";

std::string fault_of(const std::string& body, std::uint64_t seed) {
  Arrays memory;
  std::byte* global = memory.add(1024);
  try {
    run_kernel(kernel(body), {.grid = {2, 1, 1}, .block = {64, 1, 1}, .cluster = {2, 1, 1}}, memory,
               {word_of(global)}, seed);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return {};
}

constexpr std::uint64_t kSeeds = 5;

void expect_ordered(const std::string& body) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) EXPECT_EQ(fault_of(body, seed), "") << body;
}

/// In every order.
void expect_race(const std::string& body, const char* sentence = "has not waited for the") {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    EXPECT_NE(fault_of(body, seed).find(sentence), std::string::npos)
        << body << fault_of(body, seed);
  }
}

using S = std::string;

TEST(Clocks, WarpsWaitAtABarrier) {
  expect_ordered(S(kWrite) + kBarrier + kRead + kBarrier + kWrite);
  expect_race(S(kWrite) + kRead);
  expect_race(S(kWrite) + kBarrier + kRead + kWrite);
  expect_race(S(kWrite) + kWrite1);
  expect_ordered(S(kWrite) + "@%p1 bar.arrive 1, 64;\n@%p3 bar.sync 1, 64;\n" + kRead);
  expect_race(S("@%p1 bar.arrive 1, 64;\n") + kWrite + "@%p3 bar.sync 1, 64;\n" + kRead);
}

TEST(Clocks, AWarpAloneNeedsNoWait) {
  expect_ordered(S(kWrite) + "@%p1 ld.shared.u32 %r10, [%r8];\n" + kWrite);
}

TEST(Clocks, AtomicsMayRace) {
  expect_ordered("atom.shared.add.u32 %r10, [%r2], 1;\nld.volatile.shared.u32 %r11, [%r2];\n");
  expect_race(S("atom.shared.add.u32 %r10, [%r2], 1;\n") + kWrite + kRead);
}

TEST(Clocks, AnMbarrierPassesOnWhatItsArrivalsKnow) {
  expect_ordered(S(kBarrier) + kWrite + kArrive + kWait + kRead);
  expect_race(S(kBarrier) + kArrive + kWrite + kWait + kRead);
  expect_race(S(kBarrier) + kWrite + kArrive + kRead + kWait);
  expect_race(S(kArrive) + kWait, "an mbarrier is");
}

TEST(Clocks, BulkLoads) {
  expect_ordered(S(kBarrier) + kLoad + kWait + kRead);
  expect_race(S(kBarrier) + kLoad + kRead + kWait);
  // The stage is loaded again before or after its readers have finished.
  const std::string again = R"(
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3+8], 128;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r3+8];
$again:
mbarrier.try_wait.parity.shared.b64 %p4, [%r3+8], 0;
@!%p4 bra $again;
)";
  expect_ordered(S(kBarrier) + kLoad + kWait + kRead + kBarrier + again);
  expect_race(S(kBarrier) + kLoad + kWait + kRead + again);
}

TEST(Clocks, BulkStores) {
  expect_ordered(S(kWrite) + kStore + kStoreWait + kBarrier + kWrite1);
  expect_race(S(kWrite) + kStore + kBarrier + kWrite1 + kStoreWait);
  expect_race(S(kWrite) + kStore + kStoreWait + kWrite1);
  expect_race(S(kWrite1) + kStore + kStoreWait);
}

TEST(Clocks, CopiesOfThreads) {
  expect_ordered(S(kCopy) + kCopyWait + kBarrier + kRead);
  expect_race(S(kCopy) + kBarrier + kRead);
  expect_race(S(kCopy) + kCopyWait + kRead);
  expect_race(S(kCopy) + "@%p1 ld.shared.u32 %r10, [%r8];\n" + kCopyWait);
  const std::string arrive = "@%p2 cp.async.mbarrier.arrive.noinc.shared.b64 [%r3];\n";
  expect_ordered(S(kBarrier) + kCopy + arrive + kWait + "@%p3 ld.shared.u32 %r10, [%r2];\n");
  expect_race(S(kBarrier) + arrive + kCopy + kWait + kRead + kCopyWait);
}

TEST(Clocks, CtasOfACluster) {
  expect_ordered(S(kCluster) + kRemoteWrite + kCluster + kRead + kCluster);
  expect_race(S(kCluster) + kRemoteWrite + kRead + kCluster);
  const std::string post = R"(
mapa.shared::cluster.u32 %r11, %r3, %r6;
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 4;
@%p2 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r9], %r1, [%r11];
)";
  expect_ordered(S(kCluster) + post + kWait + kRead + kCluster);
  expect_race(S(kCluster) + post + kRead + kWait + kCluster);
}

TEST(Clocks, AFaultNamesBothAccesses) {
  const std::string fault = fault_of(S(kWrite) + kRead, 1);
  EXPECT_NE(fault.find("byte 0 of shared memory is"), std::string::npos) << fault;
  EXPECT_NE(fault.find("warp 0 of CTA"), std::string::npos) << fault;
  EXPECT_NE(fault.find("warp 1 of CTA"), std::string::npos) << fault;
}

/// The history drops states that no unit has any more.
TEST(Clocks, ManyAccesses) {
  const std::string loop = R"(
mov.u32 %r12, 0;
$loop:
@%p1 st.shared.u32 [%r8], %r1;
bar.sync 0;
@%p3 ld.shared.u32 %r10, [%r8];
bar.sync 0;
add.s32 %r12, %r12, 1;
setp.lt.u32 %p5, %r12, 6000;
@%p5 bra $loop;
)";
  EXPECT_EQ(fault_of(loop, 1), "");
  EXPECT_NE(fault_of(loop + kRead + kWrite, 1), "");
}

}  // namespace
}  // namespace sonicmoe::emulator
