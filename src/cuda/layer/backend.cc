#include "cuda/layer/backend.h"

#include "core/backend_table.h"
#include "cuda/device/device.h"
#include "cuda/layer/grouped_gemm.h"
#include "cuda/routing/routing.h"

namespace sonicmoe {

const BackendTable* cuda_backend() {
  static constexpr BackendTable kBackend = [] {
    BackendTable backend;
    backend.name = "cuda";
    backend.buffer_alignment = 256;
    backend.device_open = [](std::int32_t ordinal) -> void* {
      return const_cast<cuda::Device*>(cuda::open_device(ordinal));
    };
    backend.device_close = [](void* device) {
      cuda::close_device(static_cast<const cuda::Device*>(device));
    };
    backend.layer_tiles = &cuda::layer_tiles;
    backend.moe_sizes = &cuda::moe_sizes;
    backend.h_rows = &cuda::h_rows;
    backend.moe_forward = &cuda::moe_forward;
    backend.moe_backward = &cuda::moe_backward;
    backend.grouped_gemm_scratch_bytes = &cuda::grouped_gemm_scratch_bytes;
    backend.grouped_gemm = &cuda::grouped_gemm;
    backend.grouped_gemm_k = &cuda::grouped_gemm_k;
    backend.route = &cuda::route;
    backend.route_backward = &cuda::route_backward;
    backend.round_scratch_bytes = &cuda::round_scratch_bytes;
    backend.token_round = &cuda::token_round;
    backend.token_round_backward = &cuda::token_round_backward;
    backend.expert_choice_scratch_bytes = &cuda::expert_choice_scratch_bytes;
    backend.expert_choice = &cuda::expert_choice;
    backend.expert_choice_backward = &cuda::expert_choice_backward;
    backend.router_losses_scratch_bytes = &cuda::router_losses_scratch_bytes;
    backend.router_losses = &cuda::router_losses;
    backend.router_losses_backward = &cuda::router_losses_backward;
    return backend;
  }();
  return &kBackend;
}

}  // namespace sonicmoe
