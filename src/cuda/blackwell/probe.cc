#include "cuda/blackwell/probe.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/blackwell/products.h"
#include "cuda/blackwell/shape.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::blackwell {
namespace {

using Bits = std::uint16_t;
using std::chrono::steady_clock;

/// Of one wait for an mbarrier. A product that works needs microseconds.
constexpr std::chrono::seconds kWaitLimit{5};
/// For a kernel that hangs elsewhere than in such a wait. Nothing can stop that kernel.
constexpr std::chrono::seconds kHostLimit{20};
/// Rows behind D that no kernel may write.
constexpr int kGuardRows = 8;

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

// A tile of 256 rows; rows past the end of an expert, with MN-major weights; rings that go round,
// with tiles of 128 rows and 64 columns; the epilogues of A and dH; weight gradients. Each has a k
// tile that is not full, but for codes, whose K is whole blocks. Together they run all kernels but
// those of the epilogues of codes.
const Trial kInOrder{"256 rows in order", {256}, 520, 256, DType::kBF16, false};
const Trial kGathered{"200 gathered rows", {200}, 136, 200, DType::kBF16, true};
const Trial kExperts{
    "experts of 300, 0, 1 and 129 rows", {300, 0, 1, 129}, 456, 264, DType::kF16, true};
const Trial kActivated{"A, gate and up apart", {160, 0, 1, 71}, 136, 2 * 136, DType::kBF16, true};
const Trial kActivatedPairs{
    "A, gate and up alternating", {160, 0, 1, 71}, 136, 2 * 136, DType::kF16, true};
const Trial kActivatedGrad{"dH, gate and up apart", {160, 0, 1, 71}, 136, 136, DType::kBF16, true};
const Trial kActivatedGradPairs{
    "dH, gate and up alternating", {160, 0, 1, 71}, 136, 136, DType::kF16, true};
const Trial kCodes{
    "codes of 300, 0, 1 and 129 rows", {300, 0, 1, 129}, 384, 264, DType::kBF16, true};

/// The trial of a weight gradient.
Trial grad_trial(DType dtype) {
  return {"a weight gradient of 100, 0, 70, 1 and 192 rows",
          {100, 0, 70, 1, 192},
          136,
          200,
          dtype,
          true};
}

/// Integers from -2 to 2.
std::vector<int> small_integers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> values(count);
  for (int& v : values) v = static_cast<int>(random() % 5) - 2;
  return values;
}

Bits bits_of(float value, DType dtype) {
  return dtype == DType::kBF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                               : __half_as_ushort(__float2half_rn(value));
}

template <class Number>
std::vector<Bits> bits_of(const std::vector<Number>& values, DType dtype) {
  std::vector<Bits> bits;
  for (const Number v : values) bits.push_back(bits_of(static_cast<float>(v), dtype));
  return bits;
}

/// Device memory and a stream. Freed at the end, unless a kernel may still use them.
class Workspace {
 public:
  Workspace() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
  }
  ~Workspace() {
    if (is_in_use_) return;
    for (void* array : arrays_) cudaFree(array);
    cudaStreamDestroy(stream_);
  }
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
  cudaError_t wait() {
    const auto begin = steady_clock::now();
    cudaError_t status = cudaErrorNotReady;
    while (status == cudaErrorNotReady && steady_clock::now() - begin < kHostLimit) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      status = cudaStreamQuery(stream_);
    }
    is_in_use_ = status == cudaErrorNotReady;
    return status;
  }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<void*> arrays_;
  bool is_in_use_ = false;
};

constexpr Bits kUntouched = 0xffff;

