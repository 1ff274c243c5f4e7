// tcgen05 with cta_group::2: a product of two CTAs and its commits, by PTX ISA 9.7.16.
#include <gtest/gtest.h>

#include "operand_image.h"

namespace sonicmoe::emulator {
namespace {

constexpr Target kTarget{100, false, true};
constexpr int kDepth = 16;
constexpr int kColumns = 64;
constexpr int kImageB = 16 * 1024;
constexpr int kImageBytes = 24 * 1024;

/// 128 threads in each of two CTAs. The image of a CTA has its rows of A and its half of B. %r10:
/// rank; %p1: warp 0; %p2: thread 0; %p3: false; %p6: thread 0 of the leader, which is the CTA of
/// rank 0; %r3: an mbarrier of one arrival; %r6: D; %r9: the instruction descriptor.
const std::string kBegin =
    R"(.visible .entry test(.param .u64 image, .param .u64 out, .param .u64 a,
                     .param .u64 b, .param .u64 shape) {
.reg .pred %p<10>;
.reg .b32 %r<60>;
.reg .b64 %rd<20>;
.reg .b16 %h<2>;
.shared .align 1024 .b8 operands[24576];
.shared .align 8 .b64 barrier;
.shared .align 4 .b32 place;
ld.param.u64 %rd1, [image];
ld.param.u64 %rd2, [out];
ld.param.u64 %rd3, [a];
ld.param.u64 %rd4, [b];
ld.param.u64 %rd6, [shape];
cvt.u32.u64 %r9, %rd6;
mov.u32 %r1, %tid.x;
mov.u32 %r10, %cluster_ctarank;
mov.u32 %r2, operands;
mov.u32 %r3, barrier;
mov.u32 %r5, place;
mov.b16 %h1, 3;
mul.wide.u32 %rd5, %r10, 24576;
add.s64 %rd1, %rd1, %rd5;
shl.b32 %r12, %r10, 7;
add.s32 %r12, %r12, %r1;
mul.wide.u32 %rd5, %r12, 256;
add.s64 %rd2, %rd2, %rd5;
setp.lt.u32 %p1, %r1, 32;
setp.eq.u32 %p2, %r1, 0;
setp.ne.u32 %p3, %r1, %r1;
setp.eq.u32 %p6, %r12, 0;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
)";
const std::string kAlloc = R"(
@%p1 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r5], 128;
@%p1 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
)";
const std::string kMeet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
const std::string kAddress = "tcgen05.fence::after_thread_sync;\nld.shared.u32 %r6, [%r5];\n";
const std::string kMultiply =
    "@%p6 tcgen05.mma.cta_group::2.kind::f16 [%r6], %rd3, %rd4, %r9, %p3;\n";
const std::string kCommit =
    "@%p6 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster."
    "multicast::cluster.b64 [%r3], %h1;\n";
const std::string kDone =
    "$done:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0;\n@!%p4 bra $done;\n";
const std::string kFree = "tcgen05.fence::before_thread_sync;\n" + kMeet +
                          "@%p1 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r6, 128;\n";
/// The CTA's image, by the generic proxy.
const std::string kCopy = R"(
mov.u32 %r14, 0;
shl.b32 %r15, %r1, 2;
add.s32 %r16, %r2, %r15;
cvt.u64.u32 %rd7, %r15;
add.s64 %rd8, %rd1, %rd7;
$copy:
ld.global.u32 %r17, [%rd8];
st.shared.u32 [%r16], %r17;
add.s64 %rd8, %rd8, 512;
add.s32 %r16, %r16, 512;
add.s32 %r14, %r14, 512;
setp.lt.u32 %p5, %r14, 24576;
@%p5 bra $copy;
fence.proxy.async.shared::cta;
)";
/// Everything up to the product.
const std::string kReady = kCopy + kAlloc + kMeet + kAddress;

/// The lanes of each warp, `columns` of them.
std::string store(int columns) {
  std::string text =
      "tcgen05.fence::after_thread_sync;\nand.b32 %r7, %r1, 96;\nshl.b32 %r7, %r7, 16;\n"
      "add.s32 %r7, %r7, %r6;\n";
  for (int n = 0; n < columns; n += 8) {
    text += "tcgen05.ld.sync.aligned.32x32b.x8.b32 " + registers("%r", 20, 8) + ", [%r7+" +
            std::to_string(n) + "];\ntcgen05.wait::ld.sync.aligned;\n";
    for (int i = 0; i < 8; ++i) {
      text += "st.global.u32 [%rd2+" + std::to_string(4 * (n + i)) + "], %r" +
              std::to_string(20 + i) + ";\n";
    }
  }
  return text;
}

/// A, B and D = A * B^T of the pair.
struct Pair {
  int rows;
  std::vector<float> a, b;

