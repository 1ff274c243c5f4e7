#include "verify/cases.h"

#include <algorithm>
#include <string_view>

namespace sonicmoe::verify {
namespace {

constexpr ActivationKind kIntegerGated = ActivationKind::kReGLU;
constexpr ActivationKind kIntegerPlain = ActivationKind::kReLU2;
constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32, DType::kF64};

// Rows of the experts: one below, at and one above multiples of the tile sizes in use.
const std::vector<std::int64_t> kEdgeCounts = {0, 1, 63, 64, 65, 127, 128, 129};
const std::vector<std::int64_t> kMoreEdgeCounts = {0, 255, 256, 257, 3, 511, 0, 31};

std::int64_t total(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

struct Sizes5 {
  std::int64_t tokens, hidden, width, experts, top_k;
};

Case make_case(std::string name, Sizes5 s, DType dtype, ActivationKind kind, Data data) {
  Case c;
  c.problem.tokens = s.tokens;
  c.problem.hidden = s.hidden;
  c.problem.width = s.width;
  c.problem.experts = s.experts;
  c.problem.top_k = s.top_k;
  c.problem.dtype = c.grad_dtype = dtype;
  c.problem.activation.kind = kind;
  c.data = data;
  c.name = std::move(name);
  return c;
}

const char* data_name(Data data) {
  constexpr const char* kNames[] = {"integers", "roundings", "random"};
  return kNames[static_cast<int>(data)];
}

// The sizes and the routing of several cases that differ in dtype and data.
struct RoutingShape {
  const char* name;
  RoutingForm form;
  Pattern pattern;
  Sizes5 sizes;  // top_k is the capacity for pairs
  std::vector<std::int64_t> counts;
  DType index_dtype = DType::kI64;
  bool row_weights = true;
};

std::vector<RoutingShape> routing_shapes() {
  using enum Pattern;
  constexpr RoutingForm kIds = RoutingForm::kIds, kPairs = RoutingForm::kPairs,
                        kGrouped = RoutingForm::kGrouped;
  const std::int64_t edge = total(kEdgeCounts);
  const std::int64_t more = total(kMoreEdgeCounts);
  return {
      {"ids_distinct", kIds, kDistinct, {97, 24, 40, 8, 3}, {}},
      {"ids_i32", kIds, kDistinct, {97, 24, 40, 8, 3}, {}, DType::kI32},
      {"ids_repeated", kIds, kRepeated, {61, 24, 40, 5, 4}, {}},
      {"ids_edges_k1", kIds, kCounts, {edge + 5, 24, 40, 8, 1}, kEdgeCounts},
      {"ids_edges_k4", kIds, kCounts, {edge / 4 + 9, 24, 40, 8, 4}, kEdgeCounts},
      {"ids_more_edges_k2", kIds, kCounts, {more / 2 + 1, 16, 24, 8, 2}, kMoreEdgeCounts},
      {"ids_hot", kIds, kHot, {301, 24, 40, 16, 2}, {}},
      {"ids_one_expert_has_all", kIds, kCounts, {150, 24, 40, 6, 2}, {0, 0, 0, 300, 0, 0}},
      {"ids_empty", kIds, kEmpty, {19, 24, 40, 4, 2}, {}},
      {"ids_sentinels", kIds, kSentinels, {97, 24, 40, 8, 3}, {}},
      {"ids_sentinels_i32", kIds, kSentinels, {97, 24, 40, 8, 3}, {}, DType::kI32},
      {"ids_aliases", kIds, kAliases, {97, 24, 40, 8, 3}, {}},
      {"ids_no_tokens", kIds, kDistinct, {0, 24, 40, 8, 3}, {}},
      {"ids_one_token", kIds, kDistinct, {1, 24, 40, 8, 2}, {}},
      {"ids_k_is_e", kIds, kDistinct, {37, 24, 40, 4, 4}, {}},
      {"ids_one_expert", kIds, kDistinct, {131, 24, 40, 1, 1}, {}},
      {"ids_many_experts", kIds, kDistinct, {50, 16, 24, 300, 2}, {}},
      // With 256 mean rows an expert or more, the Hopper engine computes dX~ before the weight
      // gradients, and the sums of dX run beside these. Such a sum adds tokens of more than 32 rows
      // by another loop.
      {"ids_sentinels_k11", kIds, kSentinels, {290, 264, 40, 5, 11}, {}},
      {"ids_repeated_k45", kIds, kRepeated, {37, 264, 40, 3, 45}, {}},
      {"pairs_many_of_each", kPairs, kShuffled, {25, 264, 40, 3, 1100}, {}},
      {"grouped_long", kGrouped, kGaps, {1100, 264, 40, 3, 0}, {333, 0, 601}},
      {"pairs_shuffled", kPairs, kShuffled, {53, 24, 40, 7, 200}, {}},
      {"pairs_shuffled_i32", kPairs, kShuffled, {53, 24, 40, 7, 200}, {}, DType::kI32},
      {"pairs_sorted", kPairs, kSorted, {80, 24, 40, 6, 333}, {}, DType::kI32},
      {"pairs_empty", kPairs, kEmpty, {11, 24, 40, 3, 20}, {}},
      {"pairs_no_capacity", kPairs, kShuffled, {11, 24, 40, 3, 0}, {}},
      {"pairs_no_tokens", kPairs, kShuffled, {0, 24, 40, 3, 9}, {}},
      {"grouped_edges", kGrouped, kContiguous, {edge + 7, 24, 40, 8, 0}, kEdgeCounts},
      {"grouped_gaps", kGrouped, kGaps, {edge + 150, 24, 40, 8, 0}, kEdgeCounts, DType::kI32},
      {"grouped_no_weights", kGrouped, kGaps, {90, 24, 40, 3, 0}, {17, 0, 33}, DType::kI64, false},
      {"grouped_overlong", kGrouped, kOverlong, {91, 24, 40, 6, 0}, {}},
      {"grouped_overlong_i32", kGrouped, kOverlong, {91, 24, 40, 6, 0}, {}, DType::kI32},
      {"grouped_empty", kGrouped, kEmpty, {21, 24, 40, 4, 0}, {}},
      {"grouped_no_tokens", kGrouped, kContiguous, {0, 24, 40, 2, 0}, {0, 0}},
  };
}

Case routing_case(const RoutingShape& shape, DType dtype, Data data) {
  const ActivationKind kind = data == Data::kRandom      ? ActivationKind::kSwiGLU
                              : data == Data::kRoundings ? kIntegerPlain
                                                         : kIntegerGated;
  Case c = make_case(
      std::string("routing/") + shape.name + "/" + dtype_name(dtype) + "/" + data_name(data),
      shape.sizes, dtype, kind, data);
  c.problem.form = shape.form;
  if (shape.form == RoutingForm::kPairs) c.problem.capacity = shape.sizes.top_k;
  if (shape.form != RoutingForm::kIds) c.problem.top_k = 0;
  c.pattern = shape.pattern;
  c.counts = shape.counts;
  c.index_dtype = shape.index_dtype;
  c.row_weights = shape.row_weights;
  return c;
}

// The number of slots of a token; for pairs the mean.
std::int64_t slots_of_a_token(const RoutingShape& shape) {
  const Sizes5& s = shape.sizes;
  return shape.form == RoutingForm::kPairs ? s.top_k / std::max<std::int64_t>(1, s.tokens)
                                           : s.top_k;
}

void add_routings(Extent extent, std::vector<Case>& cases) {
  for (const RoutingShape& shape : routing_shapes()) {
    cases.push_back(routing_case(shape, DType::kBF16, Data::kIntegers));
    cases.push_back(routing_case(shape, DType::kBF16, Data::kRoundings));
    cases.push_back(routing_case(shape, DType::kBF16, Data::kRandom));
    cases.push_back(routing_case(shape, DType::kF32, Data::kRandom));
    if (extent == Extent::kQuick) continue;
    cases.push_back(routing_case(shape, DType::kF32, Data::kIntegers));
    cases.push_back(routing_case(shape, DType::kF16, Data::kRandom));
    if (slots_of_a_token(shape) <= 40) {  // larger sums of integers overflow f16
      cases.push_back(routing_case(shape, DType::kF16, Data::kRoundings));
    }
    cases.push_back(routing_case(shape, DType::kF64, Data::kRandom));
  }
}

// Y of grouped rows is multiplied by the rows' weights, with another kernel for each dtype and each
// order of W2.
void add_weighted_rows(Extent extent, std::vector<Case>& cases) {
  for (const RoutingShape& shape : routing_shapes()) {
    if (shape.name != std::string_view("grouped_edges")) continue;
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Case c = routing_case(shape, dtype, Data::kRandom);
      if (extent == Extent::kQuick && dtype == DType::kF16) cases.push_back(c);
      c.name = std::string("routing/grouped_edges_transposed/") + dtype_name(dtype) + "/random";
      c.layout = Layout::kTransposed;
      cases.push_back(c);
    }
  }
}

void add_shape(std::int64_t d, std::int64_t n, Layout layout, DType dtype, Data data,
               std::vector<Case>& cases) {
  const ActivationKind kind = data == Data::kRandom ? ActivationKind::kSwiGLU : kIntegerGated;
  Case c = make_case("shape/d" + std::to_string(d) + "_n" + std::to_string(n) +
                         (layout == Layout::kTransposed ? "_transposed/" : "/") +
                         dtype_name(dtype) + "/" + data_name(data),
                     {67, d, n, 3, 2}, dtype, kind, data);
  c.layout = layout;
  c.cpu_only = d % 8 != 0 || n % 8 != 0;
  cases.push_back(c);
}

void add_shapes(Extent extent, std::vector<Case>& cases) {
  constexpr std::int64_t kSizes[] = {8, 24, 56, 72, 200, 264};
  for (std::size_t i = 0; i < std::size(kSizes); ++i) {
    for (std::size_t j = 0; j < std::size(kSizes); ++j) {
      // Quick: every size once on either side, full: every pair.
      if (extent == Extent::kQuick && j != (i * 2 + 1) % 7 % std::size(kSizes)) continue;
      for (const Layout layout : {Layout::kConcatenated, Layout::kTransposed}) {
        add_shape(kSizes[i], kSizes[j], layout, DType::kBF16, Data::kIntegers, cases);
        add_shape(kSizes[i], kSizes[j], layout, DType::kBF16, Data::kRandom, cases);
        add_shape(kSizes[i], kSizes[j], layout, DType::kF32, Data::kRandom, cases);
      }
    }
  }
  // Multiples of 64: CUDA computes the gradients of gate and up as one matrix.
  constexpr std::int64_t kWhole[][2] = {{72, 192}, {136, 64}};
  for (const auto& [d, n] : kWhole) {
    for (const Layout layout : {Layout::kConcatenated, Layout::kTransposed}) {
      add_shape(d, n, layout, DType::kBF16, Data::kIntegers, cases);
      add_shape(d, n, layout, DType::kBF16, Data::kRandom, cases);
    }
  }
  constexpr std::int64_t kOdd[][2] = {{1, 1}, {7, 13}, {33, 5}, {17, 65}};
  for (const auto& [d, n] : kOdd) {
    for (const DType dtype : kDTypes) {
      add_shape(d, n, Layout::kConcatenated, dtype, Data::kRandom, cases);
      add_shape(d, n, Layout::kTransposed, dtype, Data::kIntegers, cases);
    }
  }
  if (extent == Extent::kQuick) return;
  for (const Layout layout : {Layout::kConcatenated, Layout::kTransposed}) {
    add_shape(2880, 24, layout, DType::kBF16, Data::kRandom, cases);
    add_shape(24, 2880, layout, DType::kBF16, Data::kRandom, cases);
    add_shape(2880, 24, layout, DType::kF32, Data::kRandom, cases);
    add_shape(24, 2880, layout, DType::kF32, Data::kRandom, cases);
  }
}

void add_activations(std::vector<Case>& cases) {
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    for (const DType dtype : kDTypes) {
      for (const char* bias : {"", "_bias"}) {
        Case c = make_case(std::string("activation/") + activation_name(kind) + bias + "/" +
                               dtype_name(dtype) + "/random",
                           {150, 40, 24, 5, 2}, dtype, kind, Data::kRandom);
        c.bias = *bias != '\0';
        cases.push_back(c);
      }
    }
  }
  // The Hopper engine has a kernel for each activation, dtype and order of the weights.
  constexpr std::pair<const char*, Layout> kOrders[] = {{"_transposed", Layout::kTransposed},
                                                        {"_paired", Layout::kPaired},
                                                        {"_paired_up", Layout::kPairedUp}};
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    for (const auto& [name, layout] : kOrders) {
      if (!is_gated(kind) && layout != Layout::kTransposed) continue;
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        Case c = make_case(std::string("activation/") + activation_name(kind) + name + "/" +
                               dtype_name(dtype) + "/random",
                           {150, 40, 24, 5, 2}, dtype, kind, Data::kRandom);
        c.layout = layout;
        cases.push_back(c);
      }
    }
  }
  for (const DType dtype : kDTypes) {
    const auto add = [&](const char* name, const Activation& activation, double bias_shift) {
      Case c = make_case(std::string("activation/") + name + "/" + dtype_name(dtype) + "/random",
                         {150, 40, 24, 5, 2}, dtype, activation.kind, Data::kRandom);
      c.problem.activation = activation;
      c.bias = true;
      c.bias_shift = bias_shift;
      cases.push_back(c);
    };
    // Limits and caps that change many values, and an alpha other than the default.
    add("swiglu_oai_limits", {ActivationKind::kSwiGLUOai, 1.25, 0.8}, 0.0);
    add("swiglu_clamped_limits", {ActivationKind::kSwiGLUClamped, 0.0, 0.8}, 0.0);
    add("swiglu_step_limits", {ActivationKind::kSwiGLUStep, 0.0, 0.8}, 0.0);
    add("situ_small_caps", {ActivationKind::kSiTU, 0.4, 0.2}, 0.0);
    add("situ_caps", {ActivationKind::kSiTU, 1.5, 0.7}, 0.0);
    // Gates on both sides of the default limit, or about the default cap.
    add("swiglu_clamped_default", {ActivationKind::kSwiGLUClamped}, 9.8);
    add("swiglu_step_default", {ActivationKind::kSwiGLUStep}, 6.8);
    add("situ_default", {ActivationKind::kSiTU}, 4.0);
  }
  // Large biases make H and Y large enough to be rounded.
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Case c = make_case(std::string("activation/relu_bias/") + dtype_name(dtype) + "/roundings",
                       {150, 40, 24, 5, 2}, dtype, ActivationKind::kReLU, Data::kRoundings);
    c.bias = true;
    c.grad_dtype = DType::kF32;  // sums of such values leave fp16
    cases.push_back(c);
  }
  // Inputs about -3, where gelu and gelu_tanh differ by a tenth. Elsewhere their difference is
  // smaller than the rounding to 16 bits.
  for (const ActivationKind kind : {ActivationKind::kGeGLU, ActivationKind::kGeGLUTanh,
                                    ActivationKind::kGELU, ActivationKind::kGELUTanh}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Case c = make_case(std::string("activation/") + activation_name(kind) + "_tail/" +
                             dtype_name(dtype) + "/random",
                         {150, 40, 24, 5, 2}, dtype, kind, Data::kRandom);
      c.bias = true;
      c.bias_shift = -3.0;
      cases.push_back(c);
    }
  }
}

