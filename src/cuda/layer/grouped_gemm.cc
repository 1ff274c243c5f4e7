// Grouped GEMMs on CUDA: builds row lists from the offsets, then launches one product.
#include "cuda/layer/grouped_gemm.h"

#include "cuda/layer/checks.h"
#include "cuda/layer/steps.h"
#include "cuda/metadata/offsets.h"

namespace sonicmoe::cuda {
namespace {

void clear_matrices(const Tensor& d, cudaStream_t stream) {
  const bool last = d.stride[2] == 1;
  const std::int64_t lines = last ? d.shape[1] : d.shape[2];
  const std::int64_t width = last ? d.shape[2] : d.shape[1];
  const std::int64_t pitch = last ? d.stride[1] : d.stride[2];
  for (std::int64_t e = 0; e < d.shape[0]; ++e) {
    Tensor matrix =
        tensor2(static_cast<std::byte*>(d.data) + e * d.stride[0] * dtype_bytes(d.dtype), d.dtype,
                lines, width);
    matrix.stride[0] = pitch;
    clear_rows(matrix, stream);
  }
}

}  // namespace

std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts) {
  return offset_lists(nullptr, rows, experts).bytes;
}

void grouped_gemm(const GroupedGemm& args, const Exec& exec) {
  const Device& device = device_of(exec);
  const auto [a, b, d, offsets, gather, scratch] = args;
  const std::int64_t rows = d.shape[0];
  const std::int64_t experts = b.shape[0];
  check_product("a", a.dtype, {b.shape[1], b.shape[2]}, *device.engine);
  check_experts("E", experts);
  check_row_count("R", rows);
  check_rows("a", a);
  check_rows("d", d);
  check_matrices("b", b);
  if (rows == 0 || a.shape[0] == 0) return;
  const cudaStream_t stream = stream_of(exec);
  const OffsetLists lists = offset_lists(scratch.data, rows, experts);
  build_offset_lists(device, {offsets, gather, rows, experts, a.shape[0]}, lists, stream);
  const bool gathers = gather.data != nullptr;
  device.engine->multiply_rows(device,
                               {.dtype = a.dtype,
                                .groups = {&lists.groups, nullptr, experts, rows},
                                .rows = {a, gathers ? lists.index : nullptr},
                                .weights = {b, {}, WeightParts::kOne},
                                .epilogue = StoreOutput{.out = d},
                                .hints = {.tile_counter = gathers ? nullptr : lists.counters}},
                               stream);
}

void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec) {
  const Device& device = device_of(exec);
  const auto [a, b, d, offsets, gather, scratch] = args;
  const std::int64_t rows = b.shape[0];
  const std::int64_t experts = d.shape[0];
  check_product("a", a.dtype, {d.shape[1], d.shape[2]}, *device.engine);
  check_experts("E", experts);
  check_row_count("R", rows);
  check_rows("a", a);
  check_rows("b", b);
  check_matrices("d", d);
  const cudaStream_t stream = stream_of(exec);
  if (rows == 0 || a.shape[0] == 0) {
    clear_matrices(d, stream);
    return;
  }
  const OffsetLists lists = offset_lists(scratch.data, rows, experts);
  build_offset_lists(device, {offsets, gather, rows, experts, a.shape[0]}, lists, stream);
  device.engine->multiply_depth(device,
                                {.dtype = a.dtype,
                                 .groups = {&lists.groups, nullptr, experts, rows},
                                 .left = {a, gather.data != nullptr ? lists.index : nullptr},
                                 .right = b,
                                 .right_part = 0,
                                 .out = {d, {}},
                                 .parts = GradParts::kOne,
                                 .mode = GradMode::kWrite,
                                 .hints = {},
                                 .companion = Companion::kNone},
                                stream);
}

}  // namespace sonicmoe::cuda
