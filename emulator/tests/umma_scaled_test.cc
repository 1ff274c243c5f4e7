// tcgen05.mma with scale factors and tcgen05.cp, by PTX ISA 9.7.16.
#include <gtest/gtest.h>

#include <cmath>

#include "operand_image.h"
#include "tensor_kernel.h"

namespace sonicmoe::emulator {
namespace {

constexpr Target kTarget{100, false, true};
constexpr int kDepth = 32;
constexpr int kImageB = 16 * 1024, kImageScales = 48 * 1024;
constexpr int kImageBytes = kImageScales + 2048;
constexpr int kChunk = 512;                          // the scales of 128 rows and four steps of K
constexpr int kColumnsOfA = 256, kColumnsOfB = 260;  // behind D
constexpr int kMostSums = 256;
constexpr std::uint64_t kSource = std::uint64_t{128 / 16} << 32 | std::uint64_t{1} << 46;

constexpr TensorKernel kernel_of(int ctas) {
  return {.ctas = ctas, .image_bytes = kImageBytes, .allocated = 512, .row_columns = kMostSums};
}

struct Product {
  int ctas = 1, rows = 128, columns = 64;
  Type type_a = kE4M3, type_b = kE4M3;
  Layout a{Major::kK, 128}, b{Major::kK, 128};
  int id_a = 0, id_b = 0;

  /// The scales of the right half of B have lanes of their own.
  bool has_halves() const { return ctas == 2 && rows == 128; }
  std::uint32_t descriptor() const {
    const auto bit = [](bool is) { return is ? 1u : 0u; };
    return static_cast<std::uint32_t>(id_b) << 4 | bit(type_a.type == ElementType::kE5M2) << 7 |
           bit(type_b.type == ElementType::kE5M2) << 10 | bit(a.major == Major::kMN) << 15 |
           bit(b.major == Major::kMN) << 16 | static_cast<std::uint32_t>(columns) / 8 << 17 |
           1u << 23 | static_cast<std::uint32_t>(rows) / 128 << 27 |
           static_cast<std::uint32_t>(id_a) << 29;
  }
};

// One thread's instructions. %rd10 and %rd11: the sources of scales.
std::string multiply(int ctas, const std::string& accumulates) {
  return "@%p6 tcgen05.mma.cta_group::" + std::to_string(ctas) +
         ".kind::mxf8f6f4.block_scale.block32 [%r6], %rd3, %rd4, %r9, [%r6+256], [%r6+260], " +
         accumulates + ";\n";
}
std::string copy(int ctas, const std::string& form, int column, const std::string& source) {
  return "@%p6 tcgen05.cp.cta_group::" + std::to_string(ctas) + "." + form + " [%r6+" +
         std::to_string(column) + "], " + source + ";\n";
}
const std::string kWarpx4 = "32x128b.warpx4";
std::string copy_scales(const Product& p) {
  std::string text = copy(p.ctas, kWarpx4, kColumnsOfA, "%rd10");
  if (p.has_halves()) return text + copy(2, "64x128b.warpx2::01_23", kColumnsOfB, "%rd11");
  text += copy(p.ctas, kWarpx4, kColumnsOfB, "%rd11");
  if (p.columns <= 128) return text;
  return text + "add.s64 %rd12, %rd11, 32;\n" + copy(p.ctas, kWarpx4, kColumnsOfB + 4, "%rd12");
}
const std::string kCopyA = copy(1, kWarpx4, kColumnsOfA, "%rd10");
const std::string kCopyB = copy(1, kWarpx4, kColumnsOfB, "%rd11");
const std::string kScales = kCopyA + kCopyB;
const std::string kClear = multiply(1, "%p3"), kAdd = multiply(1, "%p8");
const std::string kEnd = kernel_of(1).commit() + kDone;

float value_of(std::uint8_t scale) {
  return scale == 0xff ? std::nanf("") : std::ldexp(1.0f, scale - 127);
}

/// Operands and scales of random integers and powers of two. Bytes of scales with another id are
/// other numbers.
struct Operands {
  Product p;
  std::vector<float> a, b;
  std::vector<std::uint8_t> scales_a, scales_b;