[[noreturn]] void give_up(const Device& device, const Trial& t, const std::string& what) {
  throw Error(Status::kCuda, std::string("the engine blackwell's product of ") + t.name +
                                 " on device " + std::to_string(device.ordinal) + " " + what +
                                 ": CUDA cannot be used any more in this process, which must start "
                                 "again with another engine.");
}

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

  Operands(const Trial& t, std::size_t others)
      : x(small_integers(std::size_t(t.tokens()) * t.width, 1)), other(small_integers(others, 2)) {
    std::vector<TileRecord> records;
    std::vector<std::int32_t> begins;
    int begin = 0;
    for (std::int32_t e = 0; e < t.experts(); ++e) {
      const auto first = static_cast<std::int32_t>(records.size());
      for (int at = 0; at < t.rows[e]; at += kRecordRows) {
        records.push_back({e, begin, t.rows[e], first});
      }
      begins.push_back(begin);
      begin += t.rows[e];
    }
    for (int p = 0; p < begin; ++p) row_of.push_back(t.gathers ? (7 * p + 5) % t.tokens() : p);
    lists.records = work.copy(records);
    lists.record_count = work.copy<std::int32_t>({static_cast<std::int32_t>(records.size())});
    lists.expert_begin = work.copy(begins);
    lists.expert_rows = work.copy(t.rows);
    if (t.gathers) index = work.copy(row_of);
    exceeded = work.copy<std::int32_t>({0});
  }

  WaitLimit limit() const {
    return {static_cast<std::uint64_t>(std::chrono::nanoseconds(kWaitLimit).count()), exceeded};
  }
  RowGroups groups(const Trial& t) const { return {&lists, nullptr, t.experts(), t.all_rows()}; }
  RowOperand rows(const Trial& t) {
    return {tensor2(work.copy(bits_of(x, t.dtype)), t.dtype, t.tokens(), t.width), index};
  }
  /// Memory for a result, and behind it kGuardRows of `columns` elements that must stay as they
  /// are.
  Bits* out(std::vector<Bits> expected, int columns) {
    expected.resize(expected.size() + std::size_t(kGuardRows) * columns, kUntouched);
    Bits* const data = work.copy(std::vector<Bits>(expected.size(), kUntouched));
    results.push_back({data, std::move(expected)});
    return data;
  }
  /// What is wrong with the results of a launch; empty: nothing.
  std::string fault(const Device& device, const Trial& t) {
    const cudaError_t status = work.wait();
    if (status == cudaErrorNotReady) give_up(device, t, "does not end");
    if (status != cudaSuccess) {
      give_up(device, t, std::string("failed, ") + cudaGetErrorString(status));
    }
    const std::string product = std::string("its product of ") + t.name;
    if (work.read(exceeded, 1)[0] != 0) {
      return product + " did not end within " + std::to_string(kWaitLimit.count()) + " seconds";
    }
    std::size_t wrong = 0, all = 0;
    for (const auto& [data, expected] : results) {
      const std::vector<Bits> found = work.read(data, expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) wrong += found[i] != expected[i];
      all += found.size();
    }
    if (wrong == 0) return "";
    return product + " was wrong in " + std::to_string(wrong) + " of " + std::to_string(all) +
           " elements";
  }
};

Device one_pair_of(const Device& device) {
  Device one_pair = device;
  one_pair.multiprocessors = kCtas;
  return one_pair;
}

enum class Order { kDepth, kColumns };  ///< what is contiguous in the weights

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

std::vector<float> products_of(const Trial& t, const Operands& o) {
  return scaled_products_of(t, o, [](auto...) { return 1.0f; });
}

/// The weights (experts, columns, width) in device memory.
Tensor weights_of(const Trial& t, Operands& o, Order order) {
  const auto columns = std::size_t(t.columns), depth = std::size_t(t.width);
  std::vector<int> stored = o.other;
  for (std::size_t i = 0; order == Order::kColumns && i < stored.size(); ++i) {
    const std::size_t e = i / (columns * depth), c = i / depth % columns, k = i % depth;
    stored[(e * depth + k) * columns + c] = o.other[i];
  }
  Tensor weights =
      tensor3(o.work.copy(bits_of(stored, t.dtype)), t.dtype, t.experts(), t.columns, t.width);
  if (order == Order::kColumns) weights.stride[1] = 1, weights.stride[2] = t.columns;
  return weights;
}

