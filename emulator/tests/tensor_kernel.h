// The text of kernels with tcgen05 by one CTA or a pair, for tests.
#pragma once

#include <string>

#include "matrix_fixture.h"

namespace sonicmoe::emulator {

inline const std::string kMeet = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
inline const std::string kAfter = "tcgen05.fence::after_thread_sync;\n";
inline const std::string kAddress = kAfter + "ld.shared.u32 %r6, [%r5];\n";
inline const std::string kDone =
    "$done:\nmbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0;\n@!%p4 bra $done;\n";

/// 128 threads in each CTA. Its image are the operands in its shared memory. %r2: the image; %r10:
/// rank; %r12: 128 rank + thread; %p1: warp 0; %p2: thread 0; %p3: false; %p6: thread 0 of the
/// leader, which is the CTA of rank 0; %p8: true; %r3: an mbarrier of one arrival; %r6: tensor
/// memory; %rd3, %rd4, %r9: the parameters a, b and shape; %rd10, %rd11: scales_a and scales_b.
struct TensorKernel {
  int ctas;
  int image_bytes;
  int allocated;    ///< columns
  int row_columns;  ///< that `out` has for each thread

  std::string group() const { return "cta_group::" + std::to_string(ctas); }
  std::string begin() const {
    return R"(.visible .entry test(.param .u64 image, .param .u64 out, .param .u64 a,
                     .param .u64 b, .param .u64 shape, .param .u64 scales_a, .param .u64 scales_b) {
.reg .pred %p<10>;
.reg .b32 %r<60>;
.reg .b64 %rd<20>;
.reg .b16 %h<2>;
.shared .align 1024 .b8 operands[)" +
           std::to_string(image_bytes) + R"(];
.shared .align 8 .b64 barrier;
.shared .align 4 .b32 place;
ld.param.u64 %rd1, [image];
ld.param.u64 %rd2, [out];
ld.param.u64 %rd3, [a];
ld.param.u64 %rd4, [b];
ld.param.u64 %rd6, [shape];
ld.param.u64 %rd10, [scales_a];
ld.param.u64 %rd11, [scales_b];
cvt.u32.u64 %r9, %rd6;
mov.u32 %r1, %tid.x;
mov.u32 %r10, %cluster_ctarank;
mov.u32 %r2, operands;
mov.u32 %r3, barrier;
mov.u32 %r5, place;
mov.b16 %h1, 3;
mul.wide.u32 %rd5, %r10, )" +
           std::to_string(image_bytes) + R"(;
add.s64 %rd1, %rd1, %rd5;
shl.b32 %r12, %r10, 7;
add.s32 %r12, %r12, %r1;
mul.wide.u32 %rd5, %r12, )" +
           std::to_string(4 * row_columns) + R"(;
add.s64 %rd2, %rd2, %rd5;
setp.lt.u32 %p1, %r1, 32;
setp.eq.u32 %p2, %r1, 0;
setp.ne.u32 %p3, %r1, %r1;
setp.eq.u32 %p6, %r12, 0;
setp.eq.u32 %p8, %r1, %r1;
@%p2 mbarrier.init.shared.b64 [%r3], 1;
)";
  }
  /// The CTA's image, by the generic proxy.
  std::string copy() const {
    return R"(
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
setp.lt.u32 %p5, %r14, )" +
           std::to_string(image_bytes) + ";\n@%p5 bra $copy;\nfence.proxy.async.shared::cta;\n";
  }
  std::string alloc() const {
    return "@%p1 tcgen05.alloc." + group() + ".sync.aligned.shared::cta.b32 [%r5], " +
           std::to_string(allocated) + ";\n@%p1 tcgen05.relinquish_alloc_permit." + group() +
           ".sync.aligned;\n";
  }
  /// Everything up to the product.
  std::string ready() const { return begin() + copy() + alloc() + kMeet + kAddress; }
  /// Arrives in all CTAs.
  std::string commit() const {
    return ctas == 1 ? "@%p6 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 "
                       "[%r3];\n"
                     : "@%p6 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster."
                       "multicast::cluster.b64 [%r3], %h1;\n";
  }
  std::string dealloc() const {
    return "@%p1 tcgen05.dealloc." + group() + ".sync.aligned.b32 %r6, " +
           std::to_string(allocated) + ";\n";
  }
  std::string free() const { return "tcgen05.fence::before_thread_sync;\n" + kMeet + dealloc(); }
  /// The first `columns` of all lanes, to `out`.
  static std::string store(int columns) { return kAfter + store_unfenced(columns); }
  static std::string store_unfenced(int columns) {
    std::string text = "and.b32 %r7, %r1, 96;\nshl.b32 %r7, %r7, 16;\nadd.s32 %r7, %r7, %r6;\n";
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
  static std::string end() { return "ret;\n}\n"; }

  BenchShape bench(Target target) const {
    const auto count = static_cast<std::uint32_t>(ctas);
    return {
        .grid = {count, 1, 1}, .block = {128, 1, 1}, .cluster = {count, 1, 1}, .target = target};
  }
};

}  // namespace sonicmoe::emulator
