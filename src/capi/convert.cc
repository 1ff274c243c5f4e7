#include "capi/convert.h"

#include <algorithm>

namespace sonicmoe::capi {
namespace {

// A larger size field means an uninitialised struct, not a newer version.
constexpr std::size_t kLargestStruct = 4096;

[[noreturn]] void refuse(Status status, const std::string& sentence) {
  throw Error(status, sentence);
}

Tensor convert(const smoe_tensor* given, const char* name) {
  const smoe_tensor t = read(given, name);
  refuse_reserved(t.reserved, name);
  Tensor result{t.data, static_cast<DType>(t.dtype), t.rank, {}, {}};
  std::copy_n(t.shape, 3, result.shape);
  std::copy_n(t.stride, 3, result.stride);
  return result;
}

// Buffer has a pointer to mutable memory, also for memory that a call only reads.
Buffer input_buffer(const void* data, std::int64_t bytes) {
  return {const_cast<void*>(data), bytes};
}

}  // namespace

void refuse_null(const void* pointer, const char* name) {
  if (pointer == nullptr) {
    refuse(Status::kInvalidArgument, std::string(name) + " is null, must not be null");
  }
}

void refuse_reserved(std::int64_t value, const char* name) {
  if (value != 0) {
    refuse(Status::kInvalidArgument,
           std::string(name) + ".reserved is " + std::to_string(value) + ", must be 0");
  }
}

std::size_t check_size(const void* data, const char* name, std::size_t first, std::size_t known) {
  std::uint32_t size = 0;
  std::memcpy(&size, data, sizeof(size));
  if (size < first || size > kLargestStruct) {
    refuse(Status::kInvalidArgument, std::string(name) + ".size is " + std::to_string(size) +
                                         ", must be sizeof the struct, " + std::to_string(known));
  }
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (std::size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      refuse(Status::kUnsupported, std::string(name) + " uses byte " + std::to_string(i) +
                                       ", must be zero from byte " + std::to_string(known) +
                                       " on in version " SONICMOE_VERSION_STRING);
    }
  }
  return std::min<std::size_t>(size, known);
}

Tensor required(const smoe_tensor* given, const char* name) { return convert(given, name); }

Tensor optional(const smoe_tensor* given, const char* name) {
  return given == nullptr ? Tensor{} : convert(given, name);
}

Exec exec(const smoe_exec* given) {
  if (given == nullptr) return {};
  const smoe_exec e = read(given, "exec");
  refuse_reserved(e.reserved, "exec");
  return {static_cast<Backend>(e.backend), e.num_threads, e.device, e.stream};
}

// The structs below have grown: the first version of each ends before the field named here.
constexpr std::size_t kFirstProblem = offsetof(smoe_problem, precision);
constexpr std::size_t kFirstForwardArgs = offsetof(smoe_forward_args, fp8_weights);
constexpr std::size_t kFirstBackwardArgs = offsetof(smoe_backward_args, fp8_weights);

Problem problem(const smoe_problem* given) {
  const smoe_problem p = read(given, "problem", kFirstProblem);
  Problem result;
  result.tokens = p.tokens;
  result.hidden = p.hidden;
  result.width = p.width;
  result.experts = p.experts;
  result.top_k = p.top_k;
  result.capacity = p.capacity;
  result.form = static_cast<RoutingForm>(p.form);
  result.dtype = static_cast<DType>(p.dtype);
  result.activation = {static_cast<ActivationKind>(p.activation), p.alpha, p.limit};
  result.precision = static_cast<Precision>(p.precision);
  result.kept_h = static_cast<KeptH>(p.kept_h);
  refuse_reserved(p.reserved, "problem");
  result.up_rank = p.up_rank;
  result.down_rank = p.down_rank;
  if (p.f32_factors != 0 && p.f32_factors != 1) {
    refuse(Status::kInvalidArgument,
           "problem.f32_factors is " + std::to_string(p.f32_factors) + ", must be 0 or 1");
  }
  result.f32_factors = p.f32_factors == 1;
  return result;
}

Routing routing(const smoe_routing* given) {
  const smoe_routing r = read(given, "routing");
  refuse_reserved(r.reserved, "routing");
  return {optional(r.ids, "routing.ids"),
          optional(r.weights, "routing.weights"),
          optional(r.token, "routing.token"),
          optional(r.expert, "routing.expert"),
          optional(r.row_begin, "routing.row_begin"),
          optional(r.row_count, "routing.row_count")};
}

Weights weights(const smoe_weights* given, const char* name) {
  const smoe_weights w = read(given, name);
  refuse_reserved(w.reserved, name);
  const auto member = [name](const smoe_tensor* t, const char* field) {
    return optional(t, (std::string(name) + field).c_str());
  };
  return {member(w.gate, ".gate"),     member(w.up, ".up"),     member(w.down, ".down"),
          member(w.b_gate, ".b_gate"), member(w.b_up, ".b_up"), member(w.b_down, ".b_down")};
}

