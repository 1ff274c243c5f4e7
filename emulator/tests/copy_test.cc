// Asynchronous copies of the emulator, by small kernels. A kernel with a missing wait must give a
// wrong result for some seed.
#include <cuda.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "kernel_fixture.h"
#include "tensor_copy.h"

namespace sonicmoe::emulator {
namespace {

using Words = std::vector<std::uint32_t>;
using Elements = std::vector<std::uint16_t>;

constexpr int kSeeds = 10;
constexpr std::uint32_t kUntouched = 0xeeeeeeee;

Words numbered(std::size_t count, std::uint32_t first = 0) {
  Words words(count);
  std::iota(words.begin(), words.end(), first);
  return words;
}

template <class F>
std::string fault_of(const F& run) {
  try {
    run();
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

#define EXPECT_FAULT(statement, sentence)                        \
  do {                                                           \
    const std::string fault = fault_of([&] { statement; });      \
    EXPECT_NE(fault.find(sentence), std::string::npos) << fault; \
  } while (false)

/// A kernel with an array of shared memory and an mbarrier, their addresses in %r2 and %r3. %r1 is
/// the thread, %r4 the rank; %p1 holds in all threads but the first. %rd1 and %rd2 are the
/// parameters, %rd4 and %rd5 the words of this thread there, %r6 its word of the array.
std::string kernel(const std::string& body) {
  return R"(.visible .entry test(.param .u64 out, .param .u64 in) {
.reg .pred %p<10>;
.reg .b16 %h<4>;
.reg .b32 %r<30>;
.reg .b64 %rd<20>;
.shared .align 1024 .b8 box[16384];
.shared .align 8 .b8 full[16];
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [in];
mov.u32 %r1, %tid.x;
mov.u32 %r2, box;
mov.u32 %r3, full;
mov.u32 %r4, %cluster_ctarank;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd5, %rd2, %rd3;
mov.u32 %r7, %ctaid.x;
mov.u32 %r8, %ntid.x;
mad.lo.u32 %r7, %r7, %r8, %r1;
mul.wide.u32 %rd3, %r7, 4;
add.s64 %rd4, %rd1, %rd3;
shl.b32 %r5, %r1, 2;
add.s32 %r6, %r2, %r5;
setp.ne.u32 %p1, %r1, 0;
)" + body +
         "ret;\n}\n";
}

/// Waits for phase 0 of the mbarrier.
constexpr const char* kWait = R"(
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra $wait;
)";

constexpr const char* kInit = R"(
@%p1 bra $ready;
mbarrier.init.shared::cta.b64 [%r3], 1;
$ready:
bar.sync 0;
)";

constexpr const char* kStoreWord = R"(
ld.shared.u32 %r9, [%r6];
st.global.u32 [%rd4], %r9;
)";

constexpr const char* kClusterSync = R"(
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
)";

/// Runs `body` with `in`, and returns an output of as many words as there are threads.
Words run(const std::string& body, const Words& in, const BenchShape& shape = {},
          std::uint64_t seed = 1) {
  Arrays memory;
  const std::uint32_t* source = memory.add(in);
  const std::size_t threads = shape.grid.count() * shape.block.count();
  std::uint32_t* out = memory.add(Words(threads, kUntouched));
  run_kernel(kernel(body), shape, memory, {word_of(out), word_of(source)}, seed);
  return {out, out + threads};
}

/// Whether `body` gives `expected`, and no fault, for every seed.
bool is_always(const std::string& body, const Words& in, const Words& expected,
               const BenchShape& shape = {}) {
  for (int seed = 1; seed <= kSeeds; ++seed) {
    try {
      if (run(body, in, shape, seed) != expected) return false;
    } catch (const Fault&) {
      return false;
    }
  }
  return true;
}

// cp.async.

TEST(AsyncCopy, GroupsFinishInOrder) {
  const std::string body = R"(
cp.async.ca.shared.global [%r6], [%rd5], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r6+128], [%rd5+128], 4;
cp.async.commit_group;
cp.async.wait_group 1;
)";
  EXPECT_TRUE(is_always(body + kStoreWord, numbered(64), numbered(32)));
  // The second group may still be on its way.
  EXPECT_FALSE(is_always(body + "ld.shared.u32 %r9, [%r6+128];\nst.global.u32 [%rd4], %r9;\n",
                         numbered(64), numbered(32, 32)));
}