// Widths that fill the widest tiles, with experts that end just before, at and just after the end
// of a tile.
void add_wide(Extent extent, std::vector<Case>& cases) {
  const std::int64_t edge = total(kEdgeCounts);
  const auto add = [&](std::int64_t n, ActivationKind kind, Layout layout, DType dtype, Data data) {
    constexpr const char* kLayouts[] = {"separate", "concatenated", "interleaved", "transposed",
                                        "paired"};
    Case c =
        make_case("wide/n" + std::to_string(n) + "_" + kLayouts[static_cast<int>(layout)] + "_" +
                      activation_name(kind) + "/" + dtype_name(dtype) + "/" + data_name(data),
                  {edge + 5, 72, n, 8, 1}, dtype, kind, data);
    c.pattern = Pattern::kCounts;
    c.counts = kEdgeCounts;
    c.layout = layout;
    c.bias = true;
    cases.push_back(c);
  };
  for (const Layout layout : {Layout::kConcatenated, Layout::kTransposed, Layout::kPaired}) {
    for (const std::int64_t n : {248, 480}) {
      add(n, kIntegerGated, layout, DType::kBF16, Data::kIntegers);
      add(n, ActivationKind::kSwiGLU, layout, DType::kF16, Data::kRandom);
    }
  }
  // Without a gate both halves of the portable engine's tile are columns of H.
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    add(248, kIntegerPlain, Layout::kConcatenated, dtype, Data::kIntegers);
  }
  if (extent == Extent::kQuick) return;
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    add(248, kind, Layout::kConcatenated, DType::kBF16, Data::kRandom);
    if (is_gated(kind)) add(248, kind, Layout::kPaired, DType::kBF16, Data::kRandom);
  }
}

