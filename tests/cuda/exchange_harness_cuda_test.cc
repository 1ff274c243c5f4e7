// The harness on an implementation that divides tokens and experts among pretended ranks. Its
// results must equal the results of one process; negative controls break the exchange itself.
#include <algorithm>
#include <chrono>
#include <iostream>

#include "cuda/engines.h"
#include "cuda/pretended_ranks.h"
#include "verify/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {
namespace {

using sonicmoe::testing::DeviceArray;
using sonicmoe::testing::must;
using sonicmoe::testing::PretendedRanks;

/// How tokens are divided among ranks.
enum class Split { kEven, kFirstHasAll, kFirstHasNone, kLastHasAll };
/// Whose low-rank factors a rank uses.
enum class FactorsOf { kOwn, kNextRank };

struct Form {
  std::int32_t ranks;
  ExchangeTransport transport = ExchangeTransport::kPush;
  Split split = Split::kEven;
  bool exact = false;            ///< asks the device for the number of rows
  const char* engine = nullptr;  ///< null: the device's first engine
  FactorsOf factors = FactorsOf::kOwn;
};

/// Changes memory between the parts of a step, when all ranks are idle.
struct Spoil {
  std::function<void(PretendedRanks&)> rows;      ///< after kBegin
  std::function<void(PretendedRanks&)> partials;  ///< after kCompute
};

std::vector<std::int64_t> token_bounds(std::int64_t tokens, const Form& form) {
  std::vector<std::int64_t> bounds(form.ranks + 1, form.split == Split::kFirstHasAll ? tokens : 0);
  bounds.front() = 0;
  bounds.back() = tokens;
  if (form.split == Split::kFirstHasAll) return bounds;
  const std::int64_t first = form.split == Split::kFirstHasNone ? 1 : 0;
  if (form.split == Split::kLastHasAll || first == form.ranks) return bounds;
  for (std::int64_t r = first; r < form.ranks; ++r) {
    bounds[r] = tokens * (r - first) / (form.ranks - first);
  }
  return bounds;
}

Tensor rows_of(const Tensor& t, std::int64_t first, std::int64_t last) {
  if (t.data == nullptr) return t;
  Tensor part = t;
  part.data = static_cast<std::uint8_t*>(t.data) + first * t.stride[0] * dtype_bytes(t.dtype);
  part.shape[0] = last - first;
  return part;
}

Weights experts_of(const Weights& w, std::int64_t first, std::int64_t last) {
  return {rows_of(w.gate, first, last), rows_of(w.up, first, last),
          rows_of(w.down, first, last), rows_of(w.b_gate, first, last),
          rows_of(w.b_up, first, last), rows_of(w.b_down, first, last)};
}

Lora factors_of(const Lora& lora, std::int64_t first, std::int64_t last) {
  const auto part = [&](const LowRank& f) {
    return LowRank{rows_of(f.a, first, last), rows_of(f.b, first, last),
                   rows_of(f.gate_b, first, last), f.scale};
  };
  return {part(lora.up), part(lora.down)};
}

/// Elements of a list, which may have any stride.
std::vector<std::int64_t> integers(const Tensor& t) {
  std::vector<std::int64_t> values(t.shape[0]);
  for (std::int64_t i = 0; i < t.shape[0]; ++i) {
    const auto* at = static_cast<std::uint8_t*>(t.data) + i * t.stride[0] * dtype_bytes(t.dtype);
    if (t.dtype == DType::kI64) {
      must(cudaMemcpy(&values[i], at, 8, cudaMemcpyDeviceToHost));
    } else {
      std::int32_t narrow = 0;
      must(cudaMemcpy(&narrow, at, 4, cudaMemcpyDeviceToHost));
      values[i] = narrow;
    }
  }
  return values;
}

/// The part of a case that one rank computes.
struct Share {
  Problem problem;
  Routing routing;
  std::int64_t first = 0, last = 0;  ///< tokens
  std::int64_t rows = 0;
  std::vector<std::int64_t> slots;  ///< pairs: this rank's slots of the whole list
  std::vector<std::unique_ptr<DeviceArray>> arrays;
  DeviceArray *h = nullptr, *saved = nullptr, *scratch = nullptr, *dweights = nullptr;