  explicit Operands(const Product& product) : p(product) {
    std::mt19937 random(7);
    a = random_matrix(p.rows, kDepth, random);
    b = random_matrix(p.columns, kDepth, random);
    const auto some = [&] { return static_cast<std::uint8_t>(125 + random() % 5); };
    for (int r = 0; r < p.rows; ++r) scales_a.push_back(some());
    for (int n = 0; n < p.columns; ++n) scales_b.push_back(some());
  }
  /// `steps`: products with these operands.
  std::vector<float> expected(float steps = 1) const {
    std::vector<float> d = reference(a, b, p.columns, kDepth, steps,
                                     std::vector<float>(std::size_t(p.rows) * p.columns));
    for (int r = 0; r < p.rows; ++r) {
      for (int n = 0; n < p.columns; ++n) {
        d[r * p.columns + n] *= value_of(scales_a[r]) * value_of(scales_b[n]);
      }
    }
    return d;
  }

  /// `body` comes behind the copy of the image and before the loads of D.
  std::vector<float> sums(const std::string& body, std::uint64_t seed = 1) const {
    const TensorKernel kernel = kernel_of(p.ctas);
    Arrays memory;
    std::byte* images = memory.add(static_cast<std::size_t>(p.ctas) * kImageBytes);
    std::uint64_t descriptors[2] = {};
    for (int cta = 0; cta < p.ctas; ++cta) fill_image(cta, images + cta * kImageBytes, descriptors);
    float* out = memory.add(std::vector<float>(2 * 128 * kMostSums));
    const int lane_columns = p.has_halves() ? p.columns / 2 : p.columns;
    run_kernel(kernel.ready() + body + TensorKernel::store(lane_columns) + kernel.free() +
                   TensorKernel::end(),
               kernel.bench(kTarget), memory,
               {word_of(images), word_of(out), descriptors[0], descriptors[1], p.descriptor(),
                kSource | kImageScales / 16, kSource | (kImageScales + kChunk) / 16},
               seed);
    std::vector<float> d;
    const int rows = p.rows / p.ctas;
    for (int r = 0; r < p.rows; ++r) {
      for (int n = 0; n < p.columns; ++n) {
        const int lane = r / rows * 128 + n / lane_columns * rows + r % rows;
        d.push_back(out[lane * kMostSums + n % lane_columns]);
      }
    }
    return d;
  }
  std::vector<float> sums_of_all(std::uint64_t seed = 1) const {
    return sums(copy_scales(p) + multiply(p.ctas, "%p3") + kernel_of(p.ctas).commit() + kDone,
                seed);
  }

