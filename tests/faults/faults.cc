// Makes one allocation or one thread start after the other fail in calls of the C interface.
//
//   faults_test inject            about 10 s: a fixed set of calls, each fault once
//   faults_test inject 4000       the same, then random calls until 4000 faults were injected
//   faults_test soak [STEPS]      random small layers and routing with flat memory (soak.cc)
//
// After a fault a call must either return the right bits, or refuse with a sentence and leave the
// caller's memory untouched. Called again without the fault, it must return the right bits.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "calls.h"
#include "inject.h"
#include "soak.h"

namespace sonicmoe::faults {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr const char* kSentence = "memory is exhausted, nothing was computed";

class Injector {
 public:
  /// Injects every fault into `call`, one by one.
  void all_faults(Call& call) {
    ++calls_;
    call.reset();
    arm({});
    const smoe_status status = call.run();
    const Demand demand = disarm();
    if (status != SMOE_OK) return fail(call, {}, std::string("refused: ") + smoe_last_error());
    expected_ = call.results();
    if (demand.worker_allocations != 0) fail(call, {}, "a worker thread allocated");
    // With sanitizers one kind of fault for each allocation: both would take two minutes.
    for (std::int64_t i = 0; i < demand.allocations; ++i) {
      if (!kSanitized || i % 2 == 0) one_fault(call, {.allocation = i});
      if (!kSanitized || i % 2 == 1) one_fault(call, {.allocations_from = i});
    }
    for (std::int64_t i = 0; i < demand.threads; ++i) {
      one_fault(call, {.thread = i});
      one_fault(call, {.threads_from = i});
    }
  }

  /// Injects every fault into a call that is refused even without a fault. The sentence must be the
  /// sentence of this refusal, or the sentence about lacking memory.
  void all_faults_of_a_refusal(Call& call) {
    ++calls_;
    call.reset();
    arm({});
    const smoe_status status = call.run();
    const Demand demand = disarm();
    if (status != SMOE_INVALID_ARGUMENT) return fail(call, {}, "not refused");
    const std::string sentence = smoe_last_error();
    if (demand.allocations == 0) fail(call, {}, "no allocation was seen");
    for (std::int64_t i = 0; i < demand.allocations; ++i) {
      ++allocation_faults_;
      arm({.allocation = i});
      const smoe_status refused = call.run();
      disarm();
      const std::string reported = smoe_last_error();
      if (refused == SMOE_OK || (reported != sentence && reported != kSentence))
        fail(call, {.allocation = i}, smoe_last_error());
      if (!call.untouched()) fail(call, {.allocation = i}, "refused after it had written");
    }
  }

  /// Whether faults of both kinds were injected: the library's calls reach the replacements.
  bool injected_both() const { return allocation_faults_ > 0 && thread_faults_ > 0; }
  std::int64_t injected() const { return allocation_faults_ + thread_faults_; }
  std::int64_t failures() const { return failures_; }
  void print() const {
    std::printf("%lld calls, %lld faults: %lld allocations, %lld thread starts; %lld failures\n",
                static_cast<long long>(calls_), static_cast<long long>(injected()),
                static_cast<long long>(allocation_faults_), static_cast<long long>(thread_faults_),
                static_cast<long long>(failures_));
    std::fflush(stdout);
  }

 private:
  void one_fault(Call& call, const Fault& fault) {
    const bool allocation = fault.allocation >= 0 || fault.allocations_from >= 0;
    ++(allocation ? allocation_faults_ : thread_faults_);
    call.reset();
    arm(fault);
    const smoe_status status = call.run();
    disarm();
    if (status == SMOE_OK) {
      if (!call.has_results(expected_)) fail(call, fault, "succeeded with other bits");
      return;
    }
    if (!allocation)
      fail(call, fault, std::string("a thread's absence refused: ") + smoe_last_error());
    if (std::strcmp(smoe_last_error(), kSentence) != 0) {
      fail(call, fault, std::string("the sentence is: ") + smoe_last_error());
    }
    if (!call.untouched()) fail(call, fault, "refused after it had written");
    if (call.run() != SMOE_OK) fail(call, fault, "a repetition without the fault was refused");
    if (!call.has_results(expected_))
      fail(call, fault, "a repetition without the fault has other bits");
  }

