// The common parts of the tests of argument checks: a backend that only counts its calls (defined
// here, so the real CPU backend is never linked), and memory that must not change in a refused
// call.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cpu/backend.h"

namespace sonicmoe::test {

inline int backend_calls = 0;
inline constexpr Sizes kFakeSizes = {1024, 512, 768};
inline constexpr std::int64_t kFakeRoundScratch = 640;
inline constexpr std::int64_t kFakeExchangeBytes = 4096;
/// The shape and the state of every exchange of the fake backend.
inline constexpr ExchangeShape kFakeShape = {2, 4, 8, 8, DType::kBF16};
inline ExchangeState fake_state = {kFakeShape, {}, ExchangePart::kBegin};

template <class... Args>
void count_call(Args...) {
  ++backend_calls;
}

/// One aligned block; every tensor of a test is carved from it.
class Memory {
 public:
  Memory() : storage_(kBytes + kAlignment) {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    base_ = storage_.data() + (kAlignment - address % kAlignment) % kAlignment;
    std::memset(base_, 0xA5, kBytes);
  }

  Buffer buffer(std::int64_t bytes) {
    const Buffer result{base_ + used_, bytes};
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    EXPECT_LE(used_, kBytes);
    return result;
  }
  Tensor tensor(DType t, std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (std::int64_t n : shape) count *= n;
    void* data = buffer(count * dtype_bytes(t)).data;
    if (shape.size() == 1) return tensor1(data, t, shape[0]);
    if (shape.size() == 2) return tensor2(data, t, shape[0], shape[1]);
    return tensor3(data, t, shape[0], shape[1], shape[2]);
  }
  bool untouched() const {
    return std::all_of(base_, base_ + kBytes, [](std::byte b) { return b == std::byte{0xA5}; });
  }

 private:
  static constexpr std::int64_t kBytes = 1 << 19;
  static constexpr std::int64_t kAlignment = 256;
  std::vector<std::byte> storage_;
  std::byte* base_ = nullptr;
  std::int64_t used_ = 0;
};

/// One line of a table: a function that makes a call invalid, and the sentence of the refusal.
template <class Call>
struct Refusal {
  std::function<void(Call&)> spoil;
  const char* sentence;
  Status status = Status::kInvalidArgument;
};

/// Every line must be refused with its own sentence, without a backend call or a written byte.
/// Call has a Memory `memory` and a function run(); unspoilt it must reach the backend.
template <class Call>
void expect_refusals(const std::vector<Refusal<Call>>& table) {
  {
    Call good;
    backend_calls = 0;
    EXPECT_NO_THROW(good.run());
    EXPECT_EQ(backend_calls, 1);
  }
  for (const Refusal<Call>& line : table) {
    SCOPED_TRACE(line.sentence);
    Call call;
    line.spoil(call);
    backend_calls = 0;
    try {
      call.run();
      ADD_FAILURE() << "accepted";
    } catch (const Error& e) {
      EXPECT_STREQ(e.what(), line.sentence);
      EXPECT_EQ(e.status(), line.status);
    }
    EXPECT_EQ(backend_calls, 0);
    EXPECT_TRUE(call.memory.untouched());
  }
}

}  // namespace sonicmoe::test

namespace sonicmoe {

// Takes the place of src/cpu/backend.cc, whose object is then not linked from the static library.
const BackendTable* cpu_backend() {
  static constexpr BackendTable kBackend = [] {
    const auto no_scratch = [](std::int64_t, std::int64_t) -> std::int64_t { return 0; };
    BackendTable backend;
    backend.name = "cpu";
    backend.buffer_alignment = 64;
    backend.moe_sizes = [](const Problem&, Pass pass, const Exec&) {
      return pass == Pass::kInference ? Sizes{0, 0, test::kFakeSizes.scratch_bytes}
                                      : test::kFakeSizes;
    };
    // Here gate and up may alternate in H, as on CUDA. On the CPU they never do.
    backend.h_rows = [](const Problem& p, const Weights&, void* data) {
      ++test::backend_calls;
      return tensor2(data, p.dtype, row_capacity(p), gate_factor(p.activation.kind) * p.width);
    };
    backend.fast_fp8 = [](const Exec&) { return true; };
    backend.quantize_weights = &test::count_call;
    backend.unpack_weights = &test::count_call;
    backend.moe_forward = &test::count_call;
    backend.moe_backward = &test::count_call;
    backend.grouped_gemm_scratch_bytes = no_scratch;
    backend.grouped_gemm = &test::count_call;
    backend.grouped_gemm_k = &test::count_call;
    backend.route = &test::count_call;
    backend.route_backward = &test::count_call;
    backend.round_scratch_bytes = [](const RoundOptions&, std::int64_t, std::int64_t, const Exec&) {
      return test::kFakeRoundScratch;
    };
    backend.token_round = &test::count_call;
    backend.token_round_backward = &test::count_call;
    backend.expert_choice_scratch_bytes = no_scratch;
    backend.expert_choice = &test::count_call;
    backend.expert_choice_backward = &test::count_call;
    backend.router_losses_scratch_bytes = no_scratch;
    backend.router_losses = &test::count_call;
    backend.router_losses_backward = &test::count_call;
    backend.exchange_bytes = [](const ExchangeShape&, const Exec&) {
      return test::kFakeExchangeBytes;
    };
    backend.exchange_open = [](const ExchangeOptions&, const Exec&) -> Exchange* {
      ++test::backend_calls;
      return nullptr;
    };
    backend.exchange_state = [](const Exchange&) -> const ExchangeState& {
      return test::fake_state;
    };
    backend.exchange_check = [](Exchange&, const Exec&) {};
    backend.exchange_sizes = [](const Exchange&, const Problem&, std::int64_t, Pass pass,
                                const Exec&) {
      return pass == Pass::kInference ? Sizes{0, 0, test::kFakeSizes.scratch_bytes}
                                      : test::kFakeSizes;
    };
    backend.exchange_begin = [](Exchange&, const ExchangeStep&) { ++test::backend_calls; };
    backend.exchange_compute = [](Exchange&, const ExchangeStep&) {
      test::fake_state.next = ExchangePart::kFinish;
    };
    backend.exchange_finish = [](Exchange&) { test::fake_state.next = ExchangePart::kBegin; };
    return backend;
  }();
  return &kBackend;
}

}  // namespace sonicmoe