 private:
  void fill_image(int cta, std::byte* to, std::uint64_t* descriptors) const {
    const auto put = [&](const std::vector<float>& all, int count, const Type& type, Layout layout,
                         int at) {
      const auto first = all.begin() + cta * count * kDepth;
      const Image image(std::vector<float>(first, first + count * kDepth), count, type, layout);
      std::memcpy(to + at, image.bytes().data(), image.bytes().size());
      return image.umma_descriptor(at);
    };
    const int rows = p.rows / p.ctas;
    descriptors[0] = put(a, rows, p.type_a, p.a, 0);
    descriptors[1] = put(b, p.columns / p.ctas, p.type_b, p.b, kImageB);
    std::mt19937 random(11);
    for (int i = kImageScales; i < kImageBytes; ++i) to[i] = std::byte(random() % 256);
    for (int r = 0; r < rows; ++r) {
      to[kImageScales + r % 32 * 16 + r / 32 * 4 + p.id_a] = std::byte(scales_a[cta * rows + r]);
    }
    // All columns of B in each CTA.
    const int part = p.has_halves() ? p.columns / 2 : 128;
    for (int n = 0; n < p.columns; ++n) {
      const int in_part = n % part;
      const int at = n / part * kChunk + in_part % 32 * 16 + in_part / 32 * 4 + p.id_b;
      to[kImageScales + kChunk + at] = std::byte(scales_b[n]);
    }
  }
};

void expect_product(const Product& p) {
  SCOPED_TRACE(std::to_string(p.ctas) + " CTAs, " + std::to_string(p.rows) + " x " +
               std::to_string(p.columns));
  const Operands operands(p);
  EXPECT_EQ(operands.sums_of_all(), operands.expected());
}

TEST(UmmaScaled, Shapes) {
  for (const int columns : {8, 24, 128, 136, 256}) expect_product({1, 128, columns});
  for (const int columns : {16, 80, 192, 256}) expect_product({2, 256, columns});
  for (const int columns : {16, 96, 256}) expect_product({2, 128, columns});
}

TEST(UmmaScaled, TypesAndBytesOfScales) {
  expect_product({.type_a = kE5M2, .id_a = 1, .id_b = 3});
  expect_product({.type_b = kE5M2, .id_a = 2, .id_b = 1});
  expect_product({.ctas = 2, .rows = 256, .type_a = kE5M2, .type_b = kE5M2, .id_a = 3, .id_b = 2});
}

TEST(UmmaScaled, Layouts) {
  for (const auto& [span_a, span_b] : {std::pair{0, 128}, {32, 64}, {64, 0}, {128, 32}}) {
    for (const Major a : {Major::kK, Major::kMN}) {
      for (const Major b : {Major::kK, Major::kMN}) {
        expect_product({.columns = 128, .a = {a, span_a}, .b = {b, span_b}});
        expect_product(
            {.ctas = 2, .rows = 256, .columns = 256, .a = {a, span_a}, .b = {b, span_b}});
      }
    }
  }
}

TEST(UmmaScaled, LargestAndSmallestScales) {
  Operands operands({});
  operands.scales_a.assign(128, 0);   // 2^-127, which is no normal number in fp32
  operands.scales_b.assign(64, 254);  // 2^127
  EXPECT_EQ(operands.sums_of_all(),
            reference(operands.a, operands.b, 64, kDepth, 1, std::vector<float>(128 * 64)));
  operands.scales_a[3] = 255;
  const std::vector<float> d = operands.sums_of_all();
  for (int r = 0; r < 128; ++r) {
    for (int n = 0; n < 64; ++n) EXPECT_EQ(std::isnan(d[r * 64 + n]), r == 3);
  }
}

/// In every order of the warps, which wait before they load D.
void expect_fault(std::string body, const char* sentence, const Product& p = {}) {
  const Operands operands(p);
  if (body.find(kDone) == body.npos) body += kernel_of(p.ctas).commit() + kDone;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    try {
      operands.sums(body, seed);
      ADD_FAILURE() << "no fault: " << sentence;
    } catch (const Fault& fault) {
      EXPECT_NE(std::string(fault.what()).find(sentence), std::string::npos) << fault.what();
    }
  }
}

const std::string kAgain =
    "$again:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 1;\n@!%p4 bra $again;\n";

/// A product comes behind the copies of its thread. A copy must wait for products.
TEST(UmmaScaled, OrderOfAThread) {
  const Operands operands({});
  const std::string rest = kernel_of(1).commit() + kAgain;
  const std::string waited = kEnd + kAfter + "bar.sync 0;\n";
  // The scales of A are those of B in the second product.
  const std::string other = copy(1, kWarpx4, kColumnsOfA, "%rd11");
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(operands.sums(kScales + kClear + kAdd + kClear + kAdd + kAdd + kEnd, seed),
              operands.expected(3));
    EXPECT_EQ(operands.sums(kScales + kClear + waited + kScales + kAdd + rest, seed),
              operands.expected(2));
    EXPECT_NE(operands.sums(kScales + kClear + waited + other + kAdd + rest, seed),
              operands.expected(2));
  }
  expect_fault(kScales + kClear + kScales + kAdd, "has not waited for the write by tcgen05.cp");
  expect_fault(kScales + kClear + kEnd + "bar.sync 0;\n" + kScales + kAdd + rest,
               "has not waited for the write by tcgen05.cp");
  expect_fault(kScales + waited + kClear + kScales + kAdd + rest,
               "has not waited for the read by tcgen05.mma");
}

