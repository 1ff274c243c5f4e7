// Buffers and inputs for the routing tests: poisoned, guarded, and awkward on purpose.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>

#include "core/numeric.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::testing {

/// `count` elements of a dtype between two guards. Starts as 0xFF (NaN, or -1 as an index).
class Guarded {
 public:
  Guarded(DType dtype, std::int64_t count)
      : dtype_(dtype),
        count_(count),
        size_(static_cast<std::size_t>(count * dtype_bytes(dtype) + 2 * kGuard)),
        bytes_(std::make_unique<unsigned char[]>(size_)) {
    for (std::size_t i = 0; i < size_; ++i) {
      bytes_[i] = i < kGuard || i >= size_ - kGuard ? kPattern : 0xFF;
    }
  }
  ~Guarded() { EXPECT_TRUE(intact()) << "a guard was overwritten"; }
  Guarded(const Guarded&) = delete;

  void* data() { return bytes_.get() + kGuard; }
  std::int64_t count() const { return count_; }
  /// Everything, guards included.
  std::span<unsigned char> all() { return {bytes_.get(), size_}; }
  Tensor vector() { return tensor1(data(), dtype_, count_); }
  Tensor matrix(std::int64_t rows, std::int64_t columns) {
    return tensor2(data(), dtype_, rows, columns);
  }
  Buffer buffer() { return {data(), count_ * dtype_bytes(dtype_)}; }

  double value(std::int64_t i) {
    switch (dtype_) {
      case DType::kF64:
        return at<double>(i);
      case DType::kBF16:
        return to_float(at<BF16>(i));
      case DType::kF16:
        return to_float(at<F16>(i));
      case DType::kI32:
        return at<std::int32_t>(i);
      case DType::kI64:
        return static_cast<double>(at<std::int64_t>(i));
      default:
        return at<float>(i);
    }
  }
  void set(std::int64_t i, double v) {
    switch (dtype_) {
      case DType::kF64:
        at<double>(i) = v;
        break;
      case DType::kBF16:
        at<BF16>(i) = to_bf16(static_cast<float>(v));
        break;
      case DType::kF16:
        at<F16>(i) = to_f16(static_cast<float>(v));
        break;
      case DType::kI32:
        at<std::int32_t>(i) = static_cast<std::int32_t>(v);
        break;
      case DType::kI64:
        at<std::int64_t>(i) = static_cast<std::int64_t>(v);
        break;
      default:
        at<float>(i) = static_cast<float>(v);
    }
  }
  bool same_bytes(Guarded& other) {
    return size_ == other.size_ && std::memcmp(bytes_.get(), other.bytes_.get(), size_) == 0;
  }

 private:
  static constexpr std::size_t kGuard = 256;
  static constexpr unsigned char kPattern = 0xA5;

  template <class T>
  T& at(std::int64_t i) {
    return static_cast<T*>(data())[i];
  }
  bool intact() const {
    for (std::size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != kPattern || bytes_[size_ - 1 - i] != kPattern) return false;
    }
    return true;
  }

  DType dtype_;
  std::int64_t count_;
  std::size_t size_;
  std::unique_ptr<unsigned char[]> bytes_;
};

/// The distributions of random logits.
enum class Flavour { kNormal, kFewValues, kSpecials, kEmptyRows, kOneHot };
inline constexpr Flavour kFlavours[] = {Flavour::kNormal, Flavour::kFewValues, Flavour::kSpecials,
                                        Flavour::kEmptyRows, Flavour::kOneHot};

inline void fill_logits(Guarded* logits, std::int64_t experts, Flavour flavour,
                        std::mt19937_64* random) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const double specials[] = {kInf, -kInf, std::nan(""), 0.0, -0.0, 1e4, -1e4, 1e-7};
  std::normal_distribution<double> normal(0.0, 2.0);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>((*random)() % n); };
  for (std::int64_t i = 0; i < logits->count(); ++i) {
    double v = normal(*random);
    if (flavour == Flavour::kFewValues) v = static_cast<double>(below(3)) - 1.0;
    if (flavour == Flavour::kSpecials && below(3) == 0) v = specials[below(8)];
    if (flavour == Flavour::kEmptyRows && (i / experts) % 3 != 0) {
      v = below(experts) == 0 ? v : (i % 2 == 0 ? -kInf : std::nan(""));
    }
    if (flavour == Flavour::kOneHot && i % experts == experts / 2) v += 20.0;
    logits->set(i, v);
  }
}

}  // namespace sonicmoe::testing