void add_layouts(std::vector<Case>& cases) {
  constexpr const char* kNames[] = {"separate", "concatenated", "interleaved", "transposed",
                                    "paired",   "padded",       "reversed"};
  for (std::size_t index = 0; index < std::size(kNames); ++index) {
    for (const bool gated : {true, false}) {
      for (const Data data : {Data::kIntegers, Data::kRandom}) {
        const ActivationKind kind = data == Data::kRandom
                                        ? (gated ? ActivationKind::kGeGLU : ActivationKind::kSiLU)
                                        : (gated ? kIntegerGated : kIntegerPlain);
        Case c = make_case(std::string("layout/") + kNames[index] + (gated ? "_gated" : "_plain") +
                               "/bf16/" + data_name(data),
                           {75, 32, 48, 4, 2}, DType::kBF16, kind, data);
        c.layout = static_cast<Layout>(index);
        c.cpu_only = c.layout == Layout::kReversed;
        c.bias = true;
        cases.push_back(c);
      }
    }
  }
}

void add_grads(std::vector<Case>& cases) {
  const auto add = [&](const char* what, DType dtype, GradMode mode, Data data, Layout layout,
                       std::int64_t width = 24) {
    Case c =
        make_case(std::string("grads/") + what + "/" + dtype_name(dtype) + "/" + data_name(data),
                  {90, 32, width, 6, 2}, dtype,
                  data == Data::kRandom ? ActivationKind::kSwiGLU : kIntegerGated, data);
    c.pattern = Pattern::kCounts;
    c.counts = {40, 0, 65, 1, 0, 70};  // experts 1 and 4 have no rows
    c.grad_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    c.bias = true;
    c.grad_mode = mode;
    c.layout = layout;
    cases.push_back(c);
  };
  for (const DType dtype : kDTypes) {
    for (const Data data : {Data::kIntegers, Data::kRandom}) {
      add("accumulated", dtype, GradMode::kAccumulate, data, Layout::kConcatenated);
      add("accumulated_paired", dtype, GradMode::kAccumulate, data, Layout::kPaired);
      add("accumulated_padded", dtype, GradMode::kAccumulate, data, Layout::kPadded);
      if (dtype_bytes(dtype) == 2) {
        add("fp32", dtype, GradMode::kWrite, data, Layout::kInterleaved);
        add("fp32_n192", dtype, GradMode::kWrite, data, Layout::kTransposed, 192);
        add("accumulated_n192", dtype, GradMode::kAccumulate, data, Layout::kConcatenated, 192);
      }
    }
  }
}

