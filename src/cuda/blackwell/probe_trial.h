// What the products of the probe have in common: their operands and results in device memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/blackwell/params.h"
#include "cuda/device/device.h"
#include "cuda/layer/product.h"

namespace sonicmoe::cuda::blackwell::probed {

using Bits = std::uint16_t;

/// Of one wait for an mbarrier. A product that works needs microseconds.
inline constexpr std::chrono::seconds kWaitLimit{5};
/// Rows behind a result that no kernel may write.
inline constexpr int kGuardRows = 8;

/// Products over the rows of some experts, by one pair of CTAs.
struct Trial {
  const char* name;
  std::vector<int> rows;  ///< of each expert
  int width;              ///< of the gathered rows
  int columns;
  DType dtype;
  bool gathers;

  int all_rows() const {
    int sum = 0;
    for (const int r : rows) sum += r;
    return sum;
  }
  int tokens() const { return all_rows() + 3; }
  std::int64_t experts() const { return static_cast<std::int64_t>(rows.size()); }
};

/// Integers from -2 to 2.
std::vector<int> small_integers(std::size_t count, unsigned seed);

Bits bits_of(float value, DType dtype);

template <class Number>
std::vector<Bits> bits_of(const std::vector<Number>& values, DType dtype) {
  std::vector<Bits> bits;
  for (const Number v : values) bits.push_back(bits_of(static_cast<float>(v), dtype));
  return bits;
}

/// Device memory and a stream. Freed at the end, unless a kernel may still use them.
class Workspace {
 public:
  Workspace();
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  cudaStream_t stream() const { return stream_; }
  template <class T>
  T* copy(const std::vector<T>& values) {
    void* array = nullptr;
    check_cuda(cudaMalloc(&array, values.size() * sizeof(T)), "allocating memory for the probe");
    arrays_.push_back(array);
    check_cuda(cudaMemcpyAsync(array, values.data(), values.size() * sizeof(T),
                               cudaMemcpyHostToDevice, stream_),
               "copying the probe's operands");
    return static_cast<T*>(array);
  }
  template <class T>
  std::vector<T> read(const T* array, std::size_t count) {
    std::vector<T> values(count);
    check_cuda(
        cudaMemcpyAsync(values.data(), array, count * sizeof(T), cudaMemcpyDeviceToHost, stream_),
        "copying the probe's result");
    check_cuda(cudaStreamSynchronize(stream_), "copying the probe's result");
    return values;
  }
  /// cudaErrorNotReady: the work of the stream does not end.
  cudaError_t wait();

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> arrays_;
  bool is_in_use_ = false;
};

inline constexpr Bits kUntouched = 0xffff;

/// A result in device memory, and what it must be.
struct Result {
  Bits* data;
  std::vector<Bits> expected;
};

/// The arguments of a trial in device memory, and the results that it must have.
struct Operands {
  Workspace work;
  Metadata lists{};
  std::int32_t* index = nullptr;  ///< null: rows are in order
  std::vector<int> x, other;      ///< gathered rows (tokens, width), and the other operand
  std::vector<int> row_of;        ///< of x, for each row in expert order
  std::vector<Result> results;
  std::int32_t* exceeded = nullptr;

  /// `others`: number of elements of the other operand.
  Operands(const Trial& t, std::size_t others);

  WaitLimit limit() const;
  RowGroups groups(const Trial& t) const { return {&lists, nullptr, t.experts(), t.all_rows()}; }
  RowOperand rows(const Trial& t);
  /// Memory for a result of 16-bit elements, and behind it kGuardRows of `columns` elements that
  /// must stay as they are.
  Bits* out(std::vector<Bits> expected, int columns);
  /// The same for codes or fp32 values; whole numbers of 16 bits.
  template <class T>
  T* out_of(const std::vector<T>& expected, int columns) {
    std::vector<Bits> bits(expected.size() * sizeof(T) / sizeof(Bits));
    std::memcpy(bits.data(), expected.data(), bits.size() * sizeof(Bits));
    return reinterpret_cast<T*>(out(std::move(bits), columns));
  }
  /// What is wrong with the results of a launch; empty: nothing.
  std::string fault(const Device& device, const Trial& t);
};

/// The device, with two multiprocessors: one pair of CTAs computes all tiles of a product, so that
/// it uses each stage of its rings more than once.
Device one_pair_of(const Device& device);

/// D (rows, columns) = rows * weights^T. scale(expert, row of x, column, block): of a block of
/// kScaleBlock of K.
template <class Scale>
std::vector<float> scaled_products_of(const Trial& t, const Operands& o, const Scale& scale) {
  const auto columns = std::size_t(t.columns), depth = std::size_t(t.width);
  std::vector<float> sums;
  std::size_t row = 0;
  for (std::size_t e = 0; e < t.rows.size(); ++e) {
    for (int r = 0; r < t.rows[e]; ++r, ++row) {
      const auto token = std::size_t(o.row_of[row]);
      const int* x = o.x.data() + token * depth;
      for (std::size_t c = 0; c < columns; ++c) {
        const int* w = o.other.data() + (e * columns + c) * depth;
        float sum = 0.0f;
        for (std::size_t k = 0, block = 0; k < depth; ++block) {
          int in_block = 0;
          for (; k < std::min<std::size_t>((block + 1) * kScaleBlock, depth); ++k) {
            in_block += x[k] * w[k];
          }
          sum += scale(e, token, c, block) * static_cast<float>(in_block);
        }
        sums.push_back(sum);
      }
    }
  }
  return sums;
}

/// Launches a row product and compares its results.
std::string fault_of(const Device& device, const Trial& t, Operands& o, const RowOperand& rows,
                     const WeightOperand& weights, const decltype(RowProduct::epilogue)& epilogue);

/// Where gate and up of a column of A are in a row of H.
struct HiddenColumns {
  int gate, up;
  HiddenColumns(GateLayout layout, int column, int width)
      : gate(layout == GateLayout::kInterleaved ? 2 * column : column),
        up(layout == GateLayout::kInterleaved ? 2 * column + 1 : width + column) {}
};

/// The biases (experts, width) of one of the parts of H: 0 is gate, 1 is up. `data` has t.columns
/// for each expert, those of gate first.
inline Tensor bias_of(const Trial& t, Bits* data, int part, int width) {
  Tensor bias = tensor2(data + part * width, t.dtype, t.experts(), width);
  bias.stride[0] = t.columns;
  return bias;
}

/// Both functions as the kernels compute them: of integers, but with the signs of zeros.
inline float relu(float x) { return x < 0.0f ? 0.0f : x; }
inline float relu_slope(float x, float g) { return x > 0.0f ? g : 0.0f; }

}  // namespace sonicmoe::cuda::blackwell::probed
