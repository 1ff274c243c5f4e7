// The C functions that take no tensors: status, version, activations and devices.
#include <cxxabi.h>
#include <pthread.h>

#include <cstdio>
#include <cstdlib>

#include "capi/convert.h"
#include "core/backend_table.h"
#include "core/check_tensor.h"

namespace sonicmoe::capi {
namespace {

// A fixed array: reporting an error must not allocate, because that could fail.
struct LastError {
  char sentence[1024] = "";
};
LastError& last_error() noexcept {
  thread_local LastError instance;
  return instance;
}

#define SONICMOE_SAME(c_name, cpp_value) \
  static_assert(static_cast<int>(c_name) == static_cast<int>(cpp_value))
SONICMOE_SAME(SMOE_OK, Status::kOk);
SONICMOE_SAME(SMOE_INVALID_ARGUMENT, Status::kInvalidArgument);
SONICMOE_SAME(SMOE_UNSUPPORTED, Status::kUnsupported);
SONICMOE_SAME(SMOE_OUT_OF_RANGE, Status::kOutOfRange);
SONICMOE_SAME(SMOE_WORKSPACE_TOO_SMALL, Status::kWorkspaceTooSmall);
SONICMOE_SAME(SMOE_CUDA, Status::kCuda);
SONICMOE_SAME(SMOE_INTERNAL, Status::kInternal);
SONICMOE_SAME(SMOE_F32, DType::kF32);
SONICMOE_SAME(SMOE_BF16, DType::kBF16);
SONICMOE_SAME(SMOE_F16, DType::kF16);
SONICMOE_SAME(SMOE_F64, DType::kF64);
SONICMOE_SAME(SMOE_I32, DType::kI32);
SONICMOE_SAME(SMOE_I64, DType::kI64);
SONICMOE_SAME(SMOE_SWIGLU, ActivationKind::kSwiGLU);
SONICMOE_SAME(SMOE_SWIGLU_OAI, ActivationKind::kSwiGLUOai);
SONICMOE_SAME(SMOE_GEGLU, ActivationKind::kGeGLU);
SONICMOE_SAME(SMOE_GEGLU_TANH, ActivationKind::kGeGLUTanh);
SONICMOE_SAME(SMOE_REGLU, ActivationKind::kReGLU);
SONICMOE_SAME(SMOE_SILU, ActivationKind::kSiLU);
SONICMOE_SAME(SMOE_GELU, ActivationKind::kGELU);
SONICMOE_SAME(SMOE_GELU_TANH, ActivationKind::kGELUTanh);
SONICMOE_SAME(SMOE_RELU, ActivationKind::kReLU);
SONICMOE_SAME(SMOE_RELU2, ActivationKind::kReLU2);
SONICMOE_SAME(SMOE_SWIGLU_CLAMPED, ActivationKind::kSwiGLUClamped);
SONICMOE_SAME(SMOE_SITU, ActivationKind::kSiTU);
SONICMOE_SAME(SMOE_SWIGLU_STEP, ActivationKind::kSwiGLUStep);
static_assert(SMOE_SWIGLU_STEP + 1 == kActivationCount, "c_api.h lacks an activation");
SONICMOE_SAME(SMOE_CPU_BACKEND, Backend::kCpu);
SONICMOE_SAME(SMOE_CUDA_BACKEND, Backend::kCuda);
SONICMOE_SAME(SMOE_FORM_IDS, RoutingForm::kIds);
SONICMOE_SAME(SMOE_FORM_PAIRS, RoutingForm::kPairs);
SONICMOE_SAME(SMOE_FORM_GROUPED, RoutingForm::kGrouped);
SONICMOE_SAME(SMOE_INFERENCE, Pass::kInference);
SONICMOE_SAME(SMOE_FORWARD, Pass::kForward);
SONICMOE_SAME(SMOE_BACKWARD, Pass::kBackward);
SONICMOE_SAME(SMOE_GRAD_WRITE, GradMode::kWrite);
SONICMOE_SAME(SMOE_GRAD_ACCUMULATE, GradMode::kAccumulate);
SONICMOE_SAME(SMOE_PRECISION_TENSORS, Precision::kTensors);
SONICMOE_SAME(SMOE_PRECISION_FP8, Precision::kFp8);
SONICMOE_SAME(SMOE_KEPT_H_PRECISION, KeptH::kPrecision);
SONICMOE_SAME(SMOE_KEPT_H_TENSORS, KeptH::kTensors);
SONICMOE_SAME(SMOE_SCORE_SOFTMAX_AFTER_TOPK, ScoreMode::kSoftmaxAfterTopK);
SONICMOE_SAME(SMOE_SCORE_SOFTMAX_BEFORE_TOPK, ScoreMode::kSoftmaxBeforeTopK);
SONICMOE_SAME(SMOE_SCORE_SIGMOID, ScoreMode::kSigmoid);
SONICMOE_SAME(SMOE_SCORE_SQRT_SOFTPLUS, ScoreMode::kSqrtSoftplus);
SONICMOE_SAME(SMOE_ROUND_NEAREST, RoundingMode::kNearest);
SONICMOE_SAME(SMOE_ROUND_UP, RoundingMode::kUp);
SONICMOE_SAME(SMOE_ROUND_DOWN, RoundingMode::kDown);
SONICMOE_SAME(SMOE_ROUND_SCORE, RoundingMode::kScore);
SONICMOE_SAME(SMOE_ROUND_STOCHASTIC, RoundingMode::kStochastic);
SONICMOE_SAME(SMOE_ROUND_BALANCED, RoundingMode::kBalanced);
SONICMOE_SAME(SMOE_NF4, PackedFormat::kNF4);
SONICMOE_SAME(SMOE_MXFP4, PackedFormat::kMXFP4);
SONICMOE_SAME(SMOE_FP8_BLOCKS, PackedFormat::kFP8Blocks);
static_assert(SMOE_FP8_BLOCKS + 1 == kPackedFormatCount, "c_api.h lacks a packed format");
SONICMOE_SAME(SMOE_TRANSPORT_AUTO, ExchangeTransport::kAuto);
SONICMOE_SAME(SMOE_TRANSPORT_PUSH, ExchangeTransport::kPush);
SONICMOE_SAME(SMOE_TRANSPORT_COPY, ExchangeTransport::kCopy);
SONICMOE_SAME(SMOE_PART_ALL, ExchangePart::kAll);
SONICMOE_SAME(SMOE_PART_BEGIN, ExchangePart::kBegin);
SONICMOE_SAME(SMOE_PART_COMPUTE, ExchangePart::kCompute);
SONICMOE_SAME(SMOE_PART_FINISH, ExchangePart::kFinish);
#undef SONICMOE_SAME

/// A flag of each thread, not set at first. If pthreads cannot store it, it is never set.
class ThreadFlag {
 public:
  ThreadFlag() noexcept : usable_(pthread_key_create(&key_, nullptr) == 0) {}
  bool is_set() const noexcept { return usable_ && pthread_getspecific(key_) != nullptr; }
  void set() const noexcept {
    if (usable_) pthread_setspecific(key_, this);
  }

