#include "cuda/backend.h"

#include <tuple>

#include "cuda/device/architectures.h"
#include "cuda/engines.h"
#include "cuda/exchange/exchange.h"
#include "cuda/layer/checks.h"
#include "cuda/layer/grouped_gemm.h"
#include "cuda/layer/moe.h"
#include "cuda/layer/views.h"
#include "cuda/packed/unpack.h"
#include "cuda/routing/routing.h"

namespace sonicmoe {
namespace {

/// Makes the device of the last argument, an Exec, current during a call of kFunction.
template <auto kFunction, class Signature = decltype(kFunction)>
struct OnDevice;
template <auto kFunction, class... Args>
struct OnDevice<kFunction, void (*)(Args...)> {
  static void call(Args... args) {
    const Exec& exec = std::get<sizeof...(Args) - 1>(std::tie(args...));
    const cuda::CurrentDevice current(cuda::device_of(exec));
    kFunction(args...);
  }
};
template <auto kFunction>
inline constexpr auto on_device = &OnDevice<kFunction>::call;

}  // namespace

const BackendTable* cuda_backend() {
  static constexpr BackendTable kBackend = [] {
    BackendTable backend;
    backend.name = "cuda";
    backend.buffer_alignment = 256;
    backend.device_open = [](std::int32_t ordinal, const char* engine) -> void* {
      return const_cast<cuda::Device*>(cuda::open_device(ordinal, engine));
    };
    backend.device_close = [](void* device) {
      cuda::close_device(static_cast<const cuda::Device*>(device));
    };
    backend.device_model = [](std::int32_t capability) -> const void* {
      return cuda::device_model(capability);
    };
    backend.engines = [] {
      std::vector<EngineInfo> list;
      for (const cuda::Engine* engine : cuda::engines()) {
        list.push_back({engine->name, cuda::served_by(*engine), engine->choices});
      }
      return list;
    };
    backend.code_names = &cuda::code_names;
    backend.engine_name = [](const void* device) {
      return static_cast<const cuda::Device*>(device)->engine->name;
    };
    backend.engine_note = [](const void* device) {
      return cuda::engine_note(*static_cast<const cuda::Device*>(device));
    };
    backend.layer_tiles = [](const Problem& problem, const Exec& exec) {
      return cuda::engine_of(exec).describe(problem);
    };
    backend.refusal = [](const Problem& problem, const Exec& exec) {
      return cuda::refusal(problem, cuda::engine_of(exec));
    };
    backend.moe_sizes = [](const Problem& problem, Pass pass, const Exec& exec) {
      return cuda::moe_sizes(problem, pass, cuda::engine_of(exec));
    };
    backend.h_rows = &cuda::h_rows;
    backend.fast_fp8 = [](const Exec& exec) { return cuda::engine_of(exec).fast_fp8; };
    backend.quantize_weights = on_device<&cuda::quantize_weights>;
    backend.unpack_weights = on_device<&cuda::unpack_weights>;
    backend.moe_forward = on_device<&cuda::moe_forward>;
    backend.moe_backward = on_device<&cuda::moe_backward>;
    backend.packed_forward = on_device<&cuda::packed_forward>;
    backend.packed_backward = on_device<&cuda::packed_backward>;
    backend.grouped_gemm_scratch_bytes = &cuda::grouped_gemm_scratch_bytes;
    backend.grouped_gemm = on_device<&cuda::grouped_gemm>;
    backend.grouped_gemm_k = on_device<&cuda::grouped_gemm_k>;
    backend.route = on_device<&cuda::route>;
    backend.route_backward = on_device<&cuda::route_backward>;
    backend.round_scratch_bytes = &cuda::round_scratch_bytes;
    backend.token_round = on_device<&cuda::token_round>;
    backend.token_round_backward = on_device<&cuda::token_round_backward>;
    backend.expert_choice_scratch_bytes = &cuda::expert_choice_scratch_bytes;
    backend.expert_choice = on_device<&cuda::expert_choice>;
    backend.expert_choice_backward = on_device<&cuda::expert_choice_backward>;
    backend.router_losses_scratch_bytes = &cuda::router_losses_scratch_bytes;
    backend.router_losses = on_device<&cuda::router_losses>;
    backend.router_losses_backward = on_device<&cuda::router_losses_backward>;
    backend.exchange_bytes = &cuda::exchange_bytes;
    backend.exchange_open = &cuda::exchange_open;
    backend.exchange_close = &cuda::exchange_close;
    backend.exchange_state = [](const Exchange& e) -> const ExchangeState& { return e; };
    backend.exchange_check = &cuda::exchange_check;
    backend.exchange_reset = on_device<&cuda::exchange_reset>;
    backend.exchange_sizes = &cuda::exchange_sizes;
    backend.exchange_begin = &cuda::exchange_begin;
    backend.exchange_rows = &cuda::exchange_rows;
    backend.exchange_compute = &cuda::exchange_compute;
    backend.exchange_finish = &cuda::exchange_finish;
    return backend;
  }();
  return &kBackend;
}

}  // namespace sonicmoe
