// Device memory for the tests: poisoned, with guards on both sides, freed by the destructor.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda/device/device.h"
#include "sonicmoe/types.h"

namespace sonicmoe::testing {

inline void must(cudaError_t status) { cuda::check_cuda(status, "a CUDA call of the test"); }

class DeviceArray {
 public:
  explicit DeviceArray(std::int64_t bytes, int poison = 0xff) : bytes_(bytes) {
    must(cudaMalloc(&base_, static_cast<std::size_t>(bytes + 2 * kGuard)));
    must(cudaMemset(base_, kPattern, static_cast<std::size_t>(bytes + 2 * kGuard)));
    fill(poison);
  }
  ~DeviceArray() {
    EXPECT_TRUE(intact()) << "memory beside an array was written, or no longer readable";
    cudaFree(base_);
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void* data() const { return static_cast<std::uint8_t*>(base_) + kGuard; }
  std::int64_t bytes() const { return bytes_; }
  Buffer buffer() const { return {data(), bytes_}; }
  void fill(int byte) {
    must(cudaMemset(data(), byte, static_cast<std::size_t>(bytes_)));
    wait();
  }
  template <class T>
  void set(const std::vector<T>& values) {
    ASSERT_EQ(static_cast<std::int64_t>(values.size() * sizeof(T)), bytes_);
    if (bytes_ == 0) return;
    must(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    wait();
  }
  template <class T = std::uint8_t>
  std::vector<T> get() const {
    std::vector<T> values(static_cast<std::size_t>(bytes_) / sizeof(T));
    if (bytes_ == 0) return values;
    must(cudaMemcpy(values.data(), data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

  /// Waits for the default stream: its calls may return early, and non-blocking streams do not wait
  /// for them.
  static void wait() { must(cudaStreamSynchronize(nullptr)); }

 private:
  static constexpr std::int64_t kGuard = 1024;
  static constexpr int kPattern = 0xa5;

  bool intact() const {
    for (const std::int64_t at : {std::int64_t{0}, kGuard + bytes_}) {
      std::vector<std::uint8_t> guard(kGuard);
      // A kernel's fault may have ended the context. A destructor that throws would end the
      // program.
      if (cudaMemcpy(guard.data(), static_cast<std::uint8_t*>(base_) + at, kGuard,
                     cudaMemcpyDeviceToHost) != cudaSuccess) {
        return false;
      }
      for (const std::uint8_t byte : guard) {
        if (byte != kPattern) return false;
      }
    }
    return true;
  }

  void* base_ = nullptr;
  std::int64_t bytes_;
};

}  // namespace sonicmoe::testing