/// Launches a row product and compares its results.
std::string fault_of(const Device& device, const Trial& t, Operands& o, const RowOperand& rows,
                     const WeightOperand& weights, const decltype(RowProduct::epilogue)& epilogue) {
  const RowProduct product{.dtype = t.dtype,
                           .groups = o.groups(t),
                           .rows = rows,
                           .weights = weights,
                           .epilogue = epilogue,
                           .hints = {}};
  multiply_rows_within(o.limit(), one_pair_of(device), product, o.work.stream());
  return o.fault(device, t);
}

std::string fault_of_rows(const Device& device, const Trial& t, Order order) {
  Operands o(t, t.rows.size() * t.columns * t.width);
  Bits* const out = o.out(bits_of(products_of(t, o), t.dtype), t.columns);
  return fault_of(device, t, o, o.rows(t), {weights_of(t, o, order), {}, WeightParts::kOne},
                  StoreOutput{tensor2(out, t.dtype, t.all_rows(), t.columns)});
}

/// The code of an integer from -2 to 2 in e4m3.
std::uint8_t code_of(int value) {
  static constexpr std::uint8_t kCodes[] = {0xc0, 0xb8, 0x00, 0x38, 0x40};
  return kCodes[value + 2];
}

/// Powers of two from 1/4 to 4.
std::vector<float> scales_of(std::size_t count, unsigned seed) {
  std::vector<float> scales;
  for (const int exponent : small_integers(count, seed))
    scales.push_back(std::ldexp(1.0f, exponent));
  return scales;
}

/// A product of codes: a scale for each token and block of K, and for each expert, block of columns
/// and block of K.
std::string fault_of_codes(const Device& device, const Trial& t) {
  Operands o(t, t.rows.size() * t.columns * t.width);
  const auto blocks = std::size_t(t.width / kScaleBlock);
  const std::size_t column_blocks = (t.columns + kScaleBlock - 1) / kScaleBlock;
  const std::vector<float> of_rows = scales_of(t.tokens() * blocks, 6);
  const std::vector<float> of_weights = scales_of(t.rows.size() * column_blocks * blocks, 7);
  const std::vector<float> expected = scaled_products_of(
      t, o, [&](std::size_t e, std::size_t token, std::size_t column, std::size_t block) {
        return of_rows[token * blocks + block] *
               of_weights[(e * column_blocks + column / kScaleBlock) * blocks + block];
      });
  const auto codes = [&](const std::vector<int>& values) {
    std::vector<std::uint8_t> all;
    for (const int v : values) all.push_back(code_of(v));
    return o.work.copy(all);
  };
  Bits* const out = o.out(bits_of(expected, t.dtype), t.columns);
  const RowOperand rows{.rows = tensor2(codes(o.x), t.dtype, t.tokens(), t.width),
                        .index = o.index,
                        .scales = {.data = o.work.copy(of_rows)}};
  const WeightOperand weights{
      .first = tensor3(codes(o.other), t.dtype, t.experts(), t.columns, t.width),
      .second = {},
      .parts = WeightParts::kOne,
      .scales = {.data = o.work.copy(of_weights),
                 .expert_stride = static_cast<std::int64_t>(column_blocks * blocks),
                 .column_stride = static_cast<std::int64_t>(blocks),
                 .depth_stride = 1}};
  return fault_of(device, t, o, rows, weights,
                  StoreOutput{tensor2(out, t.dtype, t.all_rows(), t.columns)});
}

/// Where gate and up of a column of A are in a row of H.
struct HiddenColumns {
  int gate, up;
  HiddenColumns(GateLayout layout, int column, int width)
      : gate(layout == GateLayout::kInterleaved ? 2 * column : column),
        up(layout == GateLayout::kInterleaved ? 2 * column + 1 : width + column) {}
};

/// Both functions as the kernels compute them: of integers, but with the signs of zeros.
float relu(float x) { return x < 0.0f ? 0.0f : x; }
float relu_slope(float x, float g) { return x > 0.0f ? g : 0.0f; }