  DeviceArray* array(std::int64_t bytes) {
    return arrays.emplace_back(std::make_unique<DeviceArray>(bytes)).get();
  }
};

/// A layer over pretended ranks with the public signatures.
class ParallelLayer {
 public:
  ParallelLayer(const Form& form, Spoil spoil) : form_(form), spoil_(std::move(spoil)) {}

  void forward(const Problem& p, const ForwardArgs& args) {
    divide(p, args.routing);
    ended_ = false;
    const bool training = args.h.data != nullptr;
    const Pass pass = training ? Pass::kForward : Pass::kInference;
    std::vector<ForwardArgs> parts(shares_.size());
    each([&](std::int32_t r, Share& s) {
      ForwardArgs& a = parts[r];
      a.x = rows_of(args.x, s.first, s.last);
      a.routing = s.routing;
      a.weights = experts(p, args.weights, r);
      a.fp8_weights = codes(p, a.weights, s, r);
      a.lora = factors(p, args.lora, r);
      a.out = rows_of(args.out, s.first, s.last);
      exchange_forward(ranks_->exchange(r), s.problem, 0, a, ExchangePart::kBegin, ranks_->exec(r));
    });
    if (spoil_.rows) spoil(spoil_.rows);
    each([&](std::int32_t r, Share& s) {
      s.rows = form_.exact ? exchange_rows(ranks_->exchange(r), ranks_->exec(r)) : row_capacity(p);
      const Sizes sizes =
          exchange_sizes(ranks_->exchange(r), s.problem, s.rows, pass, ranks_->exec(r));
      s.scratch = s.array(sizes.scratch_bytes);
      parts[r].scratch = s.scratch->buffer();
      if (!training) return;
      s.h = s.array(sizes.h_bytes);
      s.saved = s.array(sizes.saved_bytes);
      parts[r].h = s.h->buffer();
      parts[r].saved = s.saved->buffer();
    });
    each([&](std::int32_t r, Share& s) {
      exchange_forward(ranks_->exchange(r), s.problem, s.rows, parts[r], ExchangePart::kCompute,
                       ranks_->exec(r));
    });
    if (spoil_.partials) spoil(spoil_.partials);
    each([&](std::int32_t r, Share& s) {
      exchange_forward(ranks_->exchange(r), s.problem, s.rows, parts[r], ExchangePart::kFinish,
                       ranks_->exec(r));
    });
    ranks_->wait();
    ended_ = true;
  }

  void backward(const Problem& p, const BackwardArgs& args) {
    ended_ = false;
    std::vector<BackwardArgs> parts(shares_.size());
    each([&](std::int32_t r, Share& s) {
      BackwardArgs& a = parts[r];
      const Sizes sizes =
          exchange_sizes(ranks_->exchange(r), s.problem, s.rows, Pass::kBackward, ranks_->exec(r));
      DeviceArray* scratch = s.array(sizes.scratch_bytes);
      a.x = rows_of(args.x, s.first, s.last);
      a.dout = rows_of(args.dout, s.first, s.last);
      a.routing = s.routing;
      a.weights = experts(p, args.weights, r);
      a.fp8_weights = codes(p, a.weights, s, r);
      a.lora = factors(p, args.lora, r);
      a.lora_grads = factors(p, args.lora_grads, r);
      a.h = s.h->buffer();
      a.saved = s.saved->buffer();
      a.scratch = scratch->buffer();
      a.dx = rows_of(args.dx, s.first, s.last);
      a.dweights = dweights_of(args.dweights, s);
      a.grads = experts(p, args.grads, r);
      a.grad_mode = args.grad_mode;
    });
    for (const ExchangePart part : testing::kParts) {
      each([&](std::int32_t r, Share& s) {
        exchange_backward(ranks_->exchange(r), s.problem, s.rows, parts[r], part, ranks_->exec(r));
      });
    }
    ranks_->wait();
    ended_ = true;
    if (p.form == RoutingForm::kPairs && args.dweights.data != nullptr) gather_dweights(args);
  }