TEST(AsyncCopy, AMissingWaitIsNoticed) {
  const std::string copy = "cp.async.ca.shared.global [%r6], [%rd5], 4;\n";
  EXPECT_TRUE(is_always(copy + "cp.async.wait_all;\n" + kStoreWord, numbered(32), numbered(32)));
  EXPECT_FALSE(is_always(copy + kStoreWord, numbered(32), numbered(32)));
}

TEST(AsyncCopy, ZerosReplaceIgnoredSources) {
  Words expected = numbered(32);
  for (std::uint32_t i = 0; i < 32; i += 2) expected[i] = 0;
  const std::string select = "and.b32 %r8, %r1, 1;\nsetp.eq.u32 %p3, %r8, 0;\n";
  const std::string wait = std::string("cp.async.wait_all;\n") + kStoreWord;
  EXPECT_TRUE(is_always(select + "cp.async.ca.shared.global [%r6], [%rd5], 4, %p3;\n" + wait,
                        numbered(32), expected));
  EXPECT_TRUE(is_always(
      select + "selp.b32 %r8, 0, 4, %p3;\ncp.async.ca.shared.global [%r6], [%rd5], 4, %r8;\n" +
          wait,
      numbered(32), expected));
  // An ignored source need not exist.
  EXPECT_EQ(run("setp.eq.u32 %p3, %r1, %r1;\n"
                "cp.async.ca.shared.global [%r6], [%rd5+4096], 4, %p3;\n" +
                    wait,
                numbered(32)),
            Words(32, 0));
}

/// Warp 0 copies and arrives, warp 1 waits and reads what warp 0 has copied.
std::string copies_for_another_warp(const std::string& arrive) {
  return R"(
@%p1 bra $ready;
mbarrier.init.shared::cta.b64 [%r3], 32;
$ready:
bar.sync 0;
setp.gt.u32 %p4, %r1, 31;
@%p4 bra $wait;
shl.b32 %r8, %r1, 4;
add.s32 %r8, %r8, %r2;
mul.wide.u32 %rd6, %r1, 16;
add.s64 %rd6, %rd6, %rd2;
cp.async.cg.shared.global [%r8], [%rd6], 16;
)" + arrive +
         R"(
bra.uni $end;
)" + kWait +
         R"(
ld.shared.u32 %r9, [%r6];
st.global.u32 [%rd4], %r9;
$end:
)";
}

TEST(AsyncCopy, ArrivalsFollowTheCopiesOfTheirThread) {
  constexpr BenchShape kTwoWarps{.block = {64, 1, 1}};
  Words expected(32, kUntouched);
  const Words second = numbered(32, 32);
  expected.insert(expected.end(), second.begin(), second.end());
  for (const char* name : {"shared::cta.b64 [%r3];\n", "shared.b64 [%r3];\n"}) {
    const std::string arrive = std::string("cp.async.mbarrier.arrive.noinc.") + name;
    for (int seed = 1; seed <= kSeeds; ++seed) {
      EXPECT_EQ(run(copies_for_another_warp(arrive), numbered(128), kTwoWarps, seed), expected);
    }
  }
  // Arrivals of the threads themselves do not wait for the copies.
  const std::string early = "mbarrier.arrive.shared::cta.b64 _, [%r3];\n";
  EXPECT_FALSE(is_always(copies_for_another_warp(early), numbered(128), expected, kTwoWarps));
}

TEST(AsyncCopy, FaultsName) {
  EXPECT_FAULT(run("cp.async.ca.shared.global [%r6+2], [%rd5], 4;\n", numbered(32)), "multiple");
  EXPECT_FAULT(run("cp.async.ca.shared.global [%r6], [%rd5+128], 4;\n", numbered(32)),
               "out of bounds");
  EXPECT_FAULT(run("cp.async.ca.shared.global [%r6+65536], [%rd5], 4;\n", numbered(32)),
               "shared memory");
  EXPECT_FAULT(run("cp.async.cg.shared.global [%r6], [%rd5], 4;\n", numbered(32)), "4 bytes");
}

