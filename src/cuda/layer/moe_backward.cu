// Backward on CUDA: dH (with A' and dS), dW2, dX~, dW1, dX, and the biases.
#include <algorithm>

#include "core/observer.h"
#include "cuda/layer/backend.h"
#include "cuda/layer/moe.h"
#include "cuda/sums/gradients.h"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {
namespace {

struct BackwardScratch {
  std::int64_t dh;       // (C, G, n)
  std::int64_t a;        // (C, n) A'
  std::int64_t dx;       // (C, d) dX~
  std::int64_t weights;  // (C) scores by row
  std::int64_t parts;    // (C, score tiles)
  std::int64_t experts;  // (E)
  std::int64_t counters;
  std::int64_t bytes;
};

std::int32_t score_tiles(const Problem& p) {
  constexpr int across = kCoop128x256Grad.n;
  return static_cast<std::int32_t>((p.width + across - 1) / across);
}

BackwardScratch scratch_layout(const Problem& p) {
  const std::int64_t capacity = row_capacity(p);
  BackwardScratch s{};
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::int64_t offset = at;
    at += (bytes + 255) / 256 * 256;
    return offset;
  };
  s.dh = take(gate_factor(p.activation.kind) * capacity * p.width * kElementBytes);
  s.a = take(capacity * p.width * kElementBytes);
  s.dx = take(capacity * p.hidden * kElementBytes);
  s.weights = take(capacity * 4);
  s.parts = take(capacity * score_tiles(p) * 4);
  s.experts = take(p.experts * static_cast<std::int64_t>(sizeof(ExpertRecord)));
  s.counters = take(kCounterBytes);
  s.bytes = at;
  return s;
}