 private:
  template <class F>
  void each(F f) {
    for (std::int32_t r = 0; r < form_.ranks; ++r) f(r, shares_[r]);
  }
  void spoil(const std::function<void(PretendedRanks&)>& change) {
    ranks_->wait_quietly();
    change(*ranks_);
    ranks_->wait_quietly();
  }
  Weights experts(const Problem& p, const Weights& w, std::int32_t r) const {
    const std::int64_t each = p.experts / form_.ranks;
    return experts_of(w, r * each, (r + 1) * each);
  }
  Lora factors(const Problem& p, const Lora& lora, std::int32_t r) const {
    const std::int64_t each = p.experts / form_.ranks;
    const std::int64_t of = form_.factors == FactorsOf::kOwn ? r : (r + 1) % form_.ranks;
    return factors_of(lora, of * each, (of + 1) * each);
  }

  /// The quantised weights of a rank's experts; empty for a problem without fp8.
  Buffer codes(const Problem& p, const Weights& weights, Share& s, std::int32_t r) {
    if (p.precision == Precision::kTensors) return {};
    Problem own = p;
    own.experts /= form_.ranks;
    const Buffer buffer = s.array(fp8_weights_bytes(own, ranks_->exec(r)))->buffer();
    quantize_weights(own, weights, buffer, ranks_->exec(r));
    return buffer;
  }

  void divide(const Problem& p, const Routing& routing) {
    shares_.clear();
    shares_.resize(form_.ranks);
    const std::vector<std::int64_t> bounds = token_bounds(p.tokens, form_);
    std::vector<std::int64_t> tokens, experts;
    if (p.form == RoutingForm::kPairs) {
      tokens = integers(routing.token);
      experts = integers(routing.expert);
    }
    sonicmoe::testing::GroupOptions options;
    options.shape = {form_.ranks, 1, 1, p.hidden, p.dtype};
    options.transport = form_.transport;
    options.engine = form_.engine;
    each([&](std::int32_t r, Share& s) {
      s.first = bounds[r];
      s.last = bounds[r + 1];
      s.problem = p;
      s.problem.tokens = s.last - s.first;
      if (p.form == RoutingForm::kIds) {
        s.routing.ids = rows_of(routing.ids, s.first, s.last);
        s.routing.weights = rows_of(routing.weights, s.first, s.last);
      } else {
        take_pairs(routing, tokens, experts, s);
      }
      ExchangeShape& shape = options.shape;
      shape.max_tokens = std::max(shape.max_tokens, s.problem.tokens);
      shape.max_slots = std::max(shape.max_slots, row_capacity(s.problem));
    });
    open_ranks(options);
  }

  /// Opens ranks, or reuses the ranks of the previous step if their shape fits, because opening
  /// takes longer than a step. The arrays of reused ranks are filled with invalid rows, as in new
  /// ranks.
  void open_ranks(const sonicmoe::testing::GroupOptions& options) {
    if (ranks_ != nullptr && ended_ && same_shape(ranks_->shape(), options.shape)) {
      const cuda::ExchangeLayout layout = cuda::exchange_layout(options.shape);
      for (std::int32_t r = 0; r < form_.ranks; ++r) {
        must(cudaMemset(ranks_->at<void>(r, layout.slot_token), 0xff,
                        layout.bytes - layout.slot_token));
      }
      DeviceArray::wait();
      return;
    }
    ranks_.reset();
    ranks_ = std::make_unique<PretendedRanks>(options);
    if (form_.engine == nullptr) return;
    for (std::int32_t r = 0; r < form_.ranks; ++r) {
      EXPECT_STREQ(ranks_->exchange(r).device->engine->name, form_.engine);
    }
  }
  static bool same_shape(const ExchangeShape& a, const ExchangeShape& b) {
    return a.max_tokens == b.max_tokens && a.max_slots == b.max_slots && a.hidden == b.hidden &&
           a.dtype == b.dtype;
  }

