// The grouped GEMMs as operators. Rows past the last offset are not written, and callers must
// not read them.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "arguments.h"
#include "device_scope.h"
#include "sonicmoe/grouped_gemm.h"
#include "views.h"

namespace sonicmoe_torch {

#define SONICMOE_GROUPED_GEMM(ARGUMENT)          \
  ARGUMENT(Array, a)                             \
  ARGUMENT(Array, b)                             \
  ARGUMENT(Array, offsets)     /* (E+1) int64 */ \
  ARGUMENT(MaybeArray, gather) /* (R) int32: rows of a */
struct GroupedGemmCall {
  SONICMOE_ARGUMENTS(SONICMOE_GROUPED_GEMM)
};

/// a (rows, k), b (E, n, k) -> (R, n)
inline Array grouped_gemm(GroupedGemmCall& call) {
  const DeviceScope device(call.a);
  expect_rank(call.a, 2, "a");
  expect_rank(call.b, 3, "b");
  const Array a = readable_rows(call.a, "a");
  const std::int64_t rows = call.gather ? call.gather->size(0) : a.size(0);
  const Array d = empty(a, {rows, call.b.size(1)}, a.scalar_type());
  sonicmoe::GroupedGemm args;
  args.a = view(a, "a");
  args.b = view(call.b, "b");
  args.d = view(d, "d");
  args.offsets = view(call.offsets, "offsets");
  args.gather = view(call.gather, "gather");
  const Scratch scratch(a,
                        sonicmoe::grouped_gemm_scratch_bytes(rows, call.b.size(0), device.exec()));
  args.scratch = scratch.buffer();
  sonicmoe::grouped_gemm(args, device.exec());
  return d;
}

/// a (rows, m), b (R, n) -> (E, m, n); zero for experts without rows
inline Array grouped_gemm_k(GroupedGemmCall& call) {
  const DeviceScope device(call.a);
  expect_rank(call.a, 2, "a");
  expect_rank(call.b, 2, "b");
  expect_rank(call.offsets, 1, "offsets");
  if (call.offsets.size(0) == 0) {
    throw std::invalid_argument("offsets has no elements, must have E + 1");
  }
  const Array a = readable_rows(call.a, "a");
  const Array b = readable_rows(call.b, "b");
  const Array d = empty(a, {call.offsets.size(0) - 1, a.size(1), b.size(1)}, a.scalar_type());
  sonicmoe::GroupedGemmK args;
  args.a = view(a, "a");
  args.b = view(b, "b");
  args.d = view(d, "d");
  args.offsets = view(call.offsets, "offsets");
  args.gather = view(call.gather, "gather");
  const Scratch scratch(a,
                        sonicmoe::grouped_gemm_scratch_bytes(b.size(0), d.size(0), device.exec()));
  args.scratch = scratch.buffer();
  sonicmoe::grouped_gemm_k(args, device.exec());
  return d;
}

}  // namespace sonicmoe_torch
