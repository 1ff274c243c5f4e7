// Owned tensors with random values, for the subcommands that run something.
#pragma once

#include <memory>
#include <vector>

#include "core/configs.h"
#include "sonicmoe/types.h"
#include "verify/implementation.h"

namespace sonicmoe::cli {

/// Memory of a backend, aligned as buffers must be.
class Block {
 public:
  Block() = default;
  Block(const verify::Memory& memory, std::int64_t bytes);
  Buffer buffer() const { return {data_.get(), bytes_}; }
  void* data() const { return data_.get(); }

 private:
  std::unique_ptr<void, std::function<void(void*)>> data_;
  std::int64_t bytes_ = 0;
};

/// A dense tensor that owns its elements; uninitialised until filled.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(const verify::Memory& memory, DType dtype, std::vector<std::int64_t> shape);
  const Tensor& view() const { return view_; }
  /// Its elements, copied to the host.
  template <class T>
  std::vector<T> read() const {
    std::vector<T> values(static_cast<std::size_t>(count()));
    memory_.download(values.data(), block_.data(), count() * static_cast<std::int64_t>(sizeof(T)));
    return values;
  }

  /// N(0, 1) * scale, rounded to the dtype; equal seeds give equal values. Large tensors repeat a
  /// block of values, because generating all of them would take longer than the measurement.
  void fill_normal(std::uint64_t seed, double scale);
  void fill(const std::vector<double>& values);

 private:
  std::int64_t count() const;

  verify::Memory memory_;
  Block block_;
  Tensor view_;
};

/// Logits ~ N(0, 1) (T, E). With a skew, every expert's logits are shifted by skew * N(0, 1), so
/// that some experts are chosen more often.
OwnedTensor random_logits(const verify::Memory& memory, const LayerShape& shape, DType dtype,
                          double skew, std::uint64_t seed);

}  // namespace sonicmoe::cli