  /// Takes the pairs of a rank's tokens, and numbers the tokens from 0 on the rank. Pairs without a
  /// valid token go to no rank.
  static void take_pairs(const Routing& routing, const std::vector<std::int64_t>& tokens,
                         const std::vector<std::int64_t>& experts, Share& s) {
    std::vector<std::int64_t> token, expert;
    std::vector<float> weight;
    const Tensor& w = routing.weights;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < s.first || tokens[i] >= s.last) continue;
      s.slots.push_back(static_cast<std::int64_t>(i));
      token.push_back(tokens[i] - s.first);
      expert.push_back(experts[i]);
      float value = 0.0f;
      must(cudaMemcpy(&value, static_cast<float*>(w.data) + i * w.stride[0], 4,
                      cudaMemcpyDeviceToHost));
      weight.push_back(value);
    }
    const auto count = static_cast<std::int64_t>(token.size());
    s.problem.capacity = count;
    DeviceArray *t = s.array(8 * count), *e = s.array(8 * count), *f = s.array(4 * count);
    t->set(token);
    e->set(expert);
    f->set(weight);
    s.routing.token = tensor1(t->data(), DType::kI64, count);
    s.routing.expert = tensor1(e->data(), DType::kI64, count);
    s.routing.weights = tensor1(f->data(), DType::kF32, count);
  }

  Tensor dweights_of(const Tensor& whole, Share& s) {
    if (whole.data == nullptr || s.problem.form == RoutingForm::kIds) {
      return rows_of(whole, s.first, s.last);
    }
    const auto count = static_cast<std::int64_t>(s.slots.size());
    s.dweights = s.array(4 * count);
    return tensor1(s.dweights->data(), DType::kF32, count);
  }
  void gather_dweights(const BackwardArgs& args) {
    const Tensor& whole = args.dweights;
    std::vector<float> values(whole.shape[0], 0.0f);  // of invalid tokens: zero
    for (const Share& s : shares_) {
      const std::vector<float> own = s.dweights->get<float>();
      for (std::size_t i = 0; i < own.size(); ++i) values[s.slots[i]] = own[i];
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      must(cudaMemcpy(static_cast<float*>(whole.data) + i * whole.stride[0], &values[i], 4,
                      cudaMemcpyHostToDevice));
    }
  }

  Form form_;
  Spoil spoil_;
  std::unique_ptr<PretendedRanks> ranks_;
  bool ended_ = false;  ///< the last step, without a fault
  std::vector<Share> shares_;
};

Implementation parallel_implementation(const Exec& exec, const Form& form,
                                       const Spoil& spoil = {}) {
  const auto layer = std::make_shared<ParallelLayer>(form, spoil);
  Implementation whole = cuda_implementation(exec);
  Implementation i;
  i.name = std::to_string(form.ranks) + " ranks";
  i.memory = whole.memory;
  i.moe_sizes = whole.moe_sizes;
  i.quantize_weights = whole.quantize_weights;
  i.moe_forward = [layer](const Problem& p, const ForwardArgs& a) { layer->forward(p, a); };
  i.moe_backward = [layer](const Problem& p, const BackwardArgs& a) { layer->backward(p, a); };
  i.serves = [form, serves = whole.serves](const Case& c) {
    // Each partial sum is rounded once more, so outputs with inexact partial sums may differ.
    const bool same_rounding = c.data != Data::kRoundings || form.ranks == 1;
    return c.subject == Subject::kLayer && serves(c) && same_rounding &&
           c.problem.form != RoutingForm::kGrouped && c.problem.experts % form.ranks == 0;
  };
  return i;
}

