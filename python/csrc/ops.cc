// The operators of the PyTorch package, against libtorch's stable ABI. They compute nothing
// themselves: they convert tensors to views, take scratch from torch's allocator, and call the
// public C++ API.
//
// One compiled library works with every torch from 2.10 on and every Python, because it uses no
// header of CPython and no C++ type of libtorch. The operators are internal: users call the
// functions of the package (docs/pytorch.md).
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>

#include "arguments.h"
#include "boxing.h"
#include "device_scope.h"
#include "exchange.h"
#include "fp8.h"
#include "grouped_gemm.h"
#include "h_views.h"
#include "layer.h"
#include "lora.h"
#include "packed.h"
#include "routing.h"
#include "sonicmoe/version.h"
#include "unpacking.h"

namespace sonicmoe_torch {
namespace {

struct NoArguments {
  auto fields() { return std::tuple<>(); }
  static std::string schema() { return ""; }
};

std::string version(NoArguments&) { return sonicmoe::version_string(); }

#define SONICMOE_DEVICE(ARGUMENT) ARGUMENT(std::int64_t, ordinal)
struct DeviceCall {
  SONICMOE_ARGUMENTS(SONICMOE_DEVICE)
};

/// The reason why a CUDA device cannot be used, or an empty string.
std::string cuda_problem(DeviceCall& a) {
  try {
    device_handle(int32("ordinal", a.ordinal));
    return "";
  } catch (const sonicmoe::Error& error) {
    return error.what();
  }
}

/// The names of the library's engines, separated by spaces.
std::string engine_names(NoArguments&) {
  std::string names;
  for (std::int32_t i = 0; smoe_engine_name(i) != nullptr; ++i) {
    names.append(i == 0 ? "" : " ").append(smoe_engine_name(i));
  }
  return names;
}

/// The architectures of the kernels, or "none: " and the reason why no kernels were built.
std::string cuda_build(NoArguments&) { return SONICMOE_CUDA_BUILD; }

/// The engine that calls on a CUDA device use.
std::string engine_of(DeviceCall& a) {
  return smoe_device_engine(device_handle(int32("ordinal", a.ordinal)));
}

/// Why that is not the engine that was asked for; empty if it is.
std::string engine_note(DeviceCall& a) {
  return smoe_device_engine_note(device_handle(int32("ordinal", a.ordinal)));
}

#define SONICMOE_ENGINE(ARGUMENT) ARGUMENT(std::int64_t, index)
struct EngineCall {
  SONICMOE_ARGUMENTS(SONICMOE_ENGINE)
};

/// Makes later calls on CUDA use this engine; -1: the library's choice. Returns the previous index.
std::int64_t use_engine(EngineCall& a) {
  if (a.index != -1 && (a.index < 0 || a.index > INT32_MAX ||
                        smoe_engine_name(static_cast<std::int32_t>(a.index)) == nullptr)) {
    throw std::invalid_argument("index is " + std::to_string(a.index) +
                                ", must be -1 or that of an engine of this build");
  }
  return chosen_engine.exchange(static_cast<std::int32_t>(a.index));
}

void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("moe_inference", &box<&moe_inference>);
  m.impl("moe_forward", &box<&moe_forward>);
  m.impl("moe_backward", &box<&moe_backward>);
  m.impl("moe_backward_accumulate", &box<&moe_backward_accumulate>);
  m.impl("lora_inference", &box<&lora_inference>);
  m.impl("lora_forward", &box<&lora_forward>);
  m.impl("lora_backward", &box<&lora_backward>);
  m.impl("exchange_bytes", &box<&exchange_bytes>);
  m.impl("exchange_open", &box<&exchange_open>);
  m.impl("exchange_check", &box<&exchange_check>);
  m.impl("exchange_reset", &box<&exchange_reset>);
  m.impl("exchange_inference", &box<&exchange_inference>);
  m.impl("exchange_forward", &box<&exchange_forward>);
  m.impl("exchange_backward", &box<&exchange_backward>);
  m.impl("exchange_backward_accumulate", &box<&exchange_backward_accumulate>);
  m.impl("exchange_begin_forward", &box<&exchange_begin_forward>);
  m.impl("exchange_compute_inference", &box<&exchange_compute_inference>);
  m.impl("exchange_compute_forward", &box<&exchange_compute_forward>);
  m.impl("exchange_begin_backward", &box<&exchange_begin_backward>);
  m.impl("exchange_begin_backward_accumulate", &box<&exchange_begin_backward_accumulate>);
  m.impl("exchange_compute_backward", &box<&exchange_compute_backward>);
  m.impl("exchange_finish", &box<&exchange_finish>);
  m.impl("quantize_weights", &box<&quantize_weights>);
  m.impl("unpack_weights", &box<&unpack_weights>);
  m.impl("unpacking_inference", &box<&unpacking_inference>);
  m.impl("unpacking_forward", &box<&unpacking_forward>);
  m.impl("unpacking_backward", &box<&unpacking_backward>);
  m.impl("auto_fp8_rows", &box<&auto_fp8_rows>);
  m.impl("h_views", &box<&h_views>);
  m.impl("grouped_gemm", &box<&grouped_gemm>);
  m.impl("grouped_gemm_k", &box<&grouped_gemm_k>);
  m.impl("route", &box<&route>);
  m.impl("route_backward", &box<&route_backward>);
  m.impl("token_round", &box<&token_round>);
  m.impl("token_round_backward", &box<&token_round_backward>);
  m.impl("expert_choice", &box<&expert_choice>);
  m.impl("expert_choice_backward", &box<&expert_choice_backward>);
  m.impl("router_losses", &box<&router_losses>);
  m.impl("router_losses_backward", &box<&router_losses_backward>);
}

}  // namespace
}  // namespace sonicmoe_torch