void add_grouped_gemm(Subject subject, Layout layout, bool gather, DType dtype, Data data,
                      std::int64_t left, std::int64_t right, std::vector<Case>& cases) {
  constexpr std::int64_t kTail = 5;  // rows past offsets[E]
  const bool over_k = subject == Subject::kGroupedGemmK;
  Case c = make_case(std::string(over_k ? "gemm_k/" : "gemm/") + std::to_string(left) + "x" +
                         std::to_string(right) + (gather ? "_gather" : "") +
                         (layout == Layout::kTransposed ? "_transposed"
                          : layout == Layout::kPadded   ? "_padded"
                          : layout == Layout::kReversed ? "_reversed"
                                                        : "") +
                         "/" + dtype_name(dtype) + "/" + data_name(data),
                     {total(kEdgeCounts) + kTail, left, right, 8, 0}, dtype, ActivationKind::kReLU,
                     data);
  c.subject = subject;
  c.counts = kEdgeCounts;
  c.layout = layout;
  c.gather = gather;
  c.cpu_only = layout == Layout::kReversed || left % 8 != 0 || right % 8 != 0;
  cases.push_back(c);
}

void add_grouped_gemms(Extent extent, std::vector<Case>& cases) {
  constexpr std::int64_t kSizes[][2] = {{24, 40}, {72, 8}, {8, 264}, {7, 13}, {200, 56}};
  for (const Subject subject : {Subject::kGroupedGemm, Subject::kGroupedGemmK}) {
    for (const DType dtype : kDTypes) {
      for (const bool gather : {false, true}) {
        for (const auto& [left, right] : kSizes) {
          add_grouped_gemm(subject, Layout::kSeparate, gather, dtype, Data::kIntegers, left, right,
                           cases);
          add_grouped_gemm(subject, Layout::kTransposed, gather, dtype, Data::kRandom, left, right,
                           cases);
          if (extent == Extent::kQuick) break;
        }
        add_grouped_gemm(subject, Layout::kPadded, gather, dtype, Data::kRandom, 16, 24, cases);
      }
      add_grouped_gemm(subject, Layout::kReversed, true, dtype, Data::kRandom, 16, 24, cases);
      add_grouped_gemm(subject, Layout::kSeparate, true, dtype, Data::kIntegers, 16, 24, cases);
      cases.back().out_of_range = true;
      cases.back().name += "/out_of_range";
    }
  }
}