  explicit Pair(int m) : rows(m) {
    std::mt19937 random(5);
    a = random_matrix(rows, kDepth, random);
    b = random_matrix(kColumns, kDepth, random);
  }
  std::vector<float> expected() const {
    return reference(a, b, kColumns, kDepth, 1,
                     std::vector<float>(static_cast<std::size_t>(rows) * kColumns));
  }
  std::uint32_t descriptor() const {
    return 1u << 4 | 1u << 7 | 1u << 10 | kColumns / 8 << 17 |
           static_cast<std::uint32_t>(rows) / 16 << 24;
  }
  std::vector<float> sums(const std::string& body, std::uint64_t seed) const {
    Arrays memory;
    std::byte* image = memory.add(2 * kImageBytes);
    const Layout layout{Major::kK, 128};
    const int half_a = rows / 2, half_b = kColumns / 2;
    std::uint64_t descriptors[2] = {};
    for (int cta = 0; cta < 2; ++cta) {
      const auto part = [&](const std::vector<float>& all, int count) {
        const auto first = all.begin() + cta * count * kDepth;
        return Image(std::vector<float>(first, first + count * kDepth), count, kBF16, layout);
      };
      const Image part_a = part(a, half_a), part_b = part(b, half_b);
      std::byte* to = image + cta * kImageBytes;
      std::memcpy(to, part_a.bytes().data(), part_a.bytes().size());
      std::memcpy(to + kImageB, part_b.bytes().data(), part_b.bytes().size());
      descriptors[0] = part_a.umma_descriptor(0);
      descriptors[1] = part_b.umma_descriptor(kImageB);
    }
    float* out = memory.add(std::vector<float>(256 * kColumns));
    run_kernel(kBegin + body + "ret;\n}\n",
               {.grid = {2, 1, 1}, .block = {128, 1, 1}, .cluster = {2, 1, 1}, .target = kTarget},
               memory, {word_of(image), word_of(out), descriptors[0], descriptors[1], descriptor()},
               seed);
    std::vector<float> d(static_cast<std::size_t>(rows) * kColumns);
    for (int row = 0; row < rows; ++row) {
      for (int n = 0; n < kColumns; ++n) {
        // Layout A (M = 256): a lane for each row of the CTA. Layout B (M = 128): the right half of
        // the columns is in lanes 64 to 127.
        const int lane = rows == 256 ? row : row / 64 * 128 + n / half_b * 64 + row % 64;
        d[row * kColumns + n] = out[lane * kColumns + (rows == 256 ? n : n % half_b)];
      }
    }
    return d;
  }
};

TEST(UmmaPair, Products) {
  for (const int rows : {128, 256}) {
    const Pair pair(rows);
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      EXPECT_EQ(pair.sums(kReady + kMultiply + kCommit + kDone +
                              store(rows == 256 ? kColumns : kColumns / 2) + kFree,
                          seed),
                pair.expected());
    }
  }
}

void expect_fault(const std::string& body, const char* sentence) {
  const Pair pair(256);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    try {
      pair.sums(body, seed);
      ADD_FAILURE() << "no fault: " << sentence;
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(sentence), std::string::npos) << fault.what();
    }
  }
}

TEST(UmmaPair, Faults) {
  const std::string rest = kCommit + kDone + store(kColumns) + kFree;
  const std::string odd = "setp.eq.u32 %p7, %r12, 128;\n@%p7";
  expect_fault(kReady + odd + kMultiply.substr(4), "the odd CTA of a pair");
  const std::string alone = "tcgen05.mma.cta_group::1.kind::f16 [%r6], %rd3, %rd4, %r9, %p3;\n";
  expect_fault(kReady + "@%p6 " + alone, "of cta_group::1 and of cta_group::2");
  // The other CTA may still write its operands.
  expect_fault(kCopy + kAlloc + "bar.sync 0;\n" + kAddress + kMultiply + rest, "");
  expect_fault(kReady + kMultiply + kCommit + store(kColumns) + kFree, "");
  // A CTA that has ended.
  expect_fault("setp.eq.u32 %p7, %r10, 0;\n@%p7 bra $skip;\nret;\n$skip:\n" + kCopy + kAlloc, "");
  expect_fault(kCopy +
                   "add.s32 %r18, %r10, 1;\nshl.b32 %r18, %r18, 5;\n@%p1 tcgen05.alloc."
                   "cta_group::2.sync.aligned.shared::cta.b32 [%r5], %r18;\n",
               "of a pair allocate");
  expect_fault(kReady + kMultiply + "mov.b16 %h1, 7;\n" + kCommit, "names no CTA of the cluster");
}

TEST(UmmaPair, MissingWaitsAreNoticed) {
  const std::string product = kMultiply + kCommit + kDone + store(kColumns);
  const std::string before = "tcgen05.fence::before_thread_sync;\n";
  const std::string dealloc = "@%p1 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r6, 128;\n";
  // The first barrier of the cluster, which is that of the mbarriers' initialisation too.
  expect_fault(kCopy + kAlloc + "bar.sync 0;\n" + kAddress + product + kFree, "");
  // Both CTAs' epilogues must have loaded D.
  expect_fault(kReady + product + kMeet + dealloc, "has not waited for the read by tcgen05.ld");
  expect_fault(kReady + product + before + dealloc, "");
  // The commit arrives in one CTA only.
  EXPECT_THROW(
      Pair(256).sums(
          kReady + kMultiply + "mov.b16 %h1, 1;\n" + kCommit + kDone + store(kColumns) + kFree, 1),
      Fault);
}

}  // namespace
}  // namespace sonicmoe::emulator
