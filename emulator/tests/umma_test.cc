// tcgen05.mma and tcgen05.commit of one CTA, by PTX ISA 9.7.16.
#include <gtest/gtest.h>

#include "operand_image.h"
#include "tensor_kernel.h"

namespace sonicmoe::emulator {
namespace {

constexpr Target kTarget{100, false, true};
constexpr int kImageA = 0;
constexpr int kImageB = 16 * 1024;
constexpr int kImageBytes = 64 * 1024;
constexpr int kDepth = 16;

struct Product {
  Type type = kBF16;
  int rows = 128;
  int columns = 64;
  Layout a{Major::kK, 128};
  Layout b{Major::kK, 128};

  std::uint32_t descriptor() const {
    const std::uint32_t element = type.type == ElementType::kBF16 ? 1 : 0;
    return 1u << 4 | element << 7 | element << 10 | static_cast<std::uint32_t>(a.major) << 15 |
           static_cast<std::uint32_t>(b.major) << 16 |
           static_cast<std::uint32_t>(columns) / 8 << 17 |
           static_cast<std::uint32_t>(rows) / 16 << 24;
  }
};

constexpr TensorKernel kKernel{
    .ctas = 1, .image_bytes = kImageBytes, .allocated = 256, .row_columns = 256};

/// Runs `body` between the copy of the images and the store of D, without a fence after it.
std::string kernel(const std::string& body, int columns) {
  return kKernel.ready() + body + TensorKernel::store_unfenced(columns) + kKernel.free() +
         TensorKernel::end();
}

const std::string kClear = "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r6], %rd3, %rd4, %r9, %p3;\n";
const std::string kAdd = "@%p2 tcgen05.mma.cta_group::1.kind::f16 [%r6], %rd3, %rd4, %r9, %p8;\n";
const std::string kCommit =
    "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r3];\n";
const std::string kWait =
    "$wait:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0;\n@!%p4 bra $wait;\n";

struct Operands {
  std::vector<float> a, b;

  explicit Operands(const Product& p) {
    std::mt19937 random(5);
    a = random_matrix(p.rows, kDepth, random);
    b = random_matrix(p.columns, kDepth, random);
  }
  std::vector<float> sums(const Product& p, const std::string& body, std::uint64_t seed = 1) const {
    Arrays memory;
    const Image image_a(a, p.rows, p.type, p.a);
    const Image image_b(b, p.columns, p.type, p.b);
    std::byte* image = memory.add(kImageBytes);
    std::memcpy(image + kImageA, image_a.bytes().data(), image_a.bytes().size());
    std::memcpy(image + kImageB, image_b.bytes().data(), image_b.bytes().size());
    float* out = memory.add(std::vector<float>(128 * 256));
    run_kernel(kernel(body, p.columns), kKernel.bench(kTarget), memory,
               {word_of(image), word_of(out), image_a.umma_descriptor(kImageA),
                image_b.umma_descriptor(kImageB), p.descriptor(), 0, 0},
               seed);
    std::vector<float> d;
    for (int row = 0; row < p.rows; ++row) {
      // Layout F: rows 16 i are in lanes 32 i.
      const int lane = p.rows == 64 ? row / 16 * 32 + row % 16 : row;
      d.insert(d.end(), out + lane * 256, out + lane * 256 + p.columns);
    }
    return d;
  }
  std::vector<float> expected(const Product& p, float products = 1) const {
    return reference(a, b, p.columns, kDepth, products,
                     std::vector<float>(static_cast<std::size_t>(p.rows) * p.columns));
  }
};

void expect_product(const Product& p) {
  SCOPED_TRACE(std::string(p.type.name) + " " + std::to_string(p.rows) + " x " +
               std::to_string(p.columns) + ", A " + (p.a.major == Major::kK ? "K" : "MN") +
               std::to_string(p.a.span) + ", B " + (p.b.major == Major::kK ? "K" : "MN") +
               std::to_string(p.b.span));
  const Operands operands(p);
  EXPECT_EQ(operands.sums(p, kClear + kCommit + kWait + kAfter), operands.expected(p));
}

TEST(Umma, Shapes) {
  for (const Type& type : {kBF16, kF16}) {
    for (const int columns : {16, 48, 256}) expect_product({type, 128, columns});
    for (const int columns : {8, 24, 256}) expect_product({type, 64, columns});
  }
}

TEST(Umma, Layouts) {
  for (const auto& [span_a, span_b] : {std::pair{0, 128}, {32, 64}, {64, 0}, {128, 32}}) {
    for (const Major a : {Major::kK, Major::kMN}) {
      for (const Major b : {Major::kK, Major::kMN}) {
        expect_product({kBF16, 128, 128, {a, span_a}, {b, span_b}});
      }
    }
  }
}

TEST(Umma, ProductsOfAThreadKeepTheirOrder) {
  const Product p;
  const Operands operands(p);
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(
        operands.sums(p, kClear + kAdd + kClear + kAdd + kAdd + kCommit + kWait + kAfter, seed),
        operands.expected(p, 3));
  }
}

/// In every order of the warps.
void expect_fault(const std::string& body, const char* sentence, const Product& p = {}) {
  const Operands operands(p);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    try {
      operands.sums(p, body, seed);
      ADD_FAILURE() << "no fault: " << sentence;
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(sentence), std::string::npos) << fault.what();
    }
  }
}