// cp.async.bulk of blocks, and st.async.

const std::string kBulkLoad = std::string(kInit) + R"(
@%p1 bra $issued;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2], 128, [%r3];
$issued:
bar.sync 0;
)";

TEST(BulkCopy, LoadsCompleteAtTheirMbarrier) {
  EXPECT_TRUE(is_always(kBulkLoad + kWait + kStoreWord, numbered(32), numbered(32)));
  EXPECT_FALSE(is_always(kBulkLoad + kStoreWord + kWait, numbered(32), numbered(32)));
}

/// Stores a word of each thread by a bulk copy, then overwrites it.
std::string bulk_store(const std::string& wait) {
  return R"(
st.shared.u32 [%r6], %r1;
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra $issued;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 128;
cp.async.bulk.commit_group;
)" + wait +
         R"(
$issued:
bar.sync 0;
mov.u32 %r9, 7;
st.shared.u32 [%r6], %r9;
bar.sync 0;
@%p1 bra $end;
cp.async.bulk.wait_group 0;
$end:
)";
}

TEST(BulkCopy, StoresReadSharedMemoryUntilTheyAreWaitedFor) {
  EXPECT_TRUE(is_always(bulk_store("cp.async.bulk.wait_group.read 0;\n"), {}, numbered(32)));
  EXPECT_FALSE(is_always(bulk_store(""), {}, numbered(32)));
}

TEST(BulkCopy, ACtaMayNotEndBeforeItsCopies) {
  const std::string store =
      "@%p1 bra $end;\n"
      "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 128;\n$end:\n";
  EXPECT_FAULT(run(store, {}), "has ended");
  EXPECT_FAULT(run(kBulkLoad, numbered(32)), "has ended");
}

TEST(BulkCopy, WordsAndBlocksReachTheOtherCta) {
  constexpr BenchShape kPair{.grid = {2, 1, 1}, .cluster = {2, 1, 1}};
  // Both CTAs send 112 bytes to each other, and a word behind them.
  const std::string body = std::string(kInit) + R"(
add.s32 %r7, %r1, 100;
mad.lo.s32 %r7, %r4, 1000, %r7;
st.shared.u32 [%r6+1024], %r7;
fence.proxy.async.shared::cta;
)" + kClusterSync + R"(
@%p1 bra $wait;
xor.b32 %r10, %r4, 1;
mapa.shared::cluster.u32 %r11, %r2, %r10;
mapa.shared::cluster.u32 %r12, %r3, %r10;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 116;
add.s32 %r13, %r2, 1024;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r11], [%r13], 112, [%r12];
st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r11+112], %r4, [%r12];
)" + kWait + kStoreWord + kClusterSync;
  for (int seed = 1; seed <= kSeeds; ++seed) {
    const Words out = run(body, {}, kPair, seed);
    for (std::uint32_t cta = 0; cta < 2; ++cta) {
      const std::uint32_t other = 1 - cta;
      for (std::uint32_t i = 0; i < 28; ++i) EXPECT_EQ(out[32 * cta + i], 1000 * other + 100 + i);
      EXPECT_EQ(out[32 * cta + 28], other);
    }
  }
  std::string odd = body;
  odd.replace(odd.find("112, [%r12]"), 3, "124");
  EXPECT_FAULT(run(odd, {}, kPair), "124, which is no multiple of 16");
}

// Tensors.

struct Matrix {
  int rows = 0;
  int columns = 0;
  Elements elements;

  Matrix(int rows, int columns, std::uint16_t first)
      : rows(rows), columns(columns), elements(static_cast<std::size_t>(rows) * columns) {
    std::iota(elements.begin(), elements.end(), first);
  }
  /// 0 outside.
  std::uint16_t at(int row, int column) const {
    if (row < 0 || row >= rows || column < 0 || column >= columns) return 0;
    return elements[static_cast<std::size_t>(row) * columns + column];
  }
};

struct BoxShape {
  int columns;
  int rows;
  CUtensorMapSwizzle swizzle;
};