 private:
  pthread_key_t key_{};
  bool usable_;
};

/// The backend whose devices smoe_device_open opens.
const BackendTable& device_backend() {
  const BackendTable* backend = find_backend(Backend::kCuda);
  if (backend == nullptr) {
    checks::refuse(Status::kUnsupported,
                   std::string("this build has no CUDA backend: ") + cuda_absence());
  }
  return *backend;
}

}  // namespace

// If a library is loaded by dlopen, glibc allocates a thread's thread-local storage of the library
// on first use, and ends the process if the allocation fails. So this function first tests whether
// malloc can give more memory than that. It remembers the answer in a pthreads key. If pthreads
// cannot store the answer, every call tests again. A thread_local flag would have to be
// initial-exec, and then the library could not be loaded after torch: with the CUDA runtime, its
// thread-local storage is larger than the space that glibc reserves for libraries loaded by dlopen.
bool can_report_errors() noexcept {
  static const ThreadFlag obtained;
  if (obtained.is_set()) return true;
  constexpr std::size_t kMoreThanNeeded = 32 << 10;
  void* const probe = std::malloc(kMoreThanNeeded);
  if (probe == nullptr) return false;
  std::free(probe);
  // Volatile, or the compiler would drop the calls, because nothing reads their results. The error
  // keeps its sentence: a thread whose flag cannot be stored comes here in every call.
  [[maybe_unused]] const void* volatile exceptions = abi::__cxa_get_globals();
  [[maybe_unused]] const void* volatile error = &last_error();
  obtained.set();
  return true;
}

void set_last_error(const char* sentence) noexcept {
  std::snprintf(last_error().sentence, sizeof(LastError::sentence), "%s", sentence);
}

}  // namespace sonicmoe::capi

using namespace sonicmoe;

extern "C" {

const char* smoe_version(void) { return version_string(); }

int32_t smoe_activation_is_gated(int32_t activation) {
  if (activation < 0 || activation >= kActivationCount) return -1;
  return is_gated(static_cast<ActivationKind>(activation)) ? 1 : 0;
}

const char* smoe_last_error(void) {
  return capi::can_report_errors() ? capi::last_error().sentence : capi::kNoMemory;
}

smoe_status smoe_device_open(int32_t ordinal, smoe_device** device) {
  return capi::guarded([&] {
    capi::refuse_null(device, "device");
    checks::at_least("ordinal", ordinal, 0);
    *device = static_cast<smoe_device*>(capi::device_backend().device_open(ordinal, nullptr));
  });
}

smoe_status smoe_device_open_with(const smoe_device_options* options, smoe_device** device) {
  return capi::guarded([&] {
    const smoe_device_options o = capi::read(options, "options");
    capi::refuse_null(device, "device");
    checks::at_least("ordinal", o.ordinal, 0);
    *device = static_cast<smoe_device*>(capi::device_backend().device_open(o.ordinal, o.engine));
  });
}

const char* smoe_engine_name(int32_t index) {
  const char* name = nullptr;
  capi::guarded([&] {
    const BackendTable* backend = find_backend(Backend::kCuda);
    if (backend == nullptr) return;
    const std::vector<EngineInfo> engines = backend->engines();
    if (index >= 0 && index < static_cast<int32_t>(engines.size())) name = engines[index].name;
  });
  return name;
}

const char* smoe_device_engine(const smoe_device* device) {
  const char* name = nullptr;
  capi::guarded([&] {
    if (device != nullptr) name = capi::device_backend().engine_name(device);
  });
  return name;
}

const char* smoe_device_engine_note(const smoe_device* device) {
  const char* note = nullptr;
  capi::guarded([&] {
    if (device != nullptr) note = capi::device_backend().engine_note(device);
  });
  return note;
}

smoe_status smoe_device_close(smoe_device* device) {
  return capi::guarded([&] {
    if (device != nullptr) capi::device_backend().device_close(device);
  });
}

}  // extern "C"
