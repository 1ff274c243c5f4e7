// Forward on CUDA: metadata, A (gather, up projection, activation), Y (down projection), O (sum).
#include <algorithm>
#include <string>

#include "core/observer.h"
#include "cuda/layer/backend.h"
#include "cuda/layer/moe.h"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {

namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// Where scratch goes, in order. At inference the metadata live here too.
struct ForwardScratch {
  std::int64_t a;         // (C, n)
  std::int64_t y;         // (C, d)
  std::int64_t counters;  // one for each product in drawn order
  std::int64_t metadata;  // its working memory
  std::int64_t saved;     // the metadata themselves, at inference
  std::int64_t bytes;
};

ForwardScratch scratch_layout(const Problem& p, bool training) {
  const std::int64_t capacity = row_capacity(p);
  ForwardScratch s{};
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t offset = at;
    at += aligned(bytes);
    return offset;
  };
  s.a = take(capacity * p.width * kElementBytes);
  s.y = take(capacity * p.hidden * kElementBytes);
  s.counters = take(kCounterBytes);
  s.metadata = take(metadata_scratch(p));
  s.saved = training ? at : take(metadata_layout(p, nullptr).bytes);
  s.bytes = at;
  return s;
}

void* offset(const Buffer& buffer, std::int64_t bytes) {
  return static_cast<std::uint8_t*>(buffer.data) + bytes;
}

void clear_rows(const Problem& p, const Tensor& out, cudaStream_t stream) {
  check_cuda(cudaMemset2DAsync(out.data, out.stride[0] * kElementBytes, 0, p.hidden * kElementBytes,
                               p.tokens, stream),
             "clearing the output");
}

struct Call {
  const Problem& problem;
  const ForwardArgs& args;
  const Device& device;
  const Metadata& metadata;
  cudaStream_t stream;
};

void launch_up(const Call& c, void* h, void* a, unsigned* counter) {
  const Problem& p = c.problem;
  const Weights& w = c.args.weights;
  const bool gated = is_gated(p.activation.kind);
  const Tiling tiling = gathered_tiling(mean_rows(p));
  const TileShape shape = tiling.shape();
  const std::int64_t capacity = row_capacity(p);
  const bool paired = gated && is_paired(w.gate, w.up);
  const Tensor first = paired ? pairs_of(w.gate) : gated ? w.gate : w.up;
  UpParams params{};
  params.producer = {c.args.x.data, c.metadata.row_token,
                     static_cast<std::int32_t>(c.args.x.stride[0] * kElementBytes),
                     static_cast<std::int32_t>(p.hidden)};
  params.b.map[0] = weight_map(c.device, first, shape);
  if (gated && !paired) params.b.map[1] = weight_map(c.device, w.up, shape);
  unsigned* drawn = tiling.counter(counter);
  params.tiles =
      paired ? row_tiles(c.metadata, 2 * p.width, shape.n, p.hidden, drawn)
             : row_tiles(c.metadata, p.width, gated ? shape.n / 2 : shape.n, p.hidden, drawn);
  params.epilogue.keep_h = h != nullptr ? 1 : 0;
  if (h != nullptr) {
    params.epilogue.h = ragged_map(c.device, h_rows(p, w, h));
  }
  params.epilogue.a = ragged_map(c.device, tensor2(a, p.dtype, capacity, p.width));
  params.epilogue.bias[0] = bias_of(gated ? w.b_gate : w.b_up);
  params.epilogue.bias[1] = bias_of(w.b_up);
  params.epilogue.scalars = scalars_of(p.activation);
  params.epilogue.width = static_cast<std::int32_t>(p.width);
  const KernelEntry& kernel = find_kernel({paired ? Role::kUpPaired : Role::kUp, p.dtype,
                                           tiling.tile, major_of(first), p.activation.kind});
  launch_gemm(c.device, kernel, &params, most_tiles(p, params.tiles), c.stream);
}