CUresult encode(void* base, const Matrix& m, const BoxShape& box, CUtensorMap* map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(m.columns) * 2};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box.columns),
                              static_cast<cuuint32_t>(box.rows)};
  const cuuint32_t steps[] = {1, 1};
  return cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, sizes, strides,
                                boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, box.swizzle,
                                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/// The tensor map in memory that a kernel may read.
std::uint64_t add_map(Arrays& memory, const CUtensorMap& map) {
  std::byte* at = memory.add(sizeof map);
  std::memcpy(at, &map, sizeof map);
  return word_of(at);
}

/// Loads a box, copies the shared memory to `raw`, and stores the box into another tensor.
constexpr const char* kBoxKernel = R"(
.visible .entry test(.param .u64 from, .param .u64 to, .param .u64 raw, .param .u32 x,
                     .param .u32 y, .param .u32 bytes) {
.reg .pred %p<10>;
.reg .b32 %r<20>;
.reg .b64 %rd<10>;
.shared .align 1024 .b8 box[16384];
.shared .align 8 .b8 full[8];
ld.param.u64 %rd1, [from];
ld.param.u64 %rd2, [to];
ld.param.u64 %rd3, [raw];
ld.param.u32 %r5, [x];
ld.param.u32 %r6, [y];
ld.param.u32 %r4, [bytes];
mov.u32 %r1, %tid.x;
mov.u32 %r2, box;
mov.u32 %r3, full;
setp.ne.u32 %p1, %r1, 0;
@%p1 bra $ready;
mbarrier.init.shared::cta.b64 [%r3], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], %r4;
prefetch.tensormap [%rd1];
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r5, %r6}], [%r3];
$ready:
bar.sync 0;
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
@!%p2 bra $wait;
shl.b32 %r7, %r1, 2;
$raw:
setp.ge.u32 %p3, %r7, %r4;
@%p3 bra $copied;
add.s32 %r8, %r2, %r7;
ld.shared.u32 %r9, [%r8];
cvt.u64.u32 %rd4, %r7;
add.s64 %rd4, %rd4, %rd3;
st.global.u32 [%rd4], %r9;
add.s32 %r7, %r7, 128;
bra.uni $raw;
$copied:
@%p1 bra $end;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd2, {%r5, %r6}], [%r2];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
$end:
ret;
}
)";

/// The chunk of 16 bytes in which chunk `chunk` of row `row` of a box lies.
int chunk_of(int row, int chunk, CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return chunk ^ row % 8;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return chunk ^ row / 2 % 4;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return chunk ^ row / 4 % 2;
    default:
      return chunk;
  }
}

class TensorCopy : public testing::TestWithParam<std::tuple<BoxShape, std::array<int, 2>>> {};