/// The matrices of a weight, seen as the operand of a product over its other dimension.
Tensor swapped(const Tensor& weight) {
  Tensor t = weight;
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

struct Call {
  const Problem& problem;
  const BackwardArgs& args;
  const Device& device;
  const Metadata& metadata;
  cudaStream_t stream;
  Tensor dh;           // h_rows()
  Tensor a;            // (C, n)
  Tensor dx;           // (C, d)
  float* row_weights;  // (C)
  float* parts;
  const ExpertRecord* experts;
  unsigned* counters;  // one a product
  bool input_first;    // dX~ before the weight gradients, which end beside the sums
};

bool has_up_grads(const Weights& g) { return g.gate.data != nullptr || g.up.data != nullptr; }
bool has_weight_grads(const Weights& g) { return has_up_grads(g) || g.down.data != nullptr; }

bool gated(const Call& c) { return is_gated(c.problem.activation.kind); }
bool paired(const Call& c) { return gated(c) && is_paired(c.args.weights.gate, c.args.weights.up); }

GatherRows::Params gathered(const Call& c, const Tensor& rows, std::int64_t width) {
  return {rows.data, c.metadata.row_token,
          static_cast<std::int32_t>(rows.stride[0] * kElementBytes),
          static_cast<std::int32_t>(width)};
}

constexpr int kHiddenGradCounter = 4;
constexpr int kToldCounter = 8;  // behind those of the products

constexpr std::int64_t kNarrowest = 512;  // columns of A: below, dX~ moves more than it multiplies

/// Counts the CTAs of dH that have told.
unsigned* told_counter(const Call& c) { return c.counters + kToldCounter; }

/// The tiles of dH, and those of them, the first quarter, that dX~ finds in memory when it is
/// launched: beside the last tiles. These are whole rounds, so that none of them is a cut one even
/// where most rows turn out to be unused.
struct HiddenGradTiles {
  Tiling tiling;
  RowTiles::Params params;
  std::int64_t clusters;
  std::int64_t told;

  std::int32_t tellers() const {
    return static_cast<std::int32_t>(clusters * tiling.shape().cluster);
  }
};

HiddenGradTiles hidden_grad_tiles(const Call& c) {
  const Problem& p = c.problem;
  const std::int64_t rows = mean_rows(p);
  HiddenGradTiles tiles{};
  tiles.tiling = hidden_grad_tiling(rows);
  const TileShape shape = tiles.tiling.shape();
  tiles.params = row_tiles(c.metadata, p.width, shape.n, p.hidden,
                           tiles.tiling.counter(c.counters + kHiddenGradCounter));
  tiles.clusters = clusters_of(c.device, shape, most_tiles(p, tiles.params));
  if (cuts_last_round(rows)) tiles.params.round = divisor(tiles.clusters);
  // Worth it where a cluster has few tiles and dX~ does not need their bandwidth.
  constexpr std::int64_t kFewTiles = 24;
  const std::int64_t shares = row_capacity(p) / kRecordRows * tiles.params.column_tiles;
  const std::int64_t each = shares / shape.cluster / tiles.clusters;
  const bool tells = c.input_first && p.width >= kNarrowest && each < kFewTiles;
  tiles.told = tells ? each / 4 * tiles.clusters : 0;
  return tiles;
}

/// Tiles of dX~ whose rows lie in those tiles of dH. A pair of records may straddle dH's end, a
/// band of pairs that of dX~.
std::int64_t early_tiles(const HiddenGradTiles& grad, const RowTiles::Params& tiles,
                         const TileShape& shape) {
  const std::int64_t shares = grad.told * grad.tiling.shape().cluster;
  const std::int64_t records = shares / grad.params.column_tiles - 2 - 2 * tiles.band;
  return std::max<std::int64_t>(0, records * tiles.column_tiles / shape.cluster);
}

void launch_hidden_grad(const Call& c) {
  const Problem& p = c.problem;
  const HiddenGradTiles tiles = hidden_grad_tiles(c);
  const TileShape shape = tiles.tiling.shape();
  const Tensor down = swapped(c.args.weights.down);
  Tensor h = c.dh;
  h.data = c.args.h.data;
  HiddenGradParams params{};
  params.producer = gathered(c, c.args.dout, p.hidden);
  params.b.map[0] = weight_map(c.device, down, shape);
  params.tiles = tiles.params;
  params.told_tiles = static_cast<std::int32_t>(tiles.told);
  params.told = told_counter(c);
  params.epilogue.h_in = rows_map(c.device, h, shape.m, kGradColumns);
  params.epilogue.dh = ragged_map(c.device, c.dh, kGradColumns);
  params.epilogue.a = ragged_map(c.device, c.a, kGradColumns);
  params.epilogue.row_weight = c.row_weights;
  params.epilogue.score_parts = c.parts;
  params.epilogue.score_tiles = score_tiles(p);
  params.epilogue.width = static_cast<std::int32_t>(p.width);
  params.epilogue.scalars = scalars_of(p.activation);
  const KernelEntry& kernel =
      find_kernel({paired(c) ? Role::kHiddenGradPaired : Role::kHiddenGrad, p.dtype,
                   tiles.tiling.tile, major_of(down), p.activation.kind});
  launch_gemm(c.device, kernel, &params, most_tiles(p, params.tiles), c.stream);
}

/// dX~ = dH W1: K runs through the gate, then through up, or through both as they alternate.
void launch_input_grad(const Call& c) {
  const Problem& p = c.problem;
  const Weights& w = c.args.weights;
  const Tiling tiling = row_tiling(p.hidden, p.width * (gated(c) ? 2 : 1), mean_rows(p));
  const TileShape shape = tiling.shape();
  const bool in_turn = gated(c) && !paired(c);
  const Tensor first = swapped(paired(c) ? pairs_of(w.gate) : gated(c) ? w.gate : w.up);
  DownParams params{};
  params.producer.rows = rows_map(c.device, c.dh, shape.m);
  params.b.map[0] = weight_map(c.device, first, shape);
  if (in_turn) params.b.map[1] = weight_map(c.device, swapped(w.up), shape);
  params.tiles =
      row_tiles(c.metadata, p.hidden, shape.n, first.shape[2], tiling.counter(c.counters));
  params.tiles.k_parts = in_turn ? 2 : 1;
  params.tiles.band = row_band(p.hidden, p.width * (gated(c) ? 2 : 1));
  const HiddenGradTiles before = hidden_grad_tiles(c);
  params.early_tiles = static_cast<std::int32_t>(early_tiles(before, params.tiles, shape));
  if (params.early_tiles > 0) {
    params.begins = Begins::kEarly;
    params.told = told_counter(c);
    params.tellers = before.tellers();
  } else if (!c.input_first && has_weight_grads(c.args.grads)) {
    params.begins = Begins::kIndependent;
  }
  params.epilogue.out = ragged_map(c.device, c.dx);
  params.epilogue.width = static_cast<std::int32_t>(p.hidden);
  const KernelEntry& kernel =
      find_kernel({Role::kDown, p.dtype, tiling.tile, major_of(first), ActivationKind::kSwiGLU});
  launch_gemm(c.device, kernel, &params, most_tiles(p, params.tiles), c.stream);
}

/// A weight gradient, seen as (E, M = d, N), from gathered rows (T, d) and grouped rows (C, N), or
/// `part` of (C, parts, N). It is `outputs` matrices side by side along N, or two whose columns
/// alternate.
struct WeightGrad {
  Tensor gathered;
  Tensor rows;
  std::int32_t part;
  std::int32_t outputs;
  std::int32_t alternate;
  unsigned* counter;
  bool independent;  // of the kernel before
  Tensor out[2];
};

/// Where experts are narrow the weight gradients are short: at n = 256 they cover three quarters of
/// the sum beside them, and more if they leave it some multiprocessors of its own.
bool leaves_room(const Call& c, std::int64_t clusters) {
  constexpr std::int64_t kMany = 64;
  return c.input_first && c.problem.width < kNarrowest && clusters > kMany;
}

void launch_weight_grad(const Call& c, const WeightGrad& g) {
  const Problem& p = c.problem;
  const Tiling tiling = gathered_tiling(mean_rows(p));
  const TileShape shape = tiling.shape();
  const Major order = major_of(g.out[0]);
  const std::int64_t columns = g.rows.shape[g.rows.rank - 1];
  WeightGradParams params{};
  params.producer = gathered(c, g.gathered, p.hidden);
  params.b.map[0] = rows_map(c.device, g.rows, kDepth);
  params.b.part = g.part;
  params.tiles =
      expert_tiles(c.metadata, tensor3(nullptr, p.dtype, p.experts, p.hidden, columns), shape);
  params.begins = g.independent ? Begins::kIndependent : Begins::kLate;
  params.tiles.order = c.experts;
  params.tiles.counter = tiling.counter(g.counter);
  StoreExpertParams& epilogue = params.epilogue;
  epilogue.rows = params.tiles.rows;
  epilogue.columns = static_cast<std::int32_t>(columns);
  epilogue.border = g.outputs == 2 ? epilogue.columns / 2 : params.tiles.column_tiles * shape.n;
  epilogue.alternate = g.alternate;
  for (int part = 0; part < 2; part++) {
    const Tensor& out = g.out[part];
    if (out.data == nullptr) continue;
    if (out.dtype == DType::kF32) {
      epilogue.mode =
          c.args.grad_mode == GradMode::kAccumulate ? GradStore::kAccumulate : GradStore::kFloat;
      epilogue.floats[part].data = static_cast<float*>(out.data);
      std::copy_n(out.stride, 3, epilogue.floats[part].strides);
    } else {
      epilogue.map[part] = matrices_map(c.device, out);
    }
  }
  const KernelEntry& kernel =
      find_kernel({Role::kWeightGrad, p.dtype, tiling.tile, order, ActivationKind::kSwiGLU});
  const std::int64_t clusters = clusters_of(c.device, shape, p.experts * params.tiles.each.by);
  launch_gemm(c.device, kernel, &params, clusters - (leaves_room(c, clusters) ? 2 : 0), c.stream);
}

void launch_down_grad(const Call& c) {
  const Tensor& down = c.args.grads.down;
  if (down.data == nullptr) return;
  launch_weight_grad(c, {c.args.dout, c.a, 0, 1, 0, c.counters + 1, c.input_first, {down}});
}

void launch_up_grads(const Call& c) {
  const Problem& p = c.problem;
  const Weights& g = c.args.grads;
  const Tensor gate = swapped(g.gate);
  const Tensor up = swapped(g.up);
  // Whether another product that reads dH came before.
  const bool second = c.input_first || g.down.data != nullptr;
  if (has_up_grads(g) && paired(c)) {
    const bool floats = (gate.data != nullptr ? gate : up).dtype == DType::kF32;
    const Tensor pairs = swapped(pairs_of(g.gate));
    launch_weight_grad(c, {c.args.x,
                           c.dh,
                           0,
                           1,
                           1,
                           c.counters + 2,
                           second,
                           {floats ? gate : pairs, floats ? up : Tensor{}}});
    return;
  }
  const bool both = gate.data != nullptr && up.data != nullptr;
  if (both && gate.dtype == up.dtype && major_of(gate) == major_of(up) && p.width % 64 == 0) {
    const Tensor rows = tensor2(c.dh.data, p.dtype, c.dh.shape[0], 2 * p.width);
    launch_weight_grad(c, {c.args.x, rows, 0, 2, 0, c.counters + 2, second, {gate, up}});
    return;
  }
  if (gate.data != nullptr) {
    launch_weight_grad(c, {c.args.x, c.dh, 0, 1, 0, c.counters + 2, second, {gate}});
  }
  if (up.data != nullptr) {
    launch_weight_grad(c, {c.args.x,
                           c.dh,
                           gated(c) ? 1 : 0,
                           1,
                           0,
                           c.counters + 3,
                           second || gate.data != nullptr,
                           {up}});
  }
}

/// Few rows make weight gradients that only stream: nothing fits beside them.
bool input_goes_first(const Problem& p, const BackwardArgs& args) {
  constexpr std::int64_t kFewRows = 256;
  return args.dx.data != nullptr && has_weight_grads(args.grads) && mean_rows(p) >= kFewRows;
}

void launch_bias_grads(const Call& c) {
  const Weights& g = c.args.grads;
  const std::int64_t n = c.problem.width;
  const auto hidden = [&](const Tensor& out, std::int64_t part, const Tensor* odd) {
    if (out.data == nullptr && (odd == nullptr || odd->data == nullptr)) return;
    const auto* rows = static_cast<const std::uint16_t*>(c.dh.data) + part * n;
    sum_columns(c.problem, c.metadata,
                {rows, c.dh.stride[0], nullptr, nullptr, out, c.args.grad_mode, odd}, c.stream);
  };
  if (paired(c)) {
    hidden(g.b_gate, 0, &g.b_up);
  } else {
    hidden(g.b_gate, 0, nullptr);
    hidden(g.b_up, gated(c) ? 1 : 0, nullptr);
  }
  if (g.b_down.data != nullptr) {
    sum_columns(c.problem, c.metadata,
                {c.args.dout.data, c.args.dout.stride[0], c.metadata.row_token, c.row_weights,
                 g.b_down, c.args.grad_mode},
                c.stream);
  }
}

void launch_scores(const Call& c) {
  if (c.args.dweights.data == nullptr) return;
  finish_scores(c.device, c.problem, c.metadata,
                {c.parts, score_tiles(c.problem), c.args.dout, c.args.weights.b_down,
                 c.args.dweights, c.input_first},
                c.stream);
}

/// How many tokens are summed beside dW2 already.
std::int64_t tokens_beside_down(const Call& c) {
  constexpr std::int64_t kNarrow = 768;
  const Weights& g = c.args.grads;
  const bool split = c.input_first && g.down.data != nullptr && has_up_grads(g);
  if (!split || c.problem.width >= kNarrow) return 0;
  return c.problem.tokens / (c.problem.width < kNarrowest ? 4 : 5);
}

void launch_first_sum(const Call& c) {
  sum_rows_beside(c.device, c.problem, c.metadata, c.dx.data, c.args.dx, {0, tokens_beside_down(c)},
                  c.stream);
}

void launch_last_sum(const Call& c) {
  if (c.input_first) {
    const std::int64_t first = tokens_beside_down(c);
    sum_rows_beside(c.device, c.problem, c.metadata, c.dx.data, c.args.dx,
                    {first, c.problem.tokens - first}, c.stream);
  } else {
    sum_rows(c.device, c.problem, c.metadata, c.dx.data, Tensor{}, c.args.dx, c.stream);
  }
}

/// No rows at all: every gradient that is written is zero.
void clear_gradients(const BackwardArgs& args, cudaStream_t stream) {
  if (args.dx.data != nullptr) clear(args.dx, stream);
  if (args.dweights.data != nullptr) clear(args.dweights, stream);
  if (args.grad_mode == GradMode::kAccumulate) return;
  const Weights& g = args.grads;
  for (const Tensor* t : {&g.gate, &g.up, &g.down, &g.b_gate, &g.b_up, &g.b_down}) {
    if (t->data != nullptr) clear(*t, stream);
  }
}

}  // namespace