TEST(Umma, EachWaitAndFenceIsNeeded) {
  const Operands operands({});
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    // A load before the product finds cells without a value, else the write is not waited for.
    EXPECT_THROW(operands.sums({}, kClear + kCommit + kAfter, seed), Fault);
  }
  expect_fault(kClear + kCommit + kWait, "has not waited for the write by tcgen05.mma of warp 0");
  // A second product after the commit.
  expect_fault(kClear + kCommit + kAdd + kWait + kAfter, "has not waited for the");
  // Operands are overwritten.
  const std::string overwrite = "setp.ge.u32 %p6, %r1, 96;\n@%p6 st.shared.u32 [%r2+96], %r1;\n";
  EXPECT_NO_THROW(operands.sums({}, kClear + kCommit + kWait + overwrite + kAfter));
  expect_fault(kClear + kCommit + overwrite + kWait + kAfter, "has not waited for");
  // Operands are written without a fence.
  expect_fault(overwrite + "bar.sync 0;\n" + kClear + kCommit + kWait + kAfter,
               "without a fence.proxy.async");
}

TEST(Umma, EveryCommitIsWaitedFor) {
  const Operands operands({});
  const std::string two = kClear + kCommit + kWait + kAfter + "bar.sync 0;\n" + kCommit;
  const std::string again =
      "$again:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 1;\n@!%p4 bra $again;\n";
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_THROW(operands.sums({}, two, seed), Fault);
    EXPECT_NO_THROW(operands.sums({}, two + again, seed));
  }
}

TEST(Umma, FaultsOfIssue) {
  const std::string rest = kCommit + kWait + kAfter;
  const auto issue = [](const std::string& guard) { return guard + kClear.substr(4); };
  expect_fault(issue("@%p1 ") + rest, "tcgen05.mma is issued by several threads");
  expect_fault(kClear + "@%p1 " + kCommit.substr(5) + kWait,
               "tcgen05.commit is issued by several threads");
  expect_fault("setp.eq.u32 %p6, %r1, 1;\n" + kClear + issue("@%p6") + rest, "two lanes of a warp");
  expect_fault("setp.eq.u32 %p6, %r1, 1;\n" + kClear + "@%p6" + kCommit.substr(4) + kWait,
               "which has not issued the products");
  expect_fault(kAdd + rest, "nobody has written it");
  expect_fault("add.s32 %r6, %r6, 224;\n" + kClear + rest, "are not allocated");
  expect_fault("add.s32 %r6, %r6, 2097152;\n" + kClear + rest, "does not begin at lane 0");
  expect_fault(kClear + "add.s32 %r9, %r9, 0x40000;\n" + kClear + rest, "another shape or place");
  expect_fault(kClear + "add.s32 %r6, %r6, 32;\n" + kClear + rest, "another shape or place");
  // Two warps use one D, and the second one does not wait for the first.
  expect_fault("setp.eq.u32 %p6, %r1, 32;\n" + kClear + issue("@%p6") + rest,
               "has not waited for the write by tcgen05.mma");
  expect_fault("@%p2 tcgen05.mma.cta_group::1.kind::tf32 [%r6], %rd3, %rd4, %r9, %p3;\n" + kWait,
               "does not know this instruction");
  expect_fault(
      "add.s32 %r10, %r3, 4;\n@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one."
      "shared::cluster.b64 [%r10];\n" +
          kWait,
      "no multiple of 8");
}

TEST(Umma, FaultsOfDescriptors) {
  const auto with = [](const std::string& change) { return change + kClear + kCommit + kWait; };
  const auto shape = [&](const char* bits, const char* sentence) {
    expect_fault(with(std::string("xor.b32 %r9, %r9, ") + bits + ";\n"), sentence);
  };
  shape("1", "reserved or not emulated");
  shape("0x40", "reserved or not emulated");
  shape("0x800000", "reserved or not emulated");
  shape("0x2000", "negation");
  shape("0x10", "D in fp32");
  shape("0x100", "a type that is not emulated");
  shape("0x20000", "has no shape of M = 128 and N = 72");
  shape("0x1000000", "has no shape of M = 144");
  const auto matrix = [&](const char* bits, const char* sentence) {
    expect_fault(with(std::string("xor.b64 %rd3, %rd3, ") + bits + ";\n"), sentence);
  };
  matrix("0x0000400000000000", "bits 46 to 48");
  matrix("0x0002000000000000", "base offsets");
  matrix("0x0010000000000000", "absolute strides");
  matrix("0x0020000000000000", "reserved bits");
  matrix("0x0000000000004000", "reserved bits");
  matrix("0x2000000000000000", "has the swizzle 3");
  matrix("0x3fff", "reads shared memory");
}

}  // namespace
}  // namespace sonicmoe::emulator