TEST_P(TensorCopy, RoundTrip) {
  const auto [box, at] = GetParam();
  const auto [x, y] = at;
  const Matrix source(50, 72, 1);
  Matrix target(50, 72, 0);
  std::fill(target.elements.begin(), target.elements.end(), 0xeeee);
  Arrays memory;
  CUtensorMap from;
  CUtensorMap to;
  std::uint16_t* stored = memory.add(target.elements);
  ASSERT_EQ(encode(memory.add(source.elements), source, box, &from), CUDA_SUCCESS);
  ASSERT_EQ(encode(stored, target, box, &to), CUDA_SUCCESS);
  const std::size_t count = static_cast<std::size_t>(box.rows) * box.columns;
  auto* raw = reinterpret_cast<std::uint16_t*>(memory.add(count * 2));
  run_kernel(kBoxKernel, {}, memory,
             {add_map(memory, from), add_map(memory, to), word_of(raw),
              static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(y), count * 2});
  for (int r = 0; r < box.rows; ++r) {
    for (int c = 0; c < box.columns; ++c) {
      const int place = r * box.columns + chunk_of(r, c / 8, box.swizzle) * 8 + c % 8;
      ASSERT_EQ(raw[place], source.at(y + r, x + c)) << "row " << r << ", column " << c;
    }
  }
  for (int r = 0; r < target.rows; ++r) {
    for (int c = 0; c < target.columns; ++c) {
      const bool is_inside = r >= y && r < y + box.rows && c >= x && c < x + box.columns;
      ASSERT_EQ(stored[r * target.columns + c], is_inside ? source.at(r, c) : 0xeeee);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Boxes, TensorCopy,
    testing::Combine(testing::Values(BoxShape{64, 32, CU_TENSOR_MAP_SWIZZLE_128B},
                                     BoxShape{32, 24, CU_TENSOR_MAP_SWIZZLE_64B},
                                     BoxShape{16, 24, CU_TENSOR_MAP_SWIZZLE_32B},
                                     BoxShape{40, 10, CU_TENSOR_MAP_SWIZZLE_NONE}),
                     testing::Values(std::array{0, 0}, std::array{5, 3}, std::array{65, 45},
                                     std::array{-7, -2}, std::array{72, 0}, std::array{0, -32})));

/// Stores only the first rows of a box, as the kernels do: rows after them belong to another tile.
/// The map has one more dimension, and its base lies before the allocation, so that the tensor ends
/// where the rows end.
TEST(TensorStore, RaggedRowsEndWhereTheTensorEnds) {
  constexpr int kCapacity = 20;
  constexpr int kWidth = 16;
  constexpr int kBoxRows = 8;
  constexpr int kFirst = 3;
  constexpr int kEnd = 7;
  Arrays memory;
  std::uint16_t* rows = memory.add(Elements(kCapacity * kWidth, 0xeeee));
  CUtensorMap map;
  const cuuint64_t row_bytes = kWidth * 2;
  const cuuint64_t sizes[] = {kWidth, 1, kCapacity, kCapacity + 1};
  const cuuint64_t strides[] = {16, row_bytes, row_bytes};
  const cuuint32_t boxes[] = {kWidth, 1, kBoxRows, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  void* base = reinterpret_cast<void*>(word_of(rows) - kCapacity * row_bytes);
  ASSERT_EQ(
      cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, base, sizes, strides, boxes,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      CUDA_SUCCESS);
  const std::string body = R"(
shl.b32 %r7, %r1, 3;
add.s32 %r7, %r7, %r2;
mov.u32 %r8, 0x00050005;
st.shared.v2.u32 [%r7], {%r8, %r8};
fence.proxy.async.shared::cta;
bar.sync 0;
@%p1 bra $end;
mov.u32 %r9, 0;
mov.u32 %r10, ROW;
mov.u32 %r11, END;
cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd2, {%r9, %r9, %r10, %r11}], [%r2];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
$end:
)";
  std::string text = kernel(body);
  text.replace(text.find("ROW"), 3, std::to_string(kCapacity + kFirst - kEnd));
  text.replace(text.find("END"), 3, std::to_string(kEnd));
  run_kernel(text, {}, memory, {0, add_map(memory, map)});
  for (int r = 0; r < kCapacity; ++r) {
    const int expected = r >= kFirst && r < kEnd ? 5 : 0xeeee;
    for (int c = 0; c < kWidth; ++c) ASSERT_EQ(rows[r * kWidth + c], expected) << r << ", " << c;
  }
}

/// Each of two CTAs loads half of the rows for both CTAs. Each CTA waits for all rows and writes
/// its words.
TEST(TensorLoad, MulticastReachesEveryCta) {
  constexpr int kRows = 4;
  const Matrix source(2 * kRows, 64, 1);
  const std::string body = std::string(kInit) + kClusterSync + R"(
@%p1 bra $wait;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
mov.u16 %h1, 3;
mov.u32 %r9, 0;
shl.b32 %r10, %r4, 2;
shl.b32 %r11, %r4, 9;
add.s32 %r11, %r11, %r2;
cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r11], [%rd2, {%r9, %r10}], [%r3], %h1;
)" + kWait + R"(
mad.lo.s32 %r12, %r4, 1024, %r5;
cvt.u64.u32 %rd6, %r12;
add.s64 %rd6, %rd6, %rd1;
mov.u32 %r13, 0;
$copy:
ld.shared.u32 %r14, [%r6];
st.global.u32 [%rd6], %r14;
add.s32 %r6, %r6, 128;
add.s64 %rd6, %rd6, 128;
add.s32 %r13, %r13, 1;
setp.lt.u32 %p5, %r13, 8;
@%p5 bra $copy;
)" + kClusterSync;
  Arrays memory;
  CUtensorMap map;
  const BoxShape box{64, kRows, CU_TENSOR_MAP_SWIZZLE_NONE};
  ASSERT_EQ(encode(memory.add(source.elements), source, box, &map), CUDA_SUCCESS);
  const std::size_t count = source.elements.size();
  auto* out = reinterpret_cast<std::uint16_t*>(memory.add(2 * count * 2));
  const BenchShape pair{.grid = {2, 1, 1}, .cluster = {2, 1, 1}};
  for (int seed = 1; seed <= kSeeds; ++seed) {
    std::fill(out, out + 2 * count, 0);
    run_kernel(kernel(body), pair, memory, {word_of(out), add_map(memory, map)}, seed);
    for (int cta = 0; cta < 2; ++cta) {
      EXPECT_EQ(Elements(out + cta * count, out + (cta + 1) * count), source.elements) << cta;
    }
  }
}

