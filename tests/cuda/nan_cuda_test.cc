// A NaN in a token's row of x or dout reaches the same results as on the CPU, with every engine and
// activation: a result that hides it would hide that a training run has diverged.
#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "core/numeric.h"
#include "device_array.h"
#include "each_engine.h"
#include "sonicmoe/moe.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::must;

constexpr std::int64_t kT = 5, kD = 64, kN = 64, kE = 2;
constexpr std::int64_t kToken = 1;  // the one with a NaN

/// Inputs and results of a step, all of bf16 but ids and scores. Backends address them by pointer.
enum At { kX, kDout, kUp, kDown, kIds, kScores, kOut, kDx, kDup, kDdown, kDscores, kCount };
using Pointers = std::vector<void*>;
using Bytes = std::vector<std::uint8_t>;

Problem problem_of(ActivationKind kind) {
  Problem p;
  p.tokens = kT;
  p.hidden = kD;
  p.width = kN;
  p.experts = kE;
  p.top_k = 1;
  p.dtype = DType::kBF16;
  p.activation.kind = kind;
  return p;
}

/// Gate and up lie side by side. Without a gate, up is all of w_up.
Weights views(bool gated, void* up, void* down) {
  Weights w;
  w.up = tensor3(up, DType::kBF16, kE, kN, kD);
  w.down = tensor3(down, DType::kBF16, kE, kD, kN);
  if (gated) {
    w.up.stride[0] *= 2;
    w.gate = w.up;
    w.up.data = static_cast<std::uint16_t*>(up) + kN * kD;
  }
  return w;
}

/// Random inputs with a NaN in x or dout, and results of zeros.
std::vector<Bytes> inputs(ActivationKind kind, At with_nan) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto values = [&](std::int64_t count) {
    Bytes bytes;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint16_t bits = to_bf16(normal(random)).bits;
      bytes.push_back(static_cast<std::uint8_t>(bits & 0xff));
      bytes.push_back(static_cast<std::uint8_t>(bits >> 8));
    }
    return bytes;
  };
  const auto words = [](auto value_of) {
    std::vector<decltype(value_of(0))> list;
    for (int t = 0; t < kT; ++t) list.push_back(value_of(t));
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(list.data());
    return Bytes(bytes, bytes + kT * 4);
  };
  const std::int64_t halves = gate_factor(kind);
  std::vector<Bytes> all = {values(kT * kD),
                            values(kT * kD),
                            values(kE * halves * kN * kD),
                            values(kE * kD * kN),
                            words([](int t) { return std::int32_t{t % 2}; }),
                            words([](int) { return 0.5f; })};
  std::fill_n(all[with_nan].begin() + kToken * kD * 2, 2, 0xff);
  for (const At result : {kX, kDout, kUp, kDown, kIds}) {  // as large as what they belong to
    all.emplace_back(all[result].size(), 0);
  }
  return all;
}

void step(ActivationKind kind, const Pointers& at, const Pointers& work, const Exec& exec) {
  const Problem p = problem_of(kind);
  const bool gated = is_gated(kind);
  const Sizes forward = moe_sizes(p, Pass::kForward, exec);
  const Sizes backward = moe_sizes(p, Pass::kBackward, exec);
  const auto rows = [&](At i) { return tensor2(at[i], DType::kBF16, kT, kD); };
  ForwardArgs f;
  f.x = rows(kX);
  f.routing.ids = tensor2(at[kIds], DType::kI32, kT, 1);
  f.routing.weights = tensor2(at[kScores], DType::kF32, kT, 1);
  f.weights = views(gated, at[kUp], at[kDown]);
  f.out = rows(kOut);
  f.h = {work[0], forward.h_bytes};
  f.saved = {work[1], forward.saved_bytes};
  f.scratch = {work[2], std::max(forward.scratch_bytes, backward.scratch_bytes)};
  BackwardArgs b;
  b.x = f.x;
  b.routing = f.routing;
  b.weights = f.weights;
  b.dout = rows(kDout);
  b.h = f.h;
  b.saved = f.saved;
  b.scratch = f.scratch;
  b.dx = rows(kDx);
  b.dweights = tensor2(at[kDscores], DType::kF32, kT, 1);
  b.grads = views(gated, at[kDup], at[kDdown]);
  moe_forward(p, f, exec);
  moe_backward(p, b, exec);
}