TEST(UmmaScaled, EachCopyAndWaitIsNeeded) {
  expect_fault(kCopyB + kClear + kEnd, "is read, and nobody has written it");
  expect_fault(kCopyA + kClear + kEnd, "is read, and nobody has written it");
  expect_fault(kClear + kScales + kEnd, "is read, and nobody has written it");
  expect_fault(kScales + kClear + kEnd + kAfter + copy(1, kWarpx4, 0, "%rd10"),
               "has not waited for the");
  // The source is overwritten.
  const std::string overwrite = "setp.ge.u32 %p7, %r1, 96;\n@%p7 st.shared.u32 [%r2+" +
                                std::to_string(kImageScales) + "], %r1;\n";
  EXPECT_NO_THROW(Operands({}).sums(kScales + kClear + kEnd + overwrite));
  expect_fault(kScales + kClear + overwrite + kEnd, "has not waited for");
  // The source is written without a fence.
  expect_fault(overwrite + "bar.sync 0;\n" + kScales + kClear + kEnd,
               "without a fence.proxy.async");
}

TEST(UmmaScaled, CopiesOfAnotherThread) {
  // Thread 32 copies and the leader's thread multiplies.
  const std::string other = "setp.eq.u32 %p7, %r12, 32;\n";
  const auto by_other = [](std::string text) {
    for (std::size_t at = 0; (at = text.find("%p6", at)) != text.npos;) text.replace(at, 3, "%p7");
    return text;
  };
  const std::string copied = other + by_other(kScales);
  const std::string meet = "tcgen05.fence::before_thread_sync;\nbar.sync 0;\n" + kAfter;
  const std::string waited = by_other(kernel_of(1).commit()) + kDone + kAfter;
  const std::string rest = kernel_of(1).commit() + kAgain;
  const Operands operands({});
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    EXPECT_EQ(operands.sums(copied + waited + "bar.sync 0;\n" + kClear + rest, seed),
              operands.expected());
  }
  expect_fault(copied + meet + kClear + kEnd,
               "has not waited for the write by tcgen05.cp of warp 1");
  expect_fault(copied + by_other(kernel_of(1).commit()) + kDone + "bar.sync 0;\n" + kClear + rest,
               "has not waited for the write by tcgen05.cp of warp 1");
  // It copies while products read the scales.
  expect_fault(kScales + kEnd + kAfter + kClear + meet + copied + kAgain,
               "has not waited for the read by tcgen05.mma of warp 0");
}

TEST(UmmaScaled, FaultsOfPlaces) {
  const auto scales_at = [](const std::string& a, const std::string& b) {
    return "@%p6 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r6], %rd3, %rd4, "
           "%r9, [%r6+" +
           a + "], [%r6+" + b + "], %p3;\n";
  };
  expect_fault(kScales + scales_at("63", "260") + kEnd, "where its scales lie");
  expect_fault(kScales + scales_at("256", "63") + kEnd, "where its scales lie");
  expect_fault(kScales + scales_at("65792", "260") + kEnd, "the scales of A of tcgen05.mma");
  expect_fault(kScales + scales_at("256", "65796") + kEnd, "does not begin at lane 0");
  expect_fault(kScales + scales_at("510", "260") + kEnd, "are not allocated");
  expect_fault(kScales + kCopyA, "has not waited for the write by tcgen05.cp");
  // D or scales of a product that may not be complete.
  expect_fault(kScales + kClear + copy(1, kWarpx4, 60, "%rd10"),
               "has not waited for the write by tcgen05.mma");
  const auto second = [&](const std::string& d, const std::string& a, const std::string& b) {
    return kScales + copy(1, kWarpx4, 448, "%rd10") + copy(1, kWarpx4, 452, "%rd11") + kClear +
           "add.s32 %r6, %r6, " + d + ";\n" + scales_at(a, b);
  };
  expect_fault(second("128", "320", "-128"), "which a product writes that has not been waited for");
  expect_fault(second("200", "248", "252"), "which have scales of a product");
  expect_fault(copy(1, kWarpx4, 510, "%rd10"), "are not allocated");
  expect_fault(copy(1, kWarpx4, 65792, "%rd10"), "the target of tcgen05.cp");
}