void launch_down(const Call& c, void* a, const Tensor& y, unsigned* counter) {
  const Problem& p = c.problem;
  const Weights& w = c.args.weights;
  const bool scaled = p.form == RoutingForm::kGrouped && c.args.routing.weights.data != nullptr;
  const Tiling tiling =
      scaled ? scaled_row_tiling(p.width) : row_tiling(p.hidden, p.width, mean_rows(p));
  const TileShape shape = tiling.shape();
  const std::int64_t capacity = row_capacity(p);
  DownParams params{};
  params.producer.rows = rows_map(c.device, tensor2(a, p.dtype, capacity, p.width), shape.m);
  params.b.map[0] = weight_map(c.device, w.down, shape);
  params.tiles = row_tiles(c.metadata, p.hidden, shape.n, p.width, tiling.counter(counter));
  params.tiles.band = row_band(p.hidden, p.width);
  params.epilogue.out = ragged_map(c.device, y);
  if (scaled) {
    params.epilogue.row_scale = static_cast<const float*>(c.args.routing.weights.data);
    params.epilogue.scale_stride = c.args.routing.weights.stride[0];
  }
  params.epilogue.bias = bias_of(w.b_down);
  params.epilogue.width = static_cast<std::int32_t>(p.hidden);
  const KernelEntry& kernel = find_kernel({scaled ? Role::kDownScaled : Role::kDown, p.dtype,
                                           tiling.tile, major_of(w.down), ActivationKind::kSwiGLU});
  launch_gemm(c.device, kernel, &params, most_tiles(p, params.tiles), c.stream);
}

}  // namespace

Sizes moe_sizes(const Problem& problem, Pass pass, const Exec&) {
  check_problem(problem);
  const std::int64_t capacity = row_capacity(problem);
  const bool training = pass != Pass::kInference;
  Sizes sizes;
  if (training) {
    sizes.h_bytes = gate_factor(problem.activation.kind) * capacity * problem.width * kElementBytes;
    sizes.saved_bytes = metadata_layout(problem, nullptr).bytes;
  }
  sizes.scratch_bytes = pass == Pass::kBackward ? backward_scratch_bytes(problem)
                                                : scratch_layout(problem, training).bytes;
  return sizes;
}

void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec) {
  const Device& device = device_of(exec);
  check_problem(problem);
  check_rows("x", args.x);
  check_rows("out", args.out);
  check_weights(problem, args.weights);
  const cudaStream_t stream = stream_of(exec);
  if (problem.tokens == 0) return;
  if (row_capacity(problem) == 0) {
    clear_rows(problem, args.out, stream);
    return;
  }
  const bool training = args.saved.data != nullptr;
  const ForwardScratch scratch = scratch_layout(problem, training);
  const Metadata metadata =
      metadata_layout(problem, training ? args.saved.data : offset(args.scratch, scratch.saved));
  void* a = offset(args.scratch, scratch.a);
  void* y = offset(args.scratch, scratch.y);
  auto* counters = static_cast<unsigned*>(offset(args.scratch, scratch.counters));
  const Call call{problem, args, device, metadata, stream};
  observed(exec, "metadata", [&] {
    build_metadata(device, problem, args.routing, metadata,
                   {offset(args.scratch, scratch.metadata), counters, kCounterBytes / 4}, stream);
  });
  observed(exec, "A", [&] { launch_up(call, training ? args.h.data : nullptr, a, counters); });
  if (problem.form == RoutingForm::kGrouped) {
    // Row p of Y is row p of the output; rows in no group are zero.
    clear_rows(problem, args.out, stream);
    observed(exec, "Y", [&] { launch_down(call, a, args.out, counters + 1); });
    return;
  }
  const Tensor rows = tensor2(y, problem.dtype, row_capacity(problem), problem.hidden);
  observed(exec, "Y", [&] { launch_down(call, a, rows, counters + 1); });
  observed(exec, "O",
           [&] { sum_rows(device, problem, metadata, y, args.routing.weights, args.out, stream); });
}

}  // namespace sonicmoe::cuda