/// Bytes of h, saved and scratch, with room to align them.
std::vector<std::int64_t> work_bytes(ActivationKind kind, const Exec& exec) {
  const Sizes f = moe_sizes(problem_of(kind), Pass::kForward, exec);
  const Sizes b = moe_sizes(problem_of(kind), Pass::kBackward, exec);
  return {f.h_bytes, f.saved_bytes, std::max(f.scratch_bytes, b.scratch_bytes)};
}

std::vector<Bytes> on_cpu(ActivationKind kind, At with_nan) {
  constexpr std::uintptr_t kAlign = 64;
  std::vector<Bytes> all = inputs(kind, with_nan), buffers;
  Pointers at, work;
  for (Bytes& b : all) at.push_back(b.data());
  for (const std::int64_t bytes : work_bytes(kind, {})) {
    std::uint8_t* begin = buffers.emplace_back(bytes + kAlign).data();
    work.push_back(begin + -reinterpret_cast<std::uintptr_t>(begin) % kAlign);
  }
  step(kind, at, work, {});
  return all;
}

std::vector<Bytes> on_device(ActivationKind kind, At with_nan, const Exec& exec) {
  std::vector<std::unique_ptr<DeviceArray>> arrays, buffers;
  Pointers at, work;
  for (const Bytes& b : inputs(kind, with_nan)) {
    arrays.push_back(std::make_unique<DeviceArray>(static_cast<std::int64_t>(b.size())));
    arrays.back()->set(b);
    at.push_back(arrays.back()->data());
  }
  for (const std::int64_t bytes : work_bytes(kind, exec)) {
    buffers.push_back(std::make_unique<DeviceArray>(bytes));
    work.push_back(buffers.back()->data());
  }
  step(kind, at, work, exec);
  must(cudaDeviceSynchronize());
  std::vector<Bytes> all;
  for (const auto& array : arrays) all.push_back(array->get());
  return all;
}

/// Which elements of bf16, or of fp32, are NaN.
std::vector<bool> nans(const Bytes& bytes, std::size_t element) {
  std::vector<bool> found;
  for (std::size_t i = element; i <= bytes.size(); i += element) {
    const int high = (bytes[i - 1] & 0x7f) << 8 | bytes[i - 2];
    found.push_back(high > 0x7f80);  // a NaN that was computed has its top bit of the fraction set
  }
  return found;
}

class CudaNan : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(CudaNan);

// Where relu is 0, the engines drop a NaN of dout, as PyTorch does; the CPU keeps it. So weight
// gradients are compared only for a NaN in x.
TEST_P(CudaNan, ReachesWhatItReachesOnTheCpu) {
  constexpr const char* kNames[] = {"out", "dx", "dw_up", "dw_down", "dweights"};
  for (int i = 0; i < kActivationCount; ++i) {
    const auto kind = static_cast<ActivationKind>(i);
    for (const At tensor : {kX, kDout}) {
      const std::vector<Bytes> want = on_cpu(kind, tensor), got = on_device(kind, tensor, exec());
      const At reached = tensor == kX ? kOut : kDx;
      ASSERT_TRUE(nans(want[reached], 2)[kToken * kD]) << activation_name(kind);
      for (const At result : {kOut, kDx, kDup, kDdown, kDscores}) {
        if (tensor == kDout && (result == kDup || result == kDdown)) continue;
        const std::size_t element = result == kDscores ? 4 : 2;
        EXPECT_TRUE(nans(got[result], element) == nans(want[result], element))
            << kNames[result - kOut] << " of " << activation_name(kind) << " with a NaN in "
            << (tensor == kX ? "x" : "dout");
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
