#include "cuda/layer/steps.h"

#include "core/observer.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {
namespace {

struct Launcher {
  const PassContext& pass;
  const Device& device;
  cudaStream_t stream;

  void operator()(const BuildMetadata& w) const {
    build_metadata(device, pass.problem, w.routing, pass.metadata, w.work, stream);
  }
  void operator()(const BuildRowLists& w) const {
    make_row_lists(device, pass.problem, pass.metadata, w.weights, w.lists, w.dweights, stream);
  }
  void operator()(const QuantizeRows& w) const {
    device.engine->quantizers->rows(device, w, stream);
  }
  void operator()(const RowProduct& w) const { device.engine->multiply_rows(device, w, stream); }
  void operator()(const PackedProduct& w) const { multiply_packed(device, w, stream); }
  void operator()(const DepthProduct& w) const { device.engine->multiply_depth(device, w, stream); }
  void operator()(const TokenSum& w) const {
    if (w.start == Start::kIndependent) {
      sum_rows_beside(device, pass.problem, pass.metadata, w.rows, {w.out, w.ranks}, w.tokens,
                      w.beside, stream);
    } else {
      sum_rows(device, pass.problem, pass.metadata, w.rows, w.weights, {w.out, w.ranks}, w.tokens,
               stream);
    }
  }
  void operator()(const ScoreGrad& w) const {
    finish_scores(device, pass.problem, pass.metadata, w, stream);
  }
  void operator()(const ColumnSum& w) const { sum_columns(pass.problem, pass.metadata, w, stream); }
  void operator()(const CopyFactors& w) const { copy_factors(w, stream); }
  void operator()(const ClearRows& w) const { clear_rows(w.out, stream); }
};

}  // namespace

const RowProduct& add_product(const PassContext& pass, const char* name, const RowProduct& product,
                              PackedWeights PackedLayer::* weights, Steps& steps) {
  const PackedPass& packed = pass.packed;
  if (packed.weights == nullptr) return steps.add(name, product);
  return steps.add(name, PackedProduct{product, &(packed.weights->*weights), packed.lists}).product;
}

void clear_rows(const Tensor& out, cudaStream_t stream) {
  const std::int64_t element = dtype_bytes(out.dtype);
  check_cuda(cudaMemset2DAsync(out.data, out.stride[0] * element, 0, out.shape[1] * element,
                               out.shape[0], stream),
             "clearing the output");
}

void run(const Steps& steps, const PassContext& pass, const Device& device, const Exec& exec) {
  const Launcher launcher{pass, device, stream_of(exec)};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    observed(exec, steps[i].name, [&] { std::visit(launcher, steps[i].work); });
  }
}

}  // namespace sonicmoe::cuda
