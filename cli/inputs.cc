#include "inputs.h"

#include <new>
#include <random>

#include "core/check_tensor.h"
#include "core/numeric.h"

namespace sonicmoe::cli {
namespace {

void store(void* data, DType dtype, std::int64_t i, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[i] = value;
      break;
    case DType::kBF16:
      static_cast<BF16*>(data)[i] = to_bf16(single);
      break;
    case DType::kF16:
      static_cast<F16*>(data)[i] = to_f16(single);
      break;
    default:
      static_cast<float*>(data)[i] = single;
  }
}

std::int64_t count_of(const Tensor& t) {
  std::int64_t count = 1;
  for (std::int32_t i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

}  // namespace

Block::Block(std::int64_t bytes) : bytes_(bytes) {
  constexpr std::int64_t align = 256;  // what every backend accepts
  const std::int64_t whole = (std::max<std::int64_t>(bytes, 1) + align - 1) / align * align;
  data_.reset(std::aligned_alloc(align, static_cast<std::size_t>(whole)));
  if (data_ == nullptr) throw std::bad_alloc();
}

OwnedTensor::OwnedTensor(DType dtype, std::vector<std::int64_t> shape) {
  std::int64_t bytes = dtype_bytes(dtype);
  for (const std::int64_t n : shape) bytes = checks::product("a tensor in bytes", {bytes, n});
  block_ = Block(bytes);
  void* data = block_.data();
  view_ = shape.size() == 1   ? tensor1(data, dtype, shape[0])
          : shape.size() == 2 ? tensor2(data, dtype, shape[0], shape[1])
                              : tensor3(data, dtype, shape[0], shape[1], shape[2]);
}

void OwnedTensor::fill_normal(std::uint64_t seed, double scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const std::int64_t count = count_of(view_);
  for (std::int64_t i = 0; i < count; ++i) {
    store(view_.data, view_.dtype, i, static_cast<double>(normal(random)) * scale);
  }
}

OwnedTensor random_logits(const LayerShape& shape, DType dtype, double skew, std::uint64_t seed) {
  OwnedTensor logits(dtype, {shape.tokens, shape.experts});
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> fashion(static_cast<std::size_t>(shape.experts));
  for (double& v : fashion) v = skew * normal(random);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    for (std::int64_t e = 0; e < shape.experts; ++e) {
      store(logits.view().data, dtype, t * shape.experts + e,
            normal(random) + fashion[static_cast<std::size_t>(e)]);
    }
  }
  return logits;
}

}  // namespace sonicmoe::cli
