#include "cuda/layer/packed_product.h"

#include <algorithm>

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {
namespace {

/// A tensor (E, ...) from expert `first` on; an absent one stays absent.
Tensor from_expert(Tensor t, const ExpertRange& range) {
  if (t.data == nullptr) return t;
  t.data = static_cast<std::byte*>(t.data) + range.first * t.stride[0] * dtype_bytes(t.dtype);
  t.shape[0] = range.count;
  return t;
}

void take_range(StoreOutput& e, const ExpertRange& range) { e.bias = from_expert(e.bias, range); }
void take_range(Activate& e, const ExpertRange& range) {
  e.bias_gate = from_expert(e.bias_gate, range);
  e.bias_up = from_expert(e.bias_up, range);
}
void take_range(ActivateGrad&, const ExpertRange&) {}

RowProduct product_of(const RowProduct& whole, const ExpertRange& range, const Metadata& lists) {
  RowProduct part = whole;
  part.groups.lists = &lists;
  part.groups.experts = range.count;
  part.groups.of_experts = whole.groups.experts;
  part.weights.first.shape[0] = range.count;
  part.weights.second.shape[0] = range.count;
  if (part.low_rank) {
    for (Tensor& outer : part.low_rank->outer) outer = from_expert(outer, range);
  }
  std::visit([&](auto& epilogue) { take_range(epilogue, range); }, part.epilogue);
  part.hints = {.tile_counter = whole.hints.tile_counter};
  return part;
}

}  // namespace

void* unpacked_memory(const WeightOperand& weights) {
  void* first = weights.first.data;
  void* second = weights.second.data;
  return second == nullptr ? first : std::min(first, second);
}

void multiply_packed(const Device& device, const PackedProduct& work, cudaStream_t stream) {
  const auto unpacking = device.engine->multiply_packed_rows;
  if (unpacking != nullptr && unpacking(device, work, stream)) return;
  const RowProduct& whole = work.product;
  const Tensor& first = whole.weights.first;
  void* memory = unpacked_memory(whole.weights);
  Metadata lists = *whole.groups.lists;
  lists.records = work.lists.records;
  lists.record_count = work.lists.record_count;
  const std::int64_t experts = whole.groups.experts;
  for (std::int64_t e = 0; e < experts; e += first.shape[0]) {
    const ExpertRange range{e, std::min(first.shape[0], experts - e)};
    take_records(*whole.groups.lists, range, work.lists, whole.hints.tile_counter, stream);
    unpack_experts(device, *work.weights, range, {memory, first.dtype}, stream);
    device.engine->multiply_rows(device, product_of(whole, range, lists), stream);
  }
}

}  // namespace sonicmoe::cuda
