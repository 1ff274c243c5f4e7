// Test cases of Precision::kFp8. Their names begin with fp8/.
#include <string_view>

#include "verify/cases.h"

namespace sonicmoe::verify {
namespace {

const char* data_name(Data data) {
  constexpr const char* kNames[] = {"integers", "roundings", "random"};
  return kNames[static_cast<int>(data)];
}

// For integers and roundings: an activation that maps integers to integers, so that results can be
// compared for equality. For kRoundings its values also stay small enough for the 14-bit
// accumulator in which a tensor core sums a block of 128.
ActivationKind activation_for(Data data) {
  return data == Data::kRandom ? ActivationKind::kSwiGLU : ActivationKind::kReGLU;
}

Case fp8_case(const std::string& name, Data data, std::int64_t tokens, std::int64_t hidden,
              std::int64_t width) {
  Case c;
  c.name = "fp8/" + name + "/" + data_name(data);
  c.data = data;
  Problem& p = c.problem;
  p.tokens = tokens;
  p.hidden = hidden;
  p.width = width;
  p.experts = 3;
  p.top_k = 2;
  p.dtype = c.grad_dtype = DType::kBF16;
  p.activation.kind = activation_for(data);
  p.precision = Precision::kFp8;
  return c;
}

struct Routed {
  const char* name;
  RoutingForm form;
  Pattern pattern;
  std::int64_t tokens, experts, slots;  // slots: top_k for ids, the capacity for pairs
  std::vector<std::int64_t> counts;
  bool row_weights = true;
  Extent extent = Extent::kQuick;
};

std::vector<Routed> routed_shapes() {
  using enum Pattern;
  constexpr RoutingForm kIds = RoutingForm::kIds, kPairs = RoutingForm::kPairs,
                        kGrouped = RoutingForm::kGrouped;
  constexpr Extent kFull = Extent::kFull;
  return {
      {"ids_distinct", kIds, kDistinct, 97, 8, 3, {}},
      {"ids_repeated", kIds, kRepeated, 61, 5, 4, {}, true, kFull},
      {"ids_edges", kIds, kCounts, 582, 8, 1, {0, 1, 63, 64, 65, 127, 128, 129}},
      {"ids_more_edges", kIds, kCounts, 560, 8, 2, {0, 255, 256, 257, 3, 31, 0, 17}, true, kFull},
      {"ids_sentinels", kIds, kSentinels, 97, 8, 3, {}},
      {"ids_hot", kIds, kHot, 301, 16, 2, {}, true, kFull},
      // From 256 mean rows an expert tile indices come from a counter, on Hopper and on Blackwell.
      {"ids_one_expert", kIds, kCounts, 777, 2, 1, {0, 777}},
      {"ids_empty", kIds, kEmpty, 19, 4, 2, {}},
      {"ids_no_tokens", kIds, kDistinct, 0, 8, 3, {}},
      {"ids_one_token", kIds, kDistinct, 1, 8, 2, {}},
      {"pairs_shuffled", kPairs, kShuffled, 53, 7, 201, {}},
      {"pairs_sorted", kPairs, kSorted, 80, 6, 333, {}, true, kFull},
      {"pairs_empty", kPairs, kEmpty, 11, 3, 20, {}, true, kFull},
      {"pairs_no_capacity", kPairs, kShuffled, 11, 3, 0, {}},
      {"grouped_edges", kGrouped, kContiguous, 590, 8, 0, {0, 1, 63, 64, 65, 127, 128, 129}},
      {"grouped_gaps", kGrouped, kGaps, 150, 3, 0, {17, 0, 65}},
      {"grouped_no_weights", kGrouped, kGaps, 90, 3, 0, {17, 0, 33}, false},
      {"grouped_overlong", kGrouped, kOverlong, 91, 6, 0, {}, true, kFull},
      {"grouped_empty", kGrouped, kEmpty, 21, 4, 0, {}, true, kFull},
  };
}

Case routed_case(const Routed& shape, const std::string& name, Data data, std::int64_t hidden,
                 std::int64_t width) {
  Case c = fp8_case("routing/" + name, data, shape.tokens, hidden, width);
  c.problem.form = shape.form;
  c.problem.experts = shape.experts;
  c.problem.top_k = shape.form == RoutingForm::kIds ? shape.slots : 0;
  c.problem.capacity = shape.form == RoutingForm::kPairs ? shape.slots : 0;
  c.pattern = shape.pattern;
  c.counts = shape.counts;
  c.row_weights = shape.row_weights;
  return c;
}

constexpr Data kAllData[] = {Data::kIntegers, Data::kRoundings, Data::kRandom};

void add_routings(Extent extent, std::vector<Case>& cases) {
  for (const Routed& shape : routed_shapes()) {
    if (shape.extent == Extent::kFull && extent == Extent::kQuick) continue;
    for (const Data data : kAllData) {
      cases.push_back(routed_case(shape, shape.name, data, 256, 128));
    }
  }
}

struct Shaped {
  const char* layout_name;
  Layout layout;
  std::int64_t hidden, width;
  KeptH kept;
};

Case shaped_case(const Shaped& s, const std::string& prefix, Data data) {
  const std::string name = "shape/" + prefix + "d" + std::to_string(s.hidden) + "_n" +
                           std::to_string(s.width) + "_" + s.layout_name;
  Case c = fp8_case(name, data, 67, s.hidden, s.width);
  c.layout = s.layout;
  c.problem.kept_h = s.kept;
  c.bias = s.kept == KeptH::kTensors;
  c.cpu_only = s.layout == Layout::kReversed;
  return c;
}

// d and n of one to five blocks, every layout of the weights, H kept as codes or in bf16.
void add_shapes(std::vector<Case>& cases) {
  using enum Layout;
  const Shaped shapes[] = {
      {"separate", kSeparate, 128, 128, KeptH::kPrecision},
      {"concatenated", kConcatenated, 384, 128, KeptH::kTensors},
      {"interleaved", kInterleaved, 128, 384, KeptH::kPrecision},
      {"interleaved", kInterleaved, 256, 128, KeptH::kTensors},
      {"transposed", kTransposed, 640, 256, KeptH::kPrecision},
      {"transposed", kTransposed, 128, 256, KeptH::kTensors},
      {"paired", kPaired, 256, 384, KeptH::kPrecision},
      {"paired", kPaired, 256, 128, KeptH::kTensors},
      {"padded", kPadded, 256, 640, KeptH::kPrecision},
      {"reversed", kReversed, 256, 128, KeptH::kPrecision},
  };
  for (const Shaped& s : shapes) {
    for (const Data data : {Data::kRoundings, Data::kRandom}) {
      cases.push_back(shaped_case(s, "", data));
    }
  }
}

// d or n is an odd multiple of 64, so the last block has 64 rows or columns: every layout, awkward
// numbers of rows, all activations, H kept as codes or in bf16.
void add_tails(std::vector<Case>& cases) {
  using enum Layout;
  const Shaped shapes[] = {
      {"separate", kSeparate, 64, 64, KeptH::kPrecision},
      {"separate", kSeparate, 192, 704, KeptH::kPrecision},
      {"concatenated", kConcatenated, 192, 128, KeptH::kTensors},
      {"concatenated", kConcatenated, 128, 320, KeptH::kPrecision},
      {"interleaved", kInterleaved, 128, 192, KeptH::kPrecision},
      {"interleaved", kInterleaved, 320, 64, KeptH::kTensors},
      {"transposed", kTransposed, 448, 192, KeptH::kPrecision},
      {"transposed", kTransposed, 64, 320, KeptH::kTensors},
      {"paired", kPaired, 192, 320, KeptH::kPrecision},
      {"paired", kPaired, 320, 192, KeptH::kTensors},
      {"padded", kPadded, 192, 192, KeptH::kPrecision},
      {"reversed", kReversed, 192, 64, KeptH::kPrecision},
  };
  for (const Shaped& s : shapes) {
    for (const Data data : {Data::kRoundings, Data::kRandom}) {
      cases.push_back(shaped_case(s, "tail_", data));
    }
  }
  for (const Routed& shape : routed_shapes()) {
    const std::string_view name = shape.name;
    if (name != "ids_edges" && name != "pairs_shuffled" && name != "grouped_edges") continue;
    for (const Data data : kAllData) {
      cases.push_back(routed_case(shape, "tail_" + std::string(name), data, 192, 320));
    }
  }
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    const bool codes = index % 2 == 0;
    const std::string name =
        std::string("activation/tail_") + activation_name(kind) + (codes ? "" : "_kept_bf16");
    Case c = fp8_case(name, Data::kRandom, 90, 192, 320);
    c.problem.activation.kind = kind;
    c.problem.kept_h = codes ? KeptH::kPrecision : KeptH::kTensors;
    c.bias = true;
    cases.push_back(c);
  }
  Case grads = fp8_case("grads/tail_accumulated", Data::kRoundings, 70, 320, 192);
  grads.grad_dtype = DType::kF32;
  grads.grad_mode = GradMode::kAccumulate;
  grads.bias = true;
  grads.pattern = Pattern::kCounts;
  grads.counts = {61, 0, 70};
  cases.push_back(grads);
}

void add_activations(std::vector<Case>& cases) {
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    const std::string name = std::string("activation/") + activation_name(kind);
    Case c = fp8_case(name, Data::kRandom, 90, 128, 128);
    c.problem.activation.kind = kind;
    cases.push_back(c);
    c.name = "fp8/" + name + "_kept_bf16/random";
    c.problem.kept_h = KeptH::kTensors;
    cases.push_back(c);
    c.name = "fp8/" + name + "_bias/random";
    c.problem.kept_h = KeptH::kPrecision;
    c.bias = true;
    cases.push_back(c);
  }
  Case plain = fp8_case("activation/relu_bias", Data::kRoundings, 90, 128, 256);
  plain.problem.activation.kind = ActivationKind::kReLU;
  plain.bias = true;
  cases.push_back(plain);
  plain.name = "fp8/activation/relu_kept_bf16/roundings";
  plain.problem.kept_h = KeptH::kTensors;
  cases.push_back(plain);
  Case limits = fp8_case("activation/swiglu_oai_limits", Data::kRandom, 90, 128, 128);
  limits.problem.activation = {ActivationKind::kSwiGLUOai, 1.25, 0.8};
  limits.bias = true;
  cases.push_back(limits);
  limits.name = "fp8/activation/swiglu_step_limits/random";
  limits.problem.activation = {ActivationKind::kSwiGLUStep, 0.0, 0.8};
  cases.push_back(limits);
  limits.name = "fp8/activation/situ_caps/random";
  limits.problem.activation = {ActivationKind::kSiTU, 1.5, 0.7};
  cases.push_back(limits);
}

