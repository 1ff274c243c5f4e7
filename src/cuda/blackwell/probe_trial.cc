#include "cuda/blackwell/probe_trial.h"

#include <random>
#include <thread>

#include "cuda/blackwell/products.h"
#include "cuda/blackwell/shape.h"

namespace sonicmoe::cuda::blackwell::probed {
namespace {

using std::chrono::steady_clock;

/// For a kernel that hangs elsewhere than in a wait for an mbarrier. Nothing can stop that kernel.
constexpr std::chrono::seconds kHostLimit{20};

[[noreturn]] void give_up(const Device& device, const Trial& t, const std::string& what) {
  throw Error(Status::kCuda, std::string("the engine blackwell's product of ") + t.name +
                                 " on device " + std::to_string(device.ordinal) + " " + what +
                                 ": CUDA cannot be used any more in this process, which must start "
                                 "again with another engine.");
}

}  // namespace

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

Workspace::Workspace() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Workspace::~Workspace() {
  if (is_in_use_) return;
  for (void* array : arrays_) cudaFree(array);
  cudaStreamDestroy(stream_);
}

cudaError_t Workspace::wait() {
  const auto begin = steady_clock::now();
  cudaError_t status = cudaErrorNotReady;
  while (status == cudaErrorNotReady && steady_clock::now() - begin < kHostLimit) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    status = cudaStreamQuery(stream_);
  }
  is_in_use_ = status == cudaErrorNotReady;
  return status;
}

Operands::Operands(const Trial& t, std::size_t others)
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

WaitLimit Operands::limit() const {
  return {static_cast<std::uint64_t>(std::chrono::nanoseconds(kWaitLimit).count()), exceeded};
}

RowOperand Operands::rows(const Trial& t) {
  return {tensor2(work.copy(bits_of(x, t.dtype)), t.dtype, t.tokens(), t.width), index};
}

Bits* Operands::out(std::vector<Bits> expected, int columns) {
  expected.resize(expected.size() + std::size_t(kGuardRows) * columns, kUntouched);
  Bits* const data = work.copy(std::vector<Bits>(expected.size(), kUntouched));
  results.push_back({data, std::move(expected)});
  return data;
}

std::string Operands::fault(const Device& device, const Trial& t) {
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

Device one_pair_of(const Device& device) {
  Device one_pair = device;
  one_pair.multiprocessors = kCtas;
  return one_pair;
}

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

}  // namespace sonicmoe::cuda::blackwell::probed
