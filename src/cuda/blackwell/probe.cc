#include "cuda/blackwell/probe.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "cuda/blackwell/products.h"
#include "cuda/blackwell/shape.h"

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
// with tiles of 128 rows and 64 columns; a weight gradient. Each has a k tile that is not full.
const Trial kInOrder{"256 rows in order", {256}, 520, 256, DType::kBF16, false};
const Trial kGathered{"200 gathered rows", {200}, 136, 200, DType::kBF16, true};
const Trial kExperts{
    "experts of 300, 0, 1 and 129 rows", {300, 0, 1, 129}, 456, 264, DType::kF16, true};
const Trial kGrad{"a weight gradient of 100, 0, 70, 1 and 192 rows",
                  {100, 0, 70, 1, 192},
                  136,
                  200,
                  DType::kBF16,
                  true};

/// Integers from -2 to 2.
std::vector<int> small_integers(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> values(count);
  for (int& v : values) v = static_cast<int>(random() % 5) - 2;
  return values;
}

Bits bits_of(int value, DType dtype) {
  const auto v = static_cast<float>(value);
  return dtype == DType::kBF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v))
                               : __half_as_ushort(__float2half_rn(v));
}

std::vector<Bits> bits_of(const std::vector<int>& values, DType dtype) {
  std::vector<Bits> bits;
  for (const int v : values) bits.push_back(bits_of(v, dtype));
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

/// The arguments of a trial in device memory, and the result that it must have.
struct Operands {
  Workspace work;
  Metadata lists{};
  std::int32_t* index = nullptr;  ///< null: rows are in order
  std::vector<int> x, other;      ///< gathered rows (tokens, width), and the other operand
  std::vector<int> row_of;        ///< of x, for each row in expert order
  std::vector<Bits> expected;
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
  /// Memory for the result, and behind it elements that must stay as they are.
  Bits* out(int columns) {
    expected.resize(expected.size() + std::size_t(kGuardRows) * columns, kUntouched);
    return work.copy(std::vector<Bits>(expected.size(), kUntouched));
  }
  /// What is wrong with the result of a launch; empty: nothing.
  std::string fault(const Device& device, const Trial& t, const Bits* out) {
    const cudaError_t status = work.wait();
    if (status == cudaErrorNotReady) give_up(device, t, "does not end");
    if (status != cudaSuccess) {
      give_up(device, t, std::string("failed, ") + cudaGetErrorString(status));
    }
    const std::string product = std::string("its product of ") + t.name;
    if (work.read(exceeded, 1)[0] != 0) {
      return product + " did not end within " + std::to_string(kWaitLimit.count()) + " seconds";
    }
    const std::vector<Bits> result = work.read(out, expected.size());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < result.size(); ++i) wrong += result[i] != expected[i];
    if (wrong == 0) return "";
    return product + " was wrong in " + std::to_string(wrong) + " of " +
           std::to_string(result.size()) + " elements";
  }
};

Device one_pair_of(const Device& device) {
  Device one_pair = device;
  one_pair.multiprocessors = kCtas;
  return one_pair;
}

enum class Order { kDepth, kColumns };  ///< what is contiguous in the weights

/// D (rows, columns) = rows * weights^T.
std::string fault_of_rows(const Device& device, const Trial& t, Order order) {
  const auto columns = std::size_t(t.columns), depth = std::size_t(t.width);
  Operands o(t, t.rows.size() * columns * depth);
  std::size_t row = 0;
  for (std::size_t e = 0; e < t.rows.size(); ++e) {
    for (int r = 0; r < t.rows[e]; ++r, ++row) {
      const int* x = o.x.data() + std::size_t(o.row_of[row]) * depth;
      for (std::size_t c = 0; c < columns; ++c) {
        const int* w = o.other.data() + (e * columns + c) * depth;
        int sum = 0;
        for (std::size_t k = 0; k < depth; ++k) sum += x[k] * w[k];
        o.expected.push_back(bits_of(sum, t.dtype));
      }
    }
  }
  std::vector<int> stored = o.other;
  for (std::size_t i = 0; order == Order::kColumns && i < stored.size(); ++i) {
    const std::size_t e = i / (columns * depth), c = i / depth % columns, k = i % depth;
    stored[(e * depth + k) * columns + c] = o.other[i];
  }
  Tensor weights =
      tensor3(o.work.copy(bits_of(stored, t.dtype)), t.dtype, t.experts(), t.columns, t.width);
  if (order == Order::kColumns) weights.stride[1] = 1, weights.stride[2] = t.columns;
  Bits* const out = o.out(t.columns);
  const RowProduct product{.dtype = t.dtype,
                           .groups = o.groups(t),
                           .rows = o.rows(t),
                           .weights = {weights, {}, WeightParts::kOne},
                           .epilogue = StoreOutput{tensor2(out, t.dtype, t.all_rows(), t.columns)},
                           .hints = {}};
  multiply_rows_within(o.limit(), one_pair_of(device), product, o.work.stream());
  return o.fault(device, t, out);
}

/// D (experts, width, columns): of each expert, gathered rows^T * rows.
std::string fault_of_grad(const Device& device, const Trial& t) {
  const auto columns = std::size_t(t.columns), width = std::size_t(t.width);
  Operands o(t, std::size_t(t.all_rows()) * columns);
  std::size_t begin = 0;
  for (const int rows : t.rows) {
    std::vector<int> sums(width * columns);
    for (std::size_t p = begin; p < begin + rows; ++p) {
      const int* x = o.x.data() + std::size_t(o.row_of[p]) * width;
      const int* right = o.other.data() + p * columns;
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += x[i / columns] * right[i % columns];
    }
    for (const int sum : sums) o.expected.push_back(bits_of(sum, t.dtype));
    begin += rows;
  }
  Bits* const out = o.out(t.columns);
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
  return o.fault(device, t, out);
}

std::string run_probe(const Device& device) {
  const CurrentDevice current(device);
  std::string fault = fault_of_rows(device, kInOrder, Order::kDepth);
  if (fault.empty()) fault = fault_of_rows(device, kGathered, Order::kColumns);
  if (fault.empty()) fault = fault_of_rows(device, kExperts, Order::kDepth);
  if (fault.empty()) fault = fault_of_grad(device, kGrad);
  return fault;
}

}  // namespace

std::string probe(const Device& device) {
  static std::mutex mutex;
  static std::map<int, std::string> answers;
  const std::lock_guard lock(mutex);
  const auto found = answers.find(device.ordinal);
  if (found != answers.end()) return found->second;
  return answers[device.ordinal] = run_probe(device);
}

}  // namespace sonicmoe::cuda::blackwell
