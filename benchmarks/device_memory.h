// Device memory of the benchmarks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/device/device.h"
#include "sonicmoe/types.h"

namespace sonicmoe::bench {

inline void must(cudaError_t status) { cuda::check_cuda(status, "a CUDA call of the benchmark"); }

/// Device memory of the current GPU, filled with zeros or with normally distributed bf16 values.
class Memory {
 public:
  explicit Memory(std::int64_t bytes) : bytes_(std::max<std::int64_t>(bytes, 256)) {
    must(cudaMalloc(&data_, static_cast<std::size_t>(bytes_)));
    must(cudaMemset(data_, 0, static_cast<std::size_t>(bytes_)));
  }
  Memory(std::int64_t count, double scale, unsigned seed = 7) : Memory(2 * count) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
    std::vector<std::uint16_t> values(1048573);  // a prime, so that rows do not repeat
    for (std::uint16_t& v : values) {
      const float f = normal(random);
      std::uint32_t word = 0;
      __builtin_memcpy(&word, &f, 4);
      v = static_cast<std::uint16_t>((word + 0x8000) >> 16);
    }
    upload(values);
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;

  /// Repeats `values` over the whole memory.
  template <class T>
  void upload(const std::vector<T>& values) {
    const auto size = static_cast<std::int64_t>(values.size() * sizeof(T));
    for (std::int64_t at = 0; at < bytes_; at += size) {
      must(cudaMemcpy(static_cast<char*>(data_) + at, values.data(),
                      static_cast<std::size_t>(std::min(size, bytes_ - at)),
                      cudaMemcpyHostToDevice));
    }
  }
  void* data() const { return data_; }
  Buffer buffer() const { return {data_, bytes_}; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace sonicmoe::bench