TEST(UmmaScaled, FaultsOfIssue) {
  expect_fault("@%p1" + kCopyA.substr(4), "tcgen05.cp is issued by several threads");
  expect_fault("setp.eq.u32 %p7, %r12, 1;\n" + kScales + "@%p7" + kClear.substr(4),
               "two lanes of a warp");
  expect_fault("xor.b64 %rd10, %rd10, 0x4000000000000000;\n" + kCopyA, "a swizzle of the source");
  expect_fault("xor.b64 %rd10, %rd10, 0x400000000000;\n" + kCopyA, "bits 46 to 48");
  expect_fault("or.b64 %rd10, %rd10, 0x3fff;\n" + kCopyA, "reads shared memory");
  expect_fault(copy(1, "128x256b", kColumnsOfA, "%rd10"), "does not know this instruction");
  const auto form = [](const std::string& from, const std::string& to) {
    std::string text = kClear;
    return text.replace(text.find(from), from.size(), to);
  };
  expect_fault(form(".block32", ".block16"), "does not know this instruction");
  expect_fault(form("mxf8f6f4", "mxf4"), "does not know this instruction");
  expect_fault(form("%rd3", "[%r6]"), "does not know this instruction");
  EXPECT_EQ(Operands({}).sums(kScales + form(".block32", "") + kEnd), Operands({}).expected());
  // The odd CTA.
  const Product pair{2, 256, 64};
  const std::string odd = "setp.eq.u32 %p6, %r12, 128;\n";
  expect_fault(odd + copy_scales(pair), "the odd CTA of a pair issues tcgen05.cp", pair);
}

TEST(UmmaScaled, FaultsOfDescriptors) {
  const auto shape = [](const char* bits, const char* sentence, const Product& p = {}) {
    expect_fault(
        std::string("xor.b32 %r9, %r9, ") + bits + ";\n" + copy_scales(p) + multiply(p.ctas, "%p3"),
        sentence, p);
  };
  for (const char* bits : {"4", "0x40", "0x1000000", "0x80000000"}) {
    shape(bits, "reserved or not emulated");
  }
  shape("0x2000", "negation");
  shape("0x800000", "does not have scales in UE8M0");
  shape("0x280", "a type that is not emulated");
  shape("0x1400", "a type that is not emulated");
  shape("0x8000000", "has no shape of M = 0");
  shape("0x100000", "has no shape of M = 128 and N = 0");
  shape("0x8000000", "has no shape of M = 0", {2, 128, 64});
  shape("0x20000", "N = 72", {2, 256, 64});
  shape("0x20000", "N = 72", {.b = {Major::kMN, 64}});
  shape("0x40000", "N = 80", {.ctas = 2, .rows = 256, .b = {Major::kMN, 32}});
  // Another byte of the cells.
  const Operands operands({});
  for (const char* bits : {"0x20000000", "0x10"}) {
    EXPECT_NE(
        operands.sums(std::string("xor.b32 %r9, %r9, ") + bits + ";\n" + kScales + kClear + kEnd),
        operands.expected());
  }
}

}  // namespace
}  // namespace sonicmoe::emulator