class ExchangeHarness : public ::testing::Test {
 protected:
  ExchangeHarness() : device_(cuda::open_device(0)) {
    exec_.backend = Backend::kCuda;
    exec_.device = device_;
  }
  ~ExchangeHarness() override { cuda::close_device(device_); }

  /// Cases in fp8, whose names contain those of others, run only if the filter names fp8.
  void expect_sound(const Form& form, const std::string& filter) {
    const auto start = std::chrono::steady_clock::now();
    std::size_t failed = 0;
    const auto report = [&](const CaseResult& r, std::size_t, std::size_t) {
      if (r.passed()) return;
      if (++failed > 10) return;
      std::cout << r.name << ": " << fault_name(r.fault) << ": " << r.message << std::endl;
    };
    const bool fp8 = filter.find("fp8") != filter.npos;
    const cuda::Device* device = cuda::open_device(0, form.engine);
    Exec exec = exec_;
    exec.device = device;
    const auto results =
        verify({Extent::kQuick, filter, fp8 ? Precision::kFp8 : Precision::kTensors},
               parallel_implementation(exec, form), report);
    cuda::close_device(device);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    std::cout << form.ranks << " ranks, " << filter << ": " << results.size() << " cases, "
              << failed << " failed, " << seconds.count() << " s" << std::endl;
    EXPECT_GT(results.size(), 0u);
    EXPECT_EQ(failed, 0u) << form.ranks << " ranks";
  }

  const cuda::Device* device_;
  Exec exec_;
};

