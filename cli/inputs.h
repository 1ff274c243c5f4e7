// Owned tensors with random values, for the subcommands that run something.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "core/configs.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Memory aligned as buffers must be.
class Block {
 public:
  Block() = default;
  explicit Block(std::int64_t bytes);
  Buffer buffer() const { return {data_.get(), bytes_}; }
  void* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  std::int64_t bytes_ = 0;
};

/// A dense tensor that owns its elements; uninitialised until filled.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(DType dtype, std::vector<std::int64_t> shape);
  const Tensor& view() const { return view_; }
  template <class T>
  const T* data() const {
    return static_cast<const T*>(block_.data());
  }

  /// N(0, 1) * scale, rounded to the dtype; equal seeds give equal values.
  void fill_normal(std::uint64_t seed, double scale);

 private:
  Block block_;
  Tensor view_;
};

/// Logits ~ N(0, 1) (T, E). With a skew, every expert's logits are shifted by skew * N(0, 1), so
/// that some experts are in fashion.
OwnedTensor random_logits(const LayerShape& shape, DType dtype, double skew, std::uint64_t seed);

}  // namespace sonicmoe::cli