/// H = D + bias and A = relu(gate) up.
std::string fault_of_activate(const Device& device, const Trial& t, GateLayout layout) {
  const int width = t.columns / 2;
  Operands o(t, t.rows.size() * t.columns * t.width);
  const std::vector<int> biases = small_integers(t.rows.size() * t.columns, 3);
  const std::vector<float> sums = products_of(t, o);
  std::vector<Bits> h(sums.size()), a;
  std::size_t row = 0;
  for (std::size_t e = 0; e < t.rows.size(); ++e) {
    for (int r = 0; r < t.rows[e]; ++r, ++row) {
      for (int c = 0; c < width; ++c) {
        const HiddenColumns at(layout, c, width);
        const auto hidden = [&](int column, int part) {
          const std::size_t i = row * t.columns + column;
          const float sum = sums[i] + static_cast<float>(biases[(e * 2 + part) * width + c]);
          h[i] = bits_of(sum, t.dtype);
          return sum;
        };
        const float gate = hidden(at.gate, 0), up = hidden(at.up, 1);
        a.push_back(bits_of(relu(gate) * up, t.dtype));
      }
    }
  }
  const auto rows = std::int64_t{t.all_rows()};
  const auto bias = [&, data = o.work.copy(bits_of(biases, t.dtype))](int part) {
    Tensor of_part = tensor2(data + part * width, t.dtype, t.experts(), width);
    of_part.stride[0] = t.columns;
    return of_part;
  };
  const bool apart = layout == GateLayout::kConcatenated;
  Tensor gate = weights_of(t, o, apart ? Order::kDepth : Order::kColumns), up{};
  if (apart) {
    gate.shape[1] = width;
    up = gate;
    up.data = static_cast<Bits*>(gate.data) + width * gate.stride[1];
  }
  const Activate epilogue{.h = {tensor2(o.out(std::move(h), t.columns), t.dtype, rows, t.columns)},
                          .a = {tensor2(o.out(std::move(a), width), t.dtype, rows, width)},
                          .bias_gate = bias(0),
                          .bias_up = bias(1),
                          .activation = {ActivationKind::kReGLU},
                          .layout = layout};
  return fault_of(device, t, o, o.rows(t),
                  {gate, up, apart ? WeightParts::kSideBySide : WeightParts::kOne}, epilogue);
}

/// dH, A' and the parts of dS of relu(gate) up, with H and row weights of small integers.
std::string fault_of_activate_grad(const Device& device, const Trial& t, GateLayout layout) {
  const int width = t.columns, rows = t.all_rows();
  const int parts = (width + portable::kWarpColumns - 1) / portable::kWarpColumns;
  Operands o(t, t.rows.size() * t.columns * t.width);
  const std::vector<int> hidden = small_integers(std::size_t(rows) * 2 * width, 4);
  const std::vector<int> weights = small_integers(rows, 5);
  const std::vector<float> sums = products_of(t, o);
  std::vector<Bits> dh(hidden.size()), a;
  std::vector<float> scores(std::size_t(rows) * parts);
  for (std::size_t row = 0; row < std::size_t(rows); ++row) {
    const auto weight = static_cast<float>(weights[row]);
    for (int c = 0; c < width; ++c) {
      const HiddenColumns at(layout, c, width);
      const std::size_t line = row * 2 * width;
      const auto gate = static_cast<float>(hidden[line + at.gate]);
      const auto up = static_cast<float>(hidden[line + at.up]);
      const float grad = sums[row * width + c];
      const float value = relu(gate) * up;
      dh[line + at.gate] = bits_of(relu_slope(gate, weight * grad) * up, t.dtype);
      dh[line + at.up] = bits_of(relu(gate) * (weight * grad), t.dtype);
      a.push_back(bits_of(weight * value, t.dtype));
      scores[row * parts + c / portable::kWarpColumns] += grad * value;
    }
  }
  std::vector<Bits> score_bits(2 * scores.size());
  std::memcpy(score_bits.data(), scores.data(), score_bits.size() * sizeof(Bits));
  const Tensor h = tensor2(o.work.copy(bits_of(hidden, t.dtype)), t.dtype, rows, 2 * width);
  const ActivateGrad epilogue{
      .h = {h},
      .dh = {tensor2(o.out(std::move(dh), 2 * width), t.dtype, rows, 2 * width)},
      .a = tensor2(o.out(std::move(a), width), t.dtype, rows, width),
      .row_weight = o.work.copy(std::vector<float>(weights.begin(), weights.end())),
      .score_parts = reinterpret_cast<float*>(o.out(std::move(score_bits), 2 * parts)),
      .score_tiles = parts,
      .activation = {ActivationKind::kReGLU},
      .layout = layout};
  const Order order = layout == GateLayout::kConcatenated ? Order::kColumns : Order::kDepth;
  return fault_of(device, t, o, o.rows(t), {weights_of(t, o, order), {}, WeightParts::kOne},
                  epilogue);
}