TEST_F(ExchangeHarness, RoutingWithAnyNumberOfRanks) {
  for (const std::int32_t ranks : {1, 2, 3, 4, 5, 8}) {
    expect_sound({ranks, ranks % 2 == 0 ? ExchangeTransport::kPush : ExchangeTransport::kCopy},
                 "routing/");
  }
}
TEST_F(ExchangeHarness, UnevenTokens) {
  expect_sound({2, ExchangeTransport::kCopy, Split::kFirstHasNone}, "routing/ids");
  expect_sound({3, ExchangeTransport::kPush, Split::kFirstHasNone}, "routing/");
  expect_sound({4, ExchangeTransport::kPush, Split::kLastHasAll}, "routing/");
}
TEST_F(ExchangeHarness, NumberOfRowsAskedFor) {
  expect_sound({2, ExchangeTransport::kPush, Split::kEven, true}, "routing/");
  expect_sound({4, ExchangeTransport::kCopy, Split::kFirstHasNone, true}, "routing/");
}
/// Repeats the step many times: a rank without rows is done at once, and its streams may then run
/// in any order.
TEST_F(ExchangeHarness, NoTokens) {
  for (int repeat = 0; repeat < 30; ++repeat) {
    expect_sound({2, ExchangeTransport::kCopy}, "routing/ids_no_tokens");
    expect_sound({2, ExchangeTransport::kPush}, "routing/ids_no_tokens");
  }
}
TEST_F(ExchangeHarness, Layouts) { expect_sound({2}, "layout/"); }
TEST_F(ExchangeHarness, Gradients) {
  expect_sound({2}, "grads/");
  expect_sound({2, ExchangeTransport::kCopy}, "grads/");
}
TEST_F(ExchangeHarness, Fp8) {
  expect_sound({2, ExchangeTransport::kCopy}, "fp8/routing/");
  expect_sound({4, ExchangeTransport::kPush, Split::kFirstHasNone, true}, "fp8/routing/");
}
TEST_F(ExchangeHarness, LowRankFactors) {
  expect_sound({2, ExchangeTransport::kCopy}, "lora/");
  expect_sound({3, ExchangeTransport::kPush, Split::kFirstHasNone}, "lora/");
  expect_sound({4, ExchangeTransport::kCopy}, "lora/");
}
/// The small form of the test above, for the emulator.
TEST_F(ExchangeHarness, FewLowRankFactors) {
  expect_sound({2, ExchangeTransport::kCopy}, "lora/frozen");
  expect_sound({2, ExchangeTransport::kPush, Split::kFirstHasNone}, "lora/routing-ids_distinct");
  expect_sound({2, ExchangeTransport::kCopy}, "lora/frozen_fp8");
  expect_sound({4, ExchangeTransport::kPush, Split::kFirstHasNone, true},
               "lora/fp8-routing/ids_distinct");
}
TEST_F(ExchangeHarness, RejectsFactorsOfAnotherRank) {
  for (const Case& c : all_cases(Extent::kQuick, "lora/routing-ids_distinct/bf16/integers")) {
    const Form form{.ranks = 2, .factors = FactorsOf::kNextRank};
    EXPECT_EQ(run_case(c, parallel_implementation(exec_, form)).fault, Fault::kUnequal);
  }
}
TEST_F(ExchangeHarness, WideTiles) { expect_sound({2}, "wide/"); }
TEST_F(ExchangeHarness, Activations) { expect_sound({5}, "activation/"); }
TEST_F(ExchangeHarness, Shapes) { expect_sound({3}, "shape/"); }
/// An expert with 511 rows: each rank has a full tile record of its own rows.
TEST_F(ExchangeHarness, PortableEngine) {
  Form form{2};
  form.engine = "portable";
  expect_sound(form, "routing/ids_more_edges_k2/bf16/integers");
  expect_sound(form, "routing/pairs_sorted/bf16/integers");
}
TEST_F(ExchangeHarness, BlackwellEngine) {
  if (device_->capability / 10 != 10) GTEST_SKIP() << "needs compute capability 10.x";
  for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
    Form form{2, transport};
    form.engine = "blackwell";
    expect_sound(form, "routing/ids_more_edges_k2/bf16/integers");
    expect_sound(form, "layout/concatenated_gated");
    if (transport == ExchangeTransport::kPush) expect_sound(form, "lora/frozen");
    // A rank without tokens; experts of 0, 1, 63 to 65 and 127 to 129 rows.
    form.split = Split::kFirstHasNone;
    expect_sound(form, "routing/ids_edges_k1/bf16/integers");
    form.exact = true;
    expect_sound(form, "routing/ids_edges_k4/bf16/integers");
    // All tokens are of one rank, and all rows are of an expert of the same or of the other one.
    expect_sound(form, "routing/ids_one_expert_has_all/bf16");
    form.split = Split::kFirstHasAll;
    expect_sound(form, "routing/ids_one_expert_has_all/bf16/integers");
    expect_sound(form, "routing/ids_empty/bf16/integers");
  }
}
TEST_F(ExchangeHarness, BlackwellFp8) {
  if (device_->capability / 10 != 10) GTEST_SKIP() << "needs compute capability 10.x";
  for (const ExchangeTransport transport : {ExchangeTransport::kPush, ExchangeTransport::kCopy}) {
    Form form{2, transport};
    form.engine = "blackwell";
    form.split = Split::kFirstHasAll;
    expect_sound(form, "fp8/routing/ids_one_expert/integers");  // all rows to the other rank
    form.split = Split::kFirstHasNone;
    expect_sound(form, "fp8/routing/ids_empty/integers");
    form.exact = true;
    expect_sound(form, "fp8/routing/tail_ids_edges/integers");
    if (transport == ExchangeTransport::kCopy) continue;
    expect_sound(form, "fp8/routing/ids_edges/integers");
    form.split = Split::kEven;
    expect_sound(form, "fp8/routing/ids_one_expert/");
    form.ranks = 3;
    expect_sound(form, "fp8/shape/tail_d448_n192_transposed/random");
    expect_sound(form, "fp8/grads/accumulated/random");
    expect_sound(form, "fp8/subset/");
  }
}
TEST_F(ExchangeHarness, BlackwellRefusesFactorsOfFp8) {
  if (device_->capability / 10 != 10) GTEST_SKIP() << "needs compute capability 10.x";
  const std::vector<Case> cases = all_cases(Extent::kQuick, "lora/frozen_fp8");
  ASSERT_FALSE(cases.empty());
  const Problem& p = cases.front().problem;
  sonicmoe::testing::GroupOptions options;
  options.shape = {2, p.tokens, row_capacity(p), p.hidden, p.dtype};
  options.engine = "blackwell";
  const PretendedRanks ranks(options);
  try {
    exchange_sizes(ranks.exchange(0), p, row_capacity(p), Pass::kForward, ranks.exec(0));
    ADD_FAILURE() << "it was served";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "precision is fp8, must be tensors with low-rank factors on the engine blackwell");
  }
}
TEST_F(ExchangeHarness, OneRank) {
  for (const char* filter : {"layout/", "grads/", "wide/", "activation/", "shape/"}) {
    expect_sound({1}, filter);
  }
}