// One gradient alone, as with frozen parameters: the others must not be needed for it.
void add_subsets(std::vector<Case>& cases) {
  for (const char* name :
       {"dx", "dweights", "dgate", "dup", "ddown", "db_gate", "db_up", "db_down"}) {
    Case c = make_case(std::string("grads/only_") + name + "/bf16/integers", {90, 32, 24, 6, 2},
                       DType::kBF16, kIntegerGated, Data::kIntegers);
    c.bias = true;
    c.wanted = {name};
    cases.push_back(c);
  }
}

struct RouterShape {
  std::int64_t tokens, experts, top_k, n_group, topk_group;
};
constexpr RouterShape kRouterShapes[] = {
    {0, 8, 2, 4, 2},     {1, 1, 1, 1, 1},        {1067, 8, 2, 4, 2},       {929, 64, 8, 8, 3},
    {577, 65, 5, 5, 2},  {333, 100, 32, 10, 8},  {300, 256, 8, 8, 4},      {265, 512, 10, 64, 8},
    {440, 384, 8, 8, 4}, {218, 1000, 17, 10, 4}, {131, 1024, 32, 256, 200}};
constexpr const char* kLogitsNames[] = {"normal", "few_values", "specials", "empty_rows",
                                        "one_hot"};

// Enumerates score modes, with and without renormalisation, scale, bias and groups. Variants from
// kSqrtSoftplusVariants on have that score, the ones before the other three.
constexpr unsigned kSqrtSoftplusVariants = 24;
RouterCase router_options(const RouterShape& s, unsigned variant) {
  const bool last = variant >= kSqrtSoftplusVariants;
  const unsigned rest = last ? variant - kSqrtSoftplusVariants : variant / 3;
  RouterCase r;
  r.options.top_k = s.top_k;
  r.options.score = last ? ScoreMode::kSqrtSoftplus : static_cast<ScoreMode>(variant % 3);
  r.options.renormalize = static_cast<std::int32_t>(rest % 2);
  r.options.scale = rest / 2 % 2 == 0 ? 1.0 : 2.5;
  const bool biased = last || r.options.score == ScoreMode::kSigmoid;
  r.bias = biased && rest / 2 % 2 == 1;
  if (rest / 4 % 2 == 1) {
    r.options.n_group = s.n_group;
    r.options.topk_group = s.topk_group;
  }
  return r;
}

