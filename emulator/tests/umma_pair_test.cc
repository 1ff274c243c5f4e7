// tcgen05 with cta_group::2: a product of two CTAs and its commits, by PTX ISA 9.7.16.
#include <gtest/gtest.h>

#include "operand_image.h"
#include "tensor_kernel.h"

namespace sonicmoe::emulator {
namespace {

constexpr Target kTarget{100, false, true};
constexpr int kDepth = 16;
constexpr int kColumns = 64;
constexpr int kImageB = 16 * 1024;
constexpr TensorKernel kKernel{
    .ctas = 2, .image_bytes = 24 * 1024, .allocated = 128, .row_columns = kColumns};

const std::string kAlloc = kKernel.alloc();
const std::string kMultiply =
    "@%p6 tcgen05.mma.cta_group::2.kind::f16 [%r6], %rd3, %rd4, %r9, %p3;\n";
const std::string kCommit = kKernel.commit();
const std::string kFree = kKernel.free();
const std::string kCopy = kKernel.copy();
/// Everything up to the product.
const std::string kReady = kCopy + kAlloc + kMeet + kAddress;
const auto store = &TensorKernel::store;

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
    std::byte* image = memory.add(2 * kKernel.image_bytes);
    const Layout layout{Major::kK, 128};
    const int half_a = rows / 2, half_b = kColumns / 2;
    std::uint64_t descriptors[2] = {};
    for (int cta = 0; cta < 2; ++cta) {
      const auto part = [&](const std::vector<float>& all, int count) {
        const auto first = all.begin() + cta * count * kDepth;
        return Image(std::vector<float>(first, first + count * kDepth), count, kBF16, layout);
      };
      const Image part_a = part(a, half_a), part_b = part(b, half_b);
      std::byte* to = image + cta * kKernel.image_bytes;
      std::memcpy(to, part_a.bytes().data(), part_a.bytes().size());
      std::memcpy(to + kImageB, part_b.bytes().data(), part_b.bytes().size());
      descriptors[0] = part_a.umma_descriptor(0);
      descriptors[1] = part_b.umma_descriptor(kImageB);
    }
    float* out = memory.add(std::vector<float>(256 * kColumns));
    run_kernel(kKernel.begin() + body + TensorKernel::end(), kKernel.bench(kTarget), memory,
               {word_of(image), word_of(out), descriptors[0], descriptors[1], descriptor()}, seed);
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
  // The first barrier of the cluster, which is that of the mbarriers' initialisation too.
  expect_fault(kCopy + kAlloc + "bar.sync 0;\n" + kAddress + product + kFree, "");
  // Both CTAs' epilogues must have loaded D.
  expect_fault(kReady + product + kMeet + kKernel.dealloc(),
               "has not waited for the read by tcgen05.ld");
  expect_fault(kReady + product + before + kKernel.dealloc(), "");
  // The commit arrives in one CTA only.
  EXPECT_THROW(
      Pair(256).sums(
          kReady + kMultiply + "mov.b16 %h1, 1;\n" + kCommit + kDone + store(kColumns) + kFree, 1),
      Fault);
}

}  // namespace
}  // namespace sonicmoe::emulator
