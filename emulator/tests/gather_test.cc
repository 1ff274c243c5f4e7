// cp.async.bulk.tensor with tile::gather4 and with cta_group::2, by PTX ISA 9.7.9.25 and 5.5.3.
#include <cuda.h>
#include <gtest/gtest.h>

#include <array>

#include "kernel_fixture.h"
#include "tensor_copy.h"

namespace sonicmoe::emulator {
namespace {

constexpr Target kTarget{100, false, true};
constexpr int kRows = 10, kRowElements = 64;
constexpr std::uint32_t kBytes = 4 * 128;

/// Two CTAs of 32 threads. Lane 0 of each gathers four rows to its shared memory. %r3: the CTA's
/// mbarrier; %r4: that of CTA 0. Each CTA then stores its 512 bytes.
std::string kernel(const std::string& gather) {
  return R"(.visible .entry test(.param .u64 map, .param .u64 out, .param .u64 column,
                     .param .u64 row0, .param .u64 row1, .param .u64 row2, .param .u64 row3) {
.reg .pred %p<6>;
.reg .b32 %r<30>;
.reg .b64 %rd<10>;
.shared .align 1024 .b8 data[1024];
.shared .align 8 .b64 barrier;
ld.param.u64 %rd1, [map];
ld.param.u64 %rd2, [out];
ld.param.u32 %r10, [column];
ld.param.u32 %r11, [row0];
ld.param.u32 %r12, [row1];
ld.param.u32 %r13, [row2];
ld.param.u32 %r14, [row3];
mov.u32 %r1, %tid.x;
mov.u32 %r5, %cluster_ctarank;
mov.u32 %r2, data;
mov.u32 %r3, barrier;
mov.u32 %r6, 0;
setp.eq.u32 %p1, %r1, 0;
setp.eq.u32 %p3, %r5, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 1;
mapa.shared::cluster.u32 %r4, %r3, %r6;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
)" + gather +
         R"(
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
shl.b32 %r7, %r1, 4;
add.s32 %r8, %r7, %r2;
mul.wide.u32 %rd3, %r5, 512;
cvt.u64.u32 %rd4, %r7;
add.s64 %rd2, %rd2, %rd3;
add.s64 %rd2, %rd2, %rd4;
ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r8];
st.global.v4.u32 [%rd2], {%r20, %r21, %r22, %r23};
ret;
}
)";
}

const std::string kOpcode =
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes";
const std::string kFrom = " [%r2], [%rd1, {%r10, %r11, %r12, %r13, %r14}], ";
const std::string kWait =
    "$wait:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;\n@!%p2 bra $wait;\n";
/// Each CTA for itself.
const std::string kOwn = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;\n@%p1 " +
                         kOpcode + kFrom + "[%r3];\n" + kWait;
/// Both count at the mbarrier of CTA 0.
const std::string kPair =
    "and.pred %p4, %p1, %p3;\n@%p4 mbarrier.arrive.expect_tx.shared.b64 _, "
    "[%r3], 1024;\n@%p1 " +
    kOpcode + ".cta_group::2" + kFrom + "[%r4];\n@!%p3 bra $end;\n" + kWait + "$end:\n";

std::uint16_t element(int row, int column) {
  return static_cast<std::uint16_t>(100 * row + column);
}

struct Tensor {
  Arrays memory;
  std::byte* map;
  std::uint16_t* out;

