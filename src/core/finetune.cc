#include "core/finetune.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
#include <utility>

#include "core/check_tensor.h"
#include "core/plan.h"

namespace sonicmoe {
namespace {

constexpr NamedModel kModels[] = {
    {"olmoe", {16, 2048, 50304, 2048, 2048, 64, 8, 1024}},
    {"gpt-oss-20b", {24, 2880, 201088, 4096, 512, 32, 4, 2880}},
    {"gpt-oss-120b", {36, 2880, 201088, 4096, 512, 128, 4, 2880}},
    {"qwen3-30b", {48, 2048, 151936, 4096, 512, 128, 8, 768}},
    {"qwen3-235b", {94, 4096, 151936, 8192, 512, 128, 8, 1536}},
    {"mixtral-8x7b", {32, 4096, 32000, 4096, 1024, 8, 2, 14336}},
};

struct Format {
  const char* name;
  double bytes;  ///< of a weight, with its share of the scales
};
// NF4: 4 bits and an fp32 absmax for 64 weights; nested, absmax itself takes a byte and 4 bytes for
// 256 of them. MXFP4: 4 bits and a byte for 32. FP8: a byte and 4 bytes for 128 x 128.
constexpr Format kFormats[] = {{"bf16", 2.0},
                               {"nf4", 0.5 + 4.0 / 64},
                               {"nf4-nested", 0.5 + (1.0 + 4.0 / 256) / 64},
                               {"mxfp4", 0.5 + 1.0 / 32},
                               {"fp8", 1.0 + 4.0 / (128 * 128)}};
constexpr Format kFactors[] = {{"fp32", 4.0}, {"bf16", 2.0}};
constexpr Format kDense[] = {{"bf16", 2.0}, {"nf4", 0.5 + 4.0 / 64}};

template <class Rows>
const auto& row(const char* what, const Rows& rows, const std::string& name) {
  std::string known;
  for (const auto& r : rows) {
    if (name == r.name) return r;
    known += (known.empty() ? "" : ", ") + std::string(r.name);
  }
  checks::refuse(std::string(what) + " is \"" + name + "\", must be one of: " + known);
}

/// Letters as real numbers, in which no product overflows.
struct Letters {
  double T, L, d, n, E, C, q, kv, V, r, sequence;
  double weights() const { return L * E * 3 * n * d; }
  double attention() const { return L * d * (2 * q + 2 * kv); }
  double factors() const { return L * r * (E * (2 * d + 3 * n) + 4 * d + 2 * q + 2 * kv); }
};

Letters letters_of(const ModelShape& m, const FinetunePlan& p) {
  const std::pair<const char*, std::int64_t> given[] = {
      {"layers", m.layers},     {"hidden", m.hidden},   {"vocab", m.vocab}, {"queries", m.queries},
      {"keys", m.keys},         {"experts", m.experts}, {"top_k", m.top_k}, {"width", m.width},
      {"sequence", p.sequence}, {"batch", p.batch},     {"rank", p.rank},   {"logits", p.logits}};
  for (const auto& [name, value] : given) {
    checks::at_least(name, value, 1);
    checks::below_2_31(name, value);
  }
  const auto real = [](std::int64_t v) { return static_cast<double>(v); };
  const double T = real(p.sequence) * real(p.batch);
  return {.T = T,
          .L = real(m.layers),
          .d = real(m.hidden),
          .n = real(m.width),
          .E = real(m.experts),
          .C = T * real(m.top_k),
          .q = real(m.queries),
          .kv = real(m.keys),
          .V = real(m.vocab),
          .r = real(p.rank),
          .sequence = real(p.sequence)};
}

/// Bytes of a weight of the experts, of a factor or its gradient, and of each of its two moments.
struct ElementBytes {
  double weight, factor, moment;
};

ElementBytes element_bytes(const FinetunePlan& p) {
  const double factor = row("factors", kFactors, p.factors).bytes;
  const std::array<Format, 3> optimizers = {
      {{"adamw", factor}, {"adamw-8bit", 1.0}, {"adafactor", 0.0}}};
  return {row("weights", kFormats, p.weights).bytes, factor,
          row("optimizer", optimizers, p.optimizer).bytes};
}

/// Bytes of unpacked experts at a time: those of a layer, or fewer, but at least one expert's w_up.
double unpacked_bytes(const FinetunePlan& p, const Letters& s) {
  if (p.weights == "bf16") return 0;
  const double layer = s.E * 3 * s.n * s.d * 2, limit = static_cast<double>(p.unpack_mib) * 1048576;
  return p.unpack_mib == 0 ? layer : std::min(layer, std::max(limit, 2 * s.n * s.d * 2));
}

void add_memory(const ModelShape& m, const FinetunePlan& p, const Letters& s, FinetuneCost& cost) {
  const auto [weight, factor, moment] = element_bytes(p);
  // Of one layer, in bf16: tensors of attention and norms, and of experts: H, dH, A' and dX~.
  const double attention = s.T * (20 * s.d + 14 * s.q + 10 * s.kv);
  // Without checkpointing all layers but the one in backward keep what it needs.
  const double input = s.T * s.d * 2, needed = input + attention + s.C * 2 * s.n * 2;
  const double kept = p.checkpointing ? s.L * input : (s.L - 1) * needed;
  const double layer = s.C * (5 * s.n + s.d) * 2 + attention;
  const double logits = std::min(s.T, static_cast<double>(p.logits)) * s.V * 12;
  const double tables = m.tied || p.offload_embedding ? 1 : 2;  // embedding and head
  const double others = s.attention() * row("dense", kDense, p.dense).bytes +
                        (s.V * s.d * tables + s.L * s.E * s.d) * 2;
  const double gradients = s.factors() * factor;
  cost.memory = {{"experts", s.weights() * weight},         {"other weights", others},
                 {"factors", s.factors() * factor},         {"gradients", gradients},
                 {"optimizer", s.factors() * 2 * moment},   {"kept of layers", kept},
                 {"one layer in backward", layer},          {"logits", logits},
                 {"unpacked weights", unpacked_bytes(p, s)}};
  // Backward frees what layers kept while it makes gradients. Logits are gone before the first
  // layer's backward.
  cost.peak = std::max(gradients, kept) + std::max(layer, logits);
  for (const char* name :
       {"experts", "other weights", "factors", "optimizer", "unpacked weights"}) {
    for (const FinetuneCost::Bytes& item : cost.memory) {
      if (std::string_view(item.name) == name) cost.peak += item.bytes;
    }
  }
}

void add_times(const ModelShape& m, const FinetunePlan& p, const Letters& s, const Machine& machine,
               FinetuneCost& cost) {
  const double passes = p.checkpointing ? 2 : 1;  // forwards
  const double flop = 1 / machine.flops_per_second, byte = 1 / machine.bytes_per_second;
  const Problem layer =
      problem_of({static_cast<std::int64_t>(s.T), m.hidden, m.width, m.experts, m.top_k},
                 DType::kBF16, Activation{});
  double experts = 0;
  for (const KernelCost& k : kernel_costs(layer, machine)) {
    const std::string_view name = k.name;
    if (name != "dW1" && name != "dW2") experts += k.seconds * (k.backward ? 1 : passes);
  }
  // The term of the factors is further k tiles of 64: in A and dH after d, in Y after n, in dX~
  // after 2n. Memory limits the narrow products.
  const double tile = 64 * std::ceil(s.r / 64);
  const double forward = 2 * s.C * tile * (2 * s.n + s.d), backward = 2 * s.C * tile * (s.n + s.d);
  const double narrow = 2 * s.C * (s.d + s.n) * byte;
  const double low_rank =
      (forward * flop + narrow) * passes + backward * flop + 2 * s.C * (3 * s.d + 6 * s.n) * byte;
  // Products with frozen weights: forwards and the gradient of the rows.
  const double dense = 2 * s.T * s.attention() / s.L * (passes + 1) * flop;
  // Causal scores and values are 2 T sequence q flops a forward, backward 2.5 times as many.
  const double scores = 2 * s.T * s.sequence * s.q * (passes + 2.5) * flop;
  const double elementwise = s.T * (20 * s.d + 14 * s.q + 10 * s.kv) * (passes + 1) * byte;
  const double head = 2 * s.T * s.d * s.V * 3 * flop;
  const auto [weight, factor, moment] = element_bytes(p);
  // In forward and in backward; a few experts at a time in each recomputation, too.
  const bool in_parts = unpacked_bytes(p, s) < s.E * 3 * s.n * s.d * 2;
  const double unpacking =
      p.weights == "bf16" ? 0.0 : (in_parts ? passes + 1 : 2) * s.weights() * (weight + 2) * byte;
  const double optimizer = s.factors() * (3 * factor + 4 * moment) * byte;
  cost.step = {{"experts", s.L * experts},   {"factors", s.L * low_rank},
               {"unpacking", unpacking},     {"attention", s.L * (dense + scores)},
               {"norms", s.L * elementwise}, {"head and loss", head},
               {"optimizer", optimizer}};
  for (const FinetuneCost::Part& part : cost.step) cost.seconds += part.seconds;
}

}  // namespace

std::span<const NamedModel> named_models() { return kModels; }

ModelShape model_from_name(const std::string& name) { return row("model", kModels, name).shape; }

FinetuneCost finetune_cost(const ModelShape& m, const FinetunePlan& p, const Machine& machine) {
  checks::at_least("unpack-mib", p.unpack_mib, 0);
  if (m.tied && p.offload_embedding) {
    checks::refuse("offload-embedding is given, must be absent: the model's head is its embedding");
  }
  const Letters s = letters_of(m, p);
  FinetuneCost cost;
  cost.trained = static_cast<std::int64_t>(s.factors());
  add_memory(m, p, s, cost);
  add_times(m, p, s, machine, cost);
  return cost;
}

}  // namespace sonicmoe