/// Zeroes the rows that all ranks but the first have received.
void drop_rows(PretendedRanks& ranks) {
  const cuda::ExchangeLayout layout = cuda::exchange_layout(ranks.shape());
  const ExchangeShape& s = ranks.shape();
  for (std::int32_t r = 1; r < ranks.size(); ++r) {
    must(cudaMemset(ranks.at<std::uint8_t>(r, layout.x), 0, s.ranks * s.max_tokens * s.hidden * 2));
  }
}
/// The partial sums of the last rank in place of rank 1's, at rank 0.
void mistake_rank(PretendedRanks& ranks) {
  const cuda::ExchangeLayout layout = cuda::exchange_layout(ranks.shape());
  const std::int64_t bytes = ranks.shape().max_tokens * ranks.shape().hidden * 2;
  auto* partials = ranks.at<std::uint8_t>(0, layout.partials);
  must(cudaMemcpy(partials + bytes, partials + (ranks.size() - 1) * bytes, bytes,
                  cudaMemcpyDeviceToDevice));
}
/// A slot's expert changes on the way.
void change_expert(PretendedRanks& ranks) {
  const cuda::ExchangeLayout layout = cuda::exchange_layout(ranks.shape());
  for (std::int32_t r = 0; r < ranks.size(); ++r) {
    must(cudaMemset(ranks.at<std::int32_t>(r, layout.slot_expert), 0, ranks.shape().max_slots * 4));
  }
}

TEST_F(ExchangeHarness, RejectsABrokenExchange) {
  const Form form{4};
  const std::pair<const char*, Spoil> controls[] = {
      {"rows dropped", {drop_rows, {}}},
      {"experts changed", {change_expert, {}}},
      {"partial sums of another rank", {{}, mistake_rank}}};
  for (const char* name :
       {"routing/ids_distinct/bf16/integers", "fp8/routing/ids_distinct/integers"}) {
    const std::vector<Case> cases = all_cases(Extent::kQuick, name);
    const auto named = [name](const Case& c) { return c.name == name; };
    const auto c = std::find_if(cases.begin(), cases.end(), named);
    ASSERT_NE(c, cases.end()) << name;
    EXPECT_TRUE(run_case(*c, parallel_implementation(exec_, form)).passed()) << name;
    for (const auto& [what, spoil] : controls) {
      const CaseResult result = run_case(*c, parallel_implementation(exec_, form, spoil));
      EXPECT_EQ(result.fault, Fault::kUnequal) << name << ": " << what;
      std::cout << what << ": " << fault_name(result.fault) << ": " << result.message << std::endl;
    }
  }
}

}  // namespace
}  // namespace sonicmoe::verify