  /// Elements of one or two bytes.
  explicit Tensor(CUtensorMapSwizzle swizzle, std::uint32_t box_rows = 1,
                  std::uint32_t element_bytes = 2) {
    std::vector<std::uint16_t> values;
    for (int i = 0; i < kRows * kRowElements; ++i) {
      values.push_back(element(i / kRowElements, i % kRowElements));
    }
    alignas(64) CUtensorMap encoded;
    const cuuint32_t row = 2 * kRowElements / element_bytes;
    const cuuint64_t sizes[] = {row, kRows};
    const cuuint64_t strides[] = {2 * kRowElements};
    const cuuint32_t boxes[] = {row, box_rows};
    const auto type =
        element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const cuuint32_t steps[] = {1, 1};
    EXPECT_EQ(
        cuTensorMapEncodeTiled(&encoded, type, 2, memory.add(values), sizes, strides, boxes, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        CUDA_SUCCESS);
    map = memory.add(sizeof encoded);
    std::memcpy(map, &encoded, sizeof encoded);
    out = memory.add(std::vector<std::uint16_t>(kBytes));
  }
  void run(const std::string& gather, int column, const std::array<int, 4>& rows,
           std::uint64_t seed = 1, bool may_overlap = false) {
    std::vector<std::uint64_t> parameters{word_of(map), word_of(out),
                                          static_cast<std::uint64_t>(column)};
    for (const int row : rows) parameters.push_back(static_cast<std::uint64_t>(row));
    run_kernel(kernel(gather),
               {.grid = {2, 1, 1},
                .block = {32, 1, 1},
                .cluster = {2, 1, 1},
                .target = kTarget,
                .may_overlap = may_overlap},
               memory, parameters, seed);
  }
};

void expect_rows(const std::string& gather, int column, const std::array<int, 4>& rows,
                 CUtensorMapSwizzle swizzle, std::uint32_t span) {
  Tensor tensor(swizzle);
  tensor.run(gather, column, rows);
  for (std::uint32_t cta = 0; cta < 2; ++cta) {
    for (std::uint32_t byte = 0; byte < kBytes; byte += 2) {
      const int row = rows[byte / 128];
      const int at = column + static_cast<int>(byte % 128) / 2;
      const bool is_inside = row >= 0 && row < kRows && at >= 0 && at < kRowElements;
      EXPECT_EQ(tensor.out[(cta * kBytes + swizzled(byte, span)) / 2],
                is_inside ? element(row, at) : 0)
          << row << " " << at;
    }
  }
}

TEST(Gather, FourRows) {
  for (const std::string& gather : {kOwn, kPair}) {
    expect_rows(gather, 0, {3, 0, 9, 3}, CU_TENSOR_MAP_SWIZZLE_128B, 128);
    expect_rows(gather, 0, {2, 1, 0, 5}, CU_TENSOR_MAP_SWIZZLE_NONE, 0);
  }
}

TEST(Gather, RowsAndColumnsOutsideAreZeros) {
  expect_rows(kOwn, 0, {-1, 10, 4, 1 << 30}, CU_TENSOR_MAP_SWIZZLE_128B, 128);
  expect_rows(kPair, 16, {-1, -1, -1, 9}, CU_TENSOR_MAP_SWIZZLE_128B, 128);
  expect_rows(kOwn, -8, {7, -1, 8, 0}, CU_TENSOR_MAP_SWIZZLE_128B, 128);
}

TEST(Gather, RowsOfBytes) {
  const std::array<int, 4> rows{5, -1, 9, 2};
  constexpr int kColumn = 32;  // byte
  Tensor tensor(CU_TENSOR_MAP_SWIZZLE_128B, 1, 1);
  tensor.run(kPair, kColumn, rows);
  for (std::uint32_t byte = 0; byte < kBytes; byte += 2) {
    const int row = rows[byte / 128], at = (kColumn + static_cast<int>(byte % 128)) / 2;
    EXPECT_EQ(tensor.out[swizzled(byte, 128) / 2],
              row >= 0 && at < kRowElements ? element(row, at) : 0);
  }
}

void expect_fault(const std::string& gather, const char* sentence, std::uint32_t box_rows = 1) {
  Tensor tensor(CU_TENSOR_MAP_SWIZZLE_128B, box_rows);
  try {
    tensor.run(gather, 0, {1, 2, 3, 4});
    ADD_FAILURE() << "no fault: " << sentence;
  } catch (const Fault& fault) {
    EXPECT_NE(std::string(fault.what()).find(sentence), std::string::npos) << fault.what();
  }
}

TEST(Gather, Faults) {
  expect_fault(kOwn, "boxes of one row", 8);
  expect_fault("add.s32 %r2, %r2, 64;\n" + kOwn, "the target of gather4 is 64");
  expect_fault("@%p1 " + kOpcode + " [%r2], [%rd1, {%r10, %r11, %r12}], [%r3];\n",
               "another number of coordinates");
  // Without cta_group::2 the mbarrier is that of the target's CTA.
  expect_fault("@%p1 " + kOpcode + kFrom + "[%r4];\n", "in different CTAs");
  // Nobody waits: the CTA reads what the copy writes.
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    Tensor tensor(CU_TENSOR_MAP_SWIZZLE_128B);
    const std::string late = kOwn.substr(0, kOwn.size() - kWait.size());
    EXPECT_THROW(tensor.run(late, 0, {1, 2, 3, 4}, seed), Fault);
  }
}

/// A kernel that may begin beside the previous one waits before it loads, or loads after a fence
/// and waits before it ends.
TEST(Gather, EarlyLoadsNeedAFence) {
  const auto run = [](const std::string& before, const std::string& after) {
    Tensor tensor(CU_TENSOR_MAP_SWIZZLE_128B);
    tensor.run(before + kOwn + after, 0, {1, 2, 3, 4}, 1, true);
  };
  const std::string wait = "griddepcontrol.wait;\n", fence = "fence.proxy.async;\n";
  EXPECT_NO_THROW(run(wait, ""));
  EXPECT_NO_THROW(run(fence, wait));
  EXPECT_THROW(run(fence, ""), Fault);
  for (const char* before : {"", "griddepcontrol.launch_dependents;\n", "fence.acq_rel.gpu;\n"}) {
    EXPECT_THROW(run(before, wait), Fault) << before;
  }
}

}  // namespace
}  // namespace sonicmoe::emulator