PackedWeights packed_weights(const smoe_packed_weights* given) {
  const smoe_packed_weights p = read(given, "packed");
  PackedWeights result;
  result.format = static_cast<PackedFormat>(p.format);
  result.experts = p.experts;
  result.rows = p.rows;
  result.columns = p.columns;
  result.block = p.block;
  result.codes = input_buffer(p.codes, p.codes_bytes);
  result.scales = input_buffer(p.scales, p.scales_bytes);
  result.nested_map = input_buffer(p.nested_map, p.nested_map_bytes);
  result.nested_scales = input_buffer(p.nested_scales, p.nested_scales_bytes);
  result.nested_offset = input_buffer(p.nested_offset, p.nested_offset_bytes);
  return result;
}

namespace {

LowRank low_rank(const smoe_low_rank* given, const std::string& name) {
  if (given == nullptr) return {};
  const smoe_low_rank f = read(given, name.c_str());
  refuse_reserved(f.reserved, name.c_str());
  const auto member = [&](const smoe_tensor* t, const char* field) {
    return optional(t, (name + field).c_str());
  };
  return {member(f.a, ".a"), member(f.b, ".b"), member(f.gate_b, ".gate_b"),
          f.scale != 0.0 ? f.scale : 1.0};
}

}  // namespace

Lora lora(const smoe_lora* given, const char* name) {
  if (given == nullptr) return {};
  const smoe_lora l = read(given, name);
  refuse_reserved(l.reserved, name);
  return {low_rank(l.up, std::string(name) + ".up"), low_rank(l.down, std::string(name) + ".down")};
}

RouteOptions route_options(const smoe_route_options* given) {
  const smoe_route_options o = read(given, "route options");
  refuse_reserved(o.reserved, "route options");
  RouteOptions result;
  result.top_k = o.top_k;
  result.score = static_cast<ScoreMode>(o.score);
  result.renormalize = o.renormalize;
  if (o.scale != 0.0) result.scale = o.scale;
  result.bias = optional(o.bias, "bias");
  result.n_group = o.n_group;
  result.topk_group = o.topk_group;
  return result;
}

RoundOptions round_options(const smoe_round_options* given) {
  const smoe_round_options o = read(given, "round options");
  RoundOptions result;
  result.route = route_options(o.route);
  if (o.tile != 0) result.tile = o.tile;
  result.mode = static_cast<RoundingMode>(o.mode);
  result.seed = o.seed;
  return result;
}

Pairs pairs(const smoe_pairs* given) {
  const smoe_pairs p = read(given, "pairs");
  refuse_reserved(p.reserved, "pairs");
  return {required(p.token, "pairs.token"), required(p.expert, "pairs.expert"),
          required(p.weight, "pairs.weight"), required(p.offsets, "pairs.offsets")};
}

ForwardArgs forward_args(const smoe_forward_args* args) {
  const smoe_forward_args a = read(args, "args", kFirstForwardArgs);
  ForwardArgs forward;
  forward.x = required(a.x, "x");
  forward.routing = routing(a.routing);
  forward.weights = weights(a.weights, "weights");
  forward.out = required(a.out, "out");
  forward.h = {a.h, a.h_bytes};
  forward.saved = {a.saved, a.saved_bytes};
  forward.scratch = {a.scratch, a.scratch_bytes};
  forward.fp8_weights = input_buffer(a.fp8_weights, a.fp8_weights_bytes);
  forward.lora = lora(a.lora, "lora");
  return forward;
}

BackwardArgs backward_args(const smoe_backward_args* args) {
  const smoe_backward_args a = read(args, "args", kFirstBackwardArgs);
  BackwardArgs backward;
  backward.x = required(a.x, "x");
  backward.routing = routing(a.routing);
  backward.weights = weights(a.weights, "weights");
  backward.dout = required(a.dout, "dout");
  backward.h = input_buffer(a.h, a.h_bytes);
  backward.saved = input_buffer(a.saved, a.saved_bytes);
  backward.scratch = {a.scratch, a.scratch_bytes};
  backward.dx = optional(a.dx, "dx");
  backward.dweights = optional(a.dweights, "dweights");
  if (a.grads != nullptr) backward.grads = weights(a.grads, "grads");
  backward.grad_mode = static_cast<GradMode>(a.grad_mode);
  backward.fp8_weights = input_buffer(a.fp8_weights, a.fp8_weights_bytes);
  backward.lora = lora(a.lora, "lora");
  backward.lora_grads = lora(a.lora_grads, "lora_grads");
  return backward;
}

Buffer kept_rows(const smoe_forward_args* args) {
  const smoe_forward_args a = read(args, "args", kFirstForwardArgs);
  return {a.kept_x, a.kept_x_bytes};
}

Buffer kept_rows(const smoe_backward_args* args) {
  const smoe_backward_args a = read(args, "args", kFirstBackwardArgs);
  return input_buffer(a.kept_x, a.kept_x_bytes);
}

void refuse_kept_rows(const Buffer& kept_x) {
  if (kept_x.data == nullptr && kept_x.bytes == 0) return;
  refuse(Status::kInvalidArgument, "kept_x is given, must be NULL: only an exchange keeps rows");
}

}  // namespace sonicmoe::capi