TEST(TensorLoad, Faults) {
  const Matrix source(16, 64, 1);
  Arrays memory;
  CUtensorMap map;
  ASSERT_EQ(encode(memory.add(source.elements), source, {64, 8, CU_TENSOR_MAP_SWIZZLE_NONE}, &map),
            CUDA_SUCCESS);
  const std::uint64_t good = add_map(memory, map);
  CUtensorMap beyond;
  Matrix larger(17, 64, 1);
  ASSERT_EQ(
      encode(memory.add(source.elements), larger, {64, 8, CU_TENSOR_MAP_SWIZZLE_NONE}, &beyond),
      CUDA_SUCCESS);
  const std::uint64_t bad = add_map(memory, beyond);
  const auto load = [&](std::uint64_t at, int offset, int row) {
    const std::string text =
        kernel(std::string(kInit) + "@%p1 bra $end;\nmov.u32 %r9, 0;\n" + "mov.u32 %r10, " +
               std::to_string(row) + ";\n" +
               "cp.async.bulk.tensor.2d.shared::cluster.global."
               "mbarrier::complete_tx::bytes [%r2+" +
               std::to_string(offset) + "], [%rd2, {%r9, %r10}], [%r3];\n" + "$end:\n");
    run_kernel(text, {}, memory, {0, at});
  };
  EXPECT_FAULT(load(good, 16, 0), "no multiple of 128");
  EXPECT_FAULT(load(word_of(memory.add(1024)), 0, 0), "no tensor map");
  EXPECT_FAULT(load(bad, 0, 12), "out of bounds");
  EXPECT_FAULT(load(bad, 0, 4), "has ended");  // nobody waits; these rows are there
  const std::string three = kernel(
      "mov.u32 %r9, 0;\ncp.async.bulk.tensor.3d.global.shared::cta.bulk_group "
      "[%rd2, {%r9, %r9, %r9}], [%r2];\n");
  EXPECT_FAULT(run_kernel(three, {}, memory, {0, good}), "dimensions");
}

TEST(TensorMap, EncodingChecksWhatTheDriverChecks) {
  CUtensorMap map;
  const Matrix m(16, 64, 0);
  void* base = reinterpret_cast<void*>(0x1000);
  const auto swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  EXPECT_EQ(encode(base, m, {64, 8, swizzle}, &map), CUDA_SUCCESS);
  EXPECT_EQ(encode(nullptr, m, {64, 8, swizzle}, &map), CUDA_SUCCESS);
  EXPECT_EQ(encode(base, m, {64, 8, swizzle}, nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(reinterpret_cast<void*>(0x1008), m, {64, 8, swizzle}, &map),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, m, {128, 8, swizzle}, &map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, m, {64, 257, swizzle}, &map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, m, {64, 0, swizzle}, &map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, m, {4, 8, CU_TENSOR_MAP_SWIZZLE_NONE}, &map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, Matrix(16, 60, 0), {8, 8, CU_TENSOR_MAP_SWIZZLE_NONE}, &map),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, Matrix(0, 64, 0), {64, 8, swizzle}, &map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, m, {32, 8, swizzle}, &map), CUDA_ERROR_NOT_SUPPORTED);
}

}  // namespace
}  // namespace sonicmoe::emulator