void add_grads(std::vector<Case>& cases) {
  for (const Data data : {Data::kRoundings, Data::kRandom}) {
    Case fp32 = fp8_case("grads/fp32", data, 70, 256, 128);
    fp32.grad_dtype = DType::kF32;
    fp32.bias = true;
    fp32.pattern = Pattern::kCounts;
    fp32.counts = {61, 0, 70};
    cases.push_back(fp32);
    fp32.name = std::string("fp8/grads/accumulated/") + data_name(data);
    fp32.grad_mode = GradMode::kAccumulate;
    cases.push_back(fp32);
  }
  const std::vector<std::string> subsets[] = {
      {"dx"}, {"dweights"}, {"ddown"}, {"dgate", "dup"}, {"dx", "db_up", "db_gate"}};
  for (const std::vector<std::string>& wanted : subsets) {
    Case c = fp8_case("subset/" + wanted.front() + (wanted.size() > 2 ? "_biases" : ""),
                      Data::kRandom, 67, 128, 256);
    c.wanted = wanted;
    c.bias = true;
    cases.push_back(c);
  }
}

// K has three blocks of 128. The sums over the first and the last block cancel and are so large
// that an accumulator with fewer bits than fp32 loses the sum over the middle block.
void add_promotion(std::vector<Case>& cases) {
  Case c = fp8_case("promotion", Data::kRoundings, 67, 384, 384);
  c.cancelling = true;
  cases.push_back(c);
}

void add_large(std::vector<Case>& cases) {
  cases.push_back(fp8_case("large/d512_n256", Data::kRandom, 2400, 512, 256));
  cases.back().problem.experts = 24;
  Case edges = fp8_case("large/edges", Data::kRoundings, 1300, 256, 256);
  edges.pattern = Pattern::kCounts;
  edges.counts = {0, 255, 256, 257, 3, 511, 0, 31, 129, 127, 512, 385};
  edges.problem.experts = static_cast<std::int64_t>(edges.counts.size());
  cases.push_back(edges);
}

}  // namespace

void add_fp8_cases(Extent extent, std::vector<Case>& cases) {
  add_routings(extent, cases);
  add_shapes(cases);
  add_tails(cases);
  add_activations(cases);
  add_grads(cases);
  add_promotion(cases);
  if (extent == Extent::kFull) add_large(cases);
}

}  // namespace sonicmoe::verify