/// D (experts, width, columns): of each expert, gathered rows^T * rows.
std::string fault_of_grad(const Device& device, const Trial& t) {
  const auto columns = std::size_t(t.columns), width = std::size_t(t.width);
  Operands o(t, std::size_t(t.all_rows()) * columns);
  std::vector<Bits> expected;
  std::size_t begin = 0;
  for (const int rows : t.rows) {
    std::vector<int> sums(width * columns);
    for (std::size_t p = begin; p < begin + rows; ++p) {
      const int* x = o.x.data() + std::size_t(o.row_of[p]) * width;
      const int* right = o.other.data() + p * columns;
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += x[i / columns] * right[i % columns];
    }
    for (const int sum : sums) expected.push_back(bits_of(static_cast<float>(sum), t.dtype));
    begin += rows;
  }
  Bits* const out = o.out(std::move(expected), t.columns);
  const Tensor right =
      tensor2(o.work.copy(bits_of(o.other, t.dtype)), t.dtype, t.all_rows(), t.columns);
  const DepthProduct product{.dtype = t.dtype,
                             .groups = o.groups(t),
                             .left = o.rows(t),
                             .right = right,
                             .right_part = 0,
                             .out = {tensor3(out, t.dtype, t.experts(), t.width, t.columns), {}},
                             .parts = GradParts::kOne,
                             .mode = GradMode::kWrite,
                             .hints = {},
                             .companion = Companion::kNone};
  multiply_depth_within(o.limit(), one_pair_of(device), product, o.work.stream());
  return o.fault(device, t);
}

std::string run_probe(const Device& device, std::string_view only) {
  const CurrentDevice current(device);
  std::string fault;
  bool has_asked = false;
  const auto ask = [&](const Trial& t, const auto& fault_of_trial, auto... how) {
    if (!fault.empty() || std::string_view(t.name).find(only) == std::string_view::npos) return;
    has_asked = true;
    fault = fault_of_trial(device, t, how...);
  };
  constexpr GateLayout kApart = GateLayout::kConcatenated, kPairs = GateLayout::kInterleaved;
  ask(kInOrder, fault_of_rows, Order::kDepth);
  ask(kGathered, fault_of_rows, Order::kColumns);
  ask(kExperts, fault_of_rows, Order::kDepth);
  ask(kCodes, fault_of_codes);
  ask(grad_trial(DType::kBF16), fault_of_grad);
  ask(grad_trial(DType::kF16), fault_of_grad);
  ask(kActivated, fault_of_activate, kApart);
  ask(kActivatedPairs, fault_of_activate, kPairs);
  ask(kActivatedGrad, fault_of_activate_grad, kApart);
  ask(kActivatedGradPairs, fault_of_activate_grad, kPairs);
  if (!has_asked) return "no product of the probe is named " + std::string(only);
  return fault;
}

}  // namespace

std::string probe(const Device& device, std::string_view only) {
  if (!only.empty()) return run_probe(device, only);
  static std::mutex mutex;
  static std::map<int, std::string> answers;
  const std::lock_guard lock(mutex);
  const auto found = answers.find(device.ordinal);
  if (found != answers.end()) return found->second;
  return answers[device.ordinal] = run_probe(device, "");
}

}  // namespace sonicmoe::cuda::blackwell
