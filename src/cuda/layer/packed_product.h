// Row products with packed weights. An engine may unpack them inside the product. Otherwise memory
// holds the unpacked weights of some experts only, and a product is computed for one range of
// experts after the other. Rows of different experts have nothing in common, so the bits are those
// of one product with all unpacked weights.
#pragma once

#include "cuda/layer/product.h"
#include "cuda/packed/unpack.h"

namespace sonicmoe::cuda {

/// The packed weights of a pass, and memory for the tile records of a range of experts.
struct PackedPass {
  const PackedLayer* weights = nullptr;  ///< null: the weights of the pass are unpacked
  RangeLists lists{};
};

/// `product.weights` is memory for the weights of as many experts as its tensors have.
struct PackedProduct {
  RowProduct product;
  const PackedWeights* weights;
  RangeLists lists;
};

/// The memory of a PackedProduct's weights: gate and up are views of one tensor.
void* unpacked_memory(const WeightOperand& weights);

/// Lets the engine unpack inside the product if it can. Otherwise unpacks and multiplies range by
/// range. Nothing overlaps: hints about the start are ignored.
void multiply_packed(const Device& device, const PackedProduct& work, cudaStream_t stream);

}  // namespace sonicmoe::cuda