std::int64_t backward_scratch_bytes(const Problem& problem) {
  return scratch_layout(problem).bytes;
}

void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec) {
  const Device& device = device_of(exec);
  check_problem(problem);
  check_rows("x", args.x);
  check_rows("dout", args.dout);
  if (args.dx.data != nullptr) check_rows("dx", args.dx);
  check_weights(problem, args.weights);
  check_grads(problem, args.weights, args.grads);
  const cudaStream_t stream = stream_of(exec);
  const std::int64_t capacity = row_capacity(problem);
  if (capacity == 0 || problem.tokens == 0) {
    clear_gradients(args, stream);
    return;
  }
  const BackwardScratch s = scratch_layout(problem);
  const Metadata metadata = metadata_layout(problem, args.saved.data);
  const auto at = [&](std::int64_t offset) {
    return static_cast<void*>(static_cast<std::uint8_t*>(args.scratch.data) + offset);
  };
  const Call call{problem,
                  args,
                  device,
                  metadata,
                  stream,
                  h_rows(problem, args.weights, at(s.dh)),
                  tensor2(at(s.a), problem.dtype, capacity, problem.width),
                  tensor2(at(s.dx), problem.dtype, capacity, problem.hidden),
                  static_cast<float*>(at(s.weights)),
                  static_cast<float*>(at(s.parts)),
                  static_cast<const ExpertRecord*>(at(s.experts)),
                  static_cast<unsigned*>(at(s.counters)),
                  input_goes_first(problem, args)};
  observed(exec, "metadata", [&] {
    make_row_lists(device, problem, metadata, args.routing.weights,
                   {call.row_weights, static_cast<ExpertRecord*>(at(s.experts)), call.counters,
                    kCounterBytes / 4},
                   args.dweights, stream);
  });
  observed(exec, "dH", [&] { launch_hidden_grad(call); });
  observed(exec, "biases", [&] { launch_bias_grads(call); });
  if (!call.input_first) observed(exec, "dS", [&] { launch_scores(call); });
  if (call.input_first) observed(exec, "dX~", [&] { launch_input_grad(call); });
  observed(exec, "dW2", [&] { launch_down_grad(call); });
  if (tokens_beside_down(call) > 0) observed(exec, "dX", [&] { launch_first_sum(call); });
  observed(exec, "dW1", [&] { launch_up_grads(call); });
  if (call.input_first) observed(exec, "dS", [&] { launch_scores(call); });
  if (args.dx.data == nullptr) return;
  if (!call.input_first) observed(exec, "dX~", [&] { launch_input_grad(call); });
  observed(exec, "dX", [&] { launch_last_sum(call); });
}

}  // namespace sonicmoe::cuda