STABLE_TORCH_LIBRARY(sonicmoe_cpp, m) {
  using namespace sonicmoe_torch;
  const auto def = [&m](const char* name, const std::string& arguments,
                        const std::string& results) {
    std::string schema = name;
    schema.append("(").append(arguments).append(") -> ").append(results);
    m.def(schema.c_str());
  };
  const std::string pairs = std::string("(").append(PairArrays::schema()).append(")");

  def("version", NoArguments::schema(), "str");
  def("cuda_problem", DeviceCall::schema(), "str");
  def("engine_names", NoArguments::schema(), "str");
  def("cuda_build", NoArguments::schema(), "str");
  def("engine_of", DeviceCall::schema(), "str");
  def("engine_note", DeviceCall::schema(), "str");
  def("use_engine", EngineCall::schema(), "int");
  def("moe_inference", InferenceCall::schema(), "Tensor");
  def("moe_forward", ForwardCall::schema(), "(Tensor out, Tensor h, Tensor saved)");
  def("moe_backward", AloneBackwardCall::schema(),
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("moe_backward_accumulate", AloneAccumulateCall::schema(), "(Tensor, Tensor, Tensor, Tensor)");
  def("lora_inference", LoraInferenceCall::schema(), "Tensor");
  def("lora_forward", LoraInferenceCall::schema(), "(Tensor out, Tensor h, Tensor saved)");
  def("lora_backward", LoraBackwardCall::schema(),
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("exchange_bytes", ShapeCall::schema(), "int");
  def("exchange_open", OpenCall::schema(), "int");
  def("exchange_check", StateCall::schema(), "()");
  def("exchange_reset", StateCall::schema(), "()");
  def("exchange_inference", ExchangeInferenceCall::schema(), "Tensor");
  def("exchange_forward", ExchangeForwardCall::schema(),
      "(Tensor out, Tensor h, Tensor saved, Tensor kept_x)");
  for (const char* name : {"exchange_backward", "exchange_begin_backward"}) {
    def(name, ExchangeBackwardCall::schema(),
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  }
  for (const char* name : {"exchange_backward_accumulate", "exchange_begin_backward_accumulate"}) {
    def(name, ExchangeAccumulateCall::schema(), "(Tensor, Tensor, Tensor, Tensor)");
  }
  def("exchange_begin_forward", ExchangeBeginCall::schema(), "Tensor");
  def("exchange_compute_inference", ExchangeComputeCall::schema(), "()");
  def("exchange_compute_forward", ExchangeRecordCall::schema(),
      "(Tensor h, Tensor saved, Tensor kept_x)");
  def("exchange_compute_backward", StateCall::schema(), "()");
  def("exchange_finish", StateCall::schema(), "()");
  def("quantize_weights", WeightsCall::schema(), "Tensor");
  def("unpack_weights", UnpackCall::schema(), "()");
  def("unpacking_inference", UnpackingCall::schema(), "Tensor");
  def("unpacking_forward", UnpackingCall::schema(), "(Tensor out, Tensor h, Tensor saved)");
  def("unpacking_backward", UnpackingBackwardCall::schema(),
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  def("auto_fp8_rows", AutoRowsCall::schema(), "int");
  def("h_views", HViewsCall::schema(), "(int, int, int)");
  def("grouped_gemm", GroupedGemmCall::schema(), "Tensor");
  def("grouped_gemm_k", GroupedGemmCall::schema(), "Tensor");
  def("route", RouteCall::schema(), "(Tensor weights, Tensor ids)");
  def("route_backward", RouteBackwardCall::schema(), "Tensor");
  def("token_round", RoundCall::schema(), pairs);
  def("token_round_backward", RoundBackwardCall::schema(), "Tensor");
  def("expert_choice", ExpertChoiceCall::schema(), pairs);
  def("expert_choice_backward", ExpertChoiceBackwardCall::schema(), "Tensor");
  def("router_losses", LossesCall::schema(), "(Tensor values, Tensor tokens_per_expert)");
  def("router_losses_backward", LossesBackwardCall::schema(), "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CompositeExplicitAutograd, m) {
  using namespace sonicmoe_torch;
  m.impl("version", &box<&version>);
  m.impl("cuda_problem", &box<&cuda_problem>);
  m.impl("engine_names", &box<&engine_names>);
  m.impl("engine_note", &box<&engine_note>);
  m.impl("cuda_build", &box<&cuda_build>);
  m.impl("engine_of", &box<&engine_of>);
  m.impl("use_engine", &box<&use_engine>);
}

// The same functions serve CPU and CUDA: the tensors' device determines the backend
// (device_scope.h).
STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CPU, m) { sonicmoe_torch::implement(m); }
STABLE_TORCH_LIBRARY_IMPL(sonicmoe_cpp, CUDA, m) { sonicmoe_torch::implement(m); }
