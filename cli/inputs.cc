#include "inputs.h"

#include <algorithm>
#include <new>
#include <random>

#include "core/check_tensor.h"
#include "verify/convert.h"

namespace sonicmoe::cli {
namespace {

// Most random values that are generated for a tensor. A larger tensor repeats them. The number is
// odd, so that rows differ.
constexpr std::int64_t kDrawn = (1 << 22) - 1;

}  // namespace

Block::Block(const verify::Memory& memory, std::int64_t bytes) : bytes_(bytes) {
  data_ = {memory.allocate(std::max<std::int64_t>(bytes, 1)), memory.release};
  if (data_ == nullptr) throw std::bad_alloc();
}

OwnedTensor::OwnedTensor(const verify::Memory& memory, DType dtype, std::vector<std::int64_t> shape)
    : memory_(memory) {
  std::int64_t bytes = dtype_bytes(dtype);
  for (const std::int64_t n : shape) bytes = checks::product("a tensor in bytes", {bytes, n});
  block_ = Block(memory, bytes);
  void* data = block_.data();
  view_ = shape.size() == 1   ? tensor1(data, dtype, shape[0])
          : shape.size() == 2 ? tensor2(data, dtype, shape[0], shape[1])
                              : tensor3(data, dtype, shape[0], shape[1], shape[2]);
}

std::int64_t OwnedTensor::count() const { return oracle::element_count(view_); }

void OwnedTensor::fill(const std::vector<double>& values) {
  const std::int64_t element = dtype_bytes(view_.dtype);
  const auto drawn = static_cast<std::int64_t>(values.size());
  std::vector<std::uint8_t> image(static_cast<std::size_t>(drawn * element));
  for (std::int64_t i = 0; i < drawn; ++i) {
    oracle::store(image.data(), view_.dtype, i, values[static_cast<std::size_t>(i)]);
  }
  auto* to = static_cast<std::uint8_t*>(view_.data);
  for (std::int64_t at = 0; at < count(); at += drawn) {
    memory_.upload(to + at * element, image.data(), std::min(drawn, count() - at) * element);
  }
}

void OwnedTensor::fill_normal(std::uint64_t seed, double scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<double> values(static_cast<std::size_t>(std::min(count(), kDrawn)));
  for (double& v : values) v = static_cast<double>(normal(random)) * scale;
  fill(values);
}

OwnedTensor random_logits(const verify::Memory& memory, const LayerShape& shape, DType dtype,
                          double skew, std::uint64_t seed) {
  OwnedTensor logits(memory, dtype, {shape.tokens, shape.experts});
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> shifts(static_cast<std::size_t>(shape.experts));
  for (double& v : shifts) v = skew * normal(random);
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(shape.tokens * shape.experts));
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    for (const double shift : shifts) values.push_back(normal(random) + shift);
  }
  logits.fill(values);
  return logits;
}

}  // namespace sonicmoe::cli