Case router_case(Subject subject, const RouterShape& s, DType dtype, const RouterCase& router,
                 unsigned variant) {
  std::string name = "route/";
  if (subject == Subject::kTokenRound) {
    name = "round/";
    name += rounding_mode_name(router.mode);
    name += "_tile" + std::to_string(router.tile) + "/";
  }
  name += "t" + std::to_string(s.tokens) + "_e" + std::to_string(s.experts) + "_k" +
          std::to_string(s.top_k) + "_options" + std::to_string(variant) + "_" +
          kLogitsNames[static_cast<int>(router.logits)] + "/" + dtype_name(dtype);
  Case c = make_case(name, {s.tokens, 8, 8, s.experts, s.top_k}, dtype, ActivationKind::kSwiGLU,
                     Data::kRandom);
  c.subject = subject;
  c.router = router;
  c.index_dtype = variant % 2 == 0 ? DType::kI64 : DType::kI32;
  return c;
}

// Logits, dtypes, modes and tiles change with different periods over options and shapes. So the
// quick extent, which takes every fifth variant, still has every value of each of them.
void add_routers(Extent extent, std::vector<Case>& cases) {
  constexpr DType kLogitDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  constexpr std::int64_t kTiles[] = {16, 1, 128, 3};
  constexpr unsigned kVariants = kSqrtSoftplusVariants + 8, kFlavours = 5, kModes = 6, kStep = 5;
  for (unsigned i = 0; i < std::size(kRouterShapes); ++i) {
    const RouterShape& s = kRouterShapes[i];
    for (unsigned variant = 0; variant < kVariants;
         variant += extent == Extent::kFull ? 1 : kStep) {
      RouterCase router = router_options(s, variant);
      router.logits = static_cast<Logits>((variant + variant / kStep + i) % kFlavours);
      const DType dtype = kLogitDTypes[(variant + i) % 3];
      cases.push_back(router_case(Subject::kRoute, s, dtype, router, variant));
      router.mode = static_cast<RoundingMode>((variant + i) % kModes);
      router.tile = kTiles[(variant / kStep + i) % std::size(kTiles)];
      cases.push_back(router_case(Subject::kTokenRound, s, dtype, router, variant));
    }
  }
}