  void fail(const Call& call, const Fault& fault, const std::string& what) {
    constexpr std::int64_t kMostPrinted = 20;
    if (++failures_ > kMostPrinted) return;
    std::printf("FAILED: %s: allocation %lld, from %lld, thread %lld, from %lld: %s\n",
                call.name().c_str(), static_cast<long long>(fault.allocation),
                static_cast<long long>(fault.allocations_from),
                static_cast<long long>(fault.thread), static_cast<long long>(fault.threads_from),
                what.c_str());
  }

  std::vector<std::uint8_t> expected_;
  std::int64_t calls_ = 0;
  std::int64_t allocation_faults_ = 0;
  std::int64_t thread_faults_ = 0;
  std::int64_t failures_ = 0;
};

/// Layers large enough for several threads: every form with every dtype, and each of both with both
/// gradient modes.
void fixed_layers(Injector& injector) {
  for (std::int32_t form = SMOE_FORM_IDS; form <= SMOE_FORM_GROUPED; ++form) {
    for (std::int32_t dtype = SMOE_F32; dtype <= SMOE_F64; ++dtype) {
      const bool writes = (form + dtype) % 2 == 0;
      LayerSpec s;
      s.form = form;
      s.dtype = dtype;
      s.activation = writes ? SMOE_SWIGLU : SMOE_RELU2;
      s.grad_mode = writes ? SMOE_GRAD_WRITE : SMOE_GRAD_ACCUMULATE;
      s.threads = 4;
      s.tokens = 400;
      s.hidden = 56;
      s.width = 64;
      s.experts = 5;
      s.bias = 1;
      for (const std::int32_t pass : {SMOE_INFERENCE, SMOE_FORWARD, SMOE_BACKWARD}) {
        injector.all_faults(*layer_call(s, pass));
      }
    }
  }
}

void fixed_routers(Injector& injector) {
  for (const std::int32_t dtype : {SMOE_F32, SMOE_F64}) {
    for (std::int32_t score = 0; score <= SMOE_SCORE_SQRT_SOFTPLUS; ++score) {
      RouterSpec s;
      s.dtype = dtype;
      s.score = score;
      s.mode = score == SMOE_SCORE_SIGMOID ? SMOE_ROUND_SCORE : SMOE_ROUND_BALANCED;
      s.threads = 4;
      s.tokens = 1100;
      s.experts = 64;
      s.groups = 8;
      for (int which = 0; which < kRouterCalls; ++which) {
        injector.all_faults(*router_call(s, static_cast<Router>(which)));
      }
    }
  }
}

void fixed_gemms(Injector& injector) {
  for (std::int32_t dtype = SMOE_F32; dtype <= SMOE_F64; ++dtype) {
    for (const std::int32_t gather : {0, 1}) {
      GemmSpec s;
      s.dtype = dtype;
      s.gather = gather;
      s.threads = 3;
      s.rows = 600;
      s.experts = 4;
      s.n = 96;
      s.k = 80;
      injector.all_faults(*gemm_call(s, Grouped::kRows));
      injector.all_faults(*gemm_call(s, Grouped::kColumns));
    }
  }
}

int inject(std::int64_t wanted) {
  Injector injector;
  fixed_layers(injector);
  injector.all_faults_of_a_refusal(
      *refused_call({.tokens = 20, .hidden = 8, .width = 8, .experts = 4}));
  injector.print();
  fixed_routers(injector);
  fixed_gemms(injector);
  injector.all_faults(*unpack_call());
  injector.print();
  if (!injector.injected_both()) {
    std::puts("FAILED: no allocation or no thread start was seen");
    return 1;
  }
  Random random(20);
  for (std::int64_t i = 0; injector.injected() < wanted; ++i) {
    const LayerSpec layer = random_layer(random);
    injector.all_faults(*layer_call(layer, static_cast<std::int32_t>(random.between(0, 2))));
    if (layer.precision == SMOE_PRECISION_FP8) injector.all_faults(*quantize_call(layer));
    const auto which = static_cast<Router>(random.between(0, kRouterCalls - 1));
    injector.all_faults(*router_call(random_router(random), which));
    const auto kind = random.between(0, 1) == 0 ? Grouped::kRows : Grouped::kColumns;
    injector.all_faults(*gemm_call(random_gemm(random), kind));
    if (i % 20 == 19) injector.print();
  }
  injector.print();
  return injector.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace sonicmoe::faults

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const std::int64_t count = argc > 2 ? std::atoll(argv[2]) : 0;
  if (mode == "inject") return sonicmoe::faults::inject(count);
  if (mode == "soak") return sonicmoe::faults::soak(count > 0 ? count : 1000);
  std::puts("usage: faults_test inject [FAULTS] | soak [STEPS]");
  return 2;
}