// R = 2^17: a 16-bit row number or counter would overflow.
void add_large(std::vector<Case>& cases) {
  for (const Data data : {Data::kIntegers, Data::kRandom}) {
    Case c = make_case(std::string("large/rows_131072/bf16/") + data_name(data),
                       {16384, 8, 8, 32, 8}, DType::kBF16,
                       data == Data::kRandom ? ActivationKind::kSwiGLU : kIntegerGated, data);
    c.grad_dtype = DType::kF32;
    cases.push_back(c);
  }
  // More experts than clusters that run at the same time, several hundred rows each: half of a dW
  // tile is stored during the main loop of the next tile (deferred epilogue).
  cases.push_back(make_case("large/deep_experts/bf16/random", {7000, 72, 136, 70, 8}, DType::kBF16,
                            ActivationKind::kSwiGLU, Data::kRandom));
  // Three tiles of 128 rows along d, several tiles a cluster. dW's third row tile has no neighbour,
  // so the two CTAs of its cluster take two column tiles; at one of the widths a column tile is
  // left over. Gate ends inside a column tile.
  for (const std::int64_t n : {320, 448}) {
    for (const Layout layout : {Layout::kSeparate, Layout::kTransposed}) {
      Case c =
          make_case("large/odd_rows_n" + std::to_string(n) +
                        (layout == Layout::kTransposed ? "_transposed" : "") + "/bf16/random",
                    {2400, 328, n, 24, 3}, DType::kBF16, ActivationKind::kSwiGLU, Data::kRandom);
      c.layout = layout;
      cases.push_back(c);
    }
  }
  // More tiles than CUDA has clusters and a deep K: the deferred epilogue stores a tile during the
  // main loop of the next one.
  struct Deferred {
    const char* name;
    DType dtype;
    ActivationKind kind;
    Layout layout;
  };
  for (const Deferred& b :
       {Deferred{"", DType::kBF16, ActivationKind::kSwiGLU, Layout::kSeparate},
        Deferred{"_plain", DType::kF16, ActivationKind::kGELU, Layout::kTransposed},
        Deferred{"_paired", DType::kBF16, ActivationKind::kSwiGLUOai, Layout::kPaired}}) {
    Case c = make_case(
        std::string("large/stored_beside") + b.name + "/" + dtype_name(b.dtype) + "/random",
        {1600, 264, 264, 70, 4}, b.dtype, b.kind, Data::kRandom);
    c.layout = b.layout;
    cases.push_back(c);
  }
  cases.push_back(make_case("large/spread_beside/bf16/random", {1600, 904, 392, 40, 2},
                            DType::kBF16, ActivationKind::kSwiGLU, Data::kRandom));
  for (const Layout layout : {Layout::kSeparate, Layout::kTransposed}) {
    add_grouped_gemm(Subject::kGroupedGemm, layout, false, DType::kBF16, Data::kRandom, 1032, 520,
                     cases);
    Case& c = cases.back();
    c.counts.clear();
    for (int i = 0; i < 12; i++) {
      c.counts.insert(c.counts.end(), kEdgeCounts.begin(), kEdgeCounts.end());
    }
    c.problem.experts = static_cast<std::int64_t>(c.counts.size());
    c.problem.tokens = total(c.counts) + 5;
    c.name = "large/" + c.name;
  }
  // If the output has more than 2^16 chunks of 16 bytes, CUDA sums the rows of its tokens by
  // another kernel on compute capability 9.0.
  const RoutingShape shapes[] = {
      {"ids_sentinels_t4200", RoutingForm::kIds, Pattern::kSentinels, {4200, 2000, 8, 5, 3}, {}},
      {"pairs_shuffled_t4200",
       RoutingForm::kPairs,
       Pattern::kShuffled,
       {4200, 2000, 8, 5, 9001},
       {}}};
  for (const RoutingShape& shape : shapes) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Case c = routing_case(shape, dtype, dtype == DType::kBF16 ? Data::kIntegers : Data::kRandom);
      c.name = "large/" + c.name;
      c.grad_dtype = DType::kF32;
      cases.push_back(c);
    }
  }
}

}  // namespace

bool wants(const Case& c, const std::string& output) {
  return c.wanted.empty() || std::find(c.wanted.begin(), c.wanted.end(), output) != c.wanted.end();
}

std::vector<Case> all_cases(Extent extent, const std::string& filter) {
  std::vector<Case> cases;
  add_routings(extent, cases);
  add_weighted_rows(extent, cases);
  add_shapes(extent, cases);
  add_activations(cases);
  add_layouts(cases);
  add_wide(extent, cases);
  add_grads(cases);
  add_subsets(cases);
  add_grouped_gemms(extent, cases);
  add_routers(extent, cases);
  if (extent == Extent::kFull) add_large(cases);
  add_fp8_cases(extent, cases);
  add_batch_cases(extent, cases);
  add_lora_cases(extent, cases);
  add_packed_cases(extent, cases);
  std::erase_if(cases, [&](const Case& c) { return c.name.find(filter) == std::string::npos; });
  return cases;
}

}  // namespace sonicmoe::verify
