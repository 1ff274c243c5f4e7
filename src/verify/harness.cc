#include "verify/harness.h"

#include <algorithm>
#include <chrono>

#include "verify/expected.h"

namespace sonicmoe::verify {
namespace {

// The first fault found; unwinds one case.
struct Rejected {
  Verdict verdict;
};

void require(bool condition, Fault fault, const std::string& message) {
  if (!condition) throw Rejected{{fault, message}};
}

class LayerRun {
 public:
  LayerRun(const Case& c, const Implementation& implementation, CaseResult& result)
      : case_(c),
        implementation_(implementation),
        result_(result),
        blocks_(implementation.memory),
        tensors_(make_tensors(c, blocks_)),
        expected_(expect_layer(c, tensors_)) {}

  void run() {
    if (expected_.sound.fault != Fault::kNone) throw Rejected{expected_.sound};
    lend_buffers();
    forward(kPoison);
    judge(expected_.forward, kPoison);
    const Bits out = bits(expected_.forward);
    // Other garbage in every buffer, then the same saved state once more.
    Bits grads;
    if (implementation_.moe_backward) {
      backward(kPoison);
      judge(expected_.backward, kPoison);
      grads = bits(expected_.backward);
    }
    forward(kOtherPoison);
    require_same(out, expected_.forward, "forward on other garbage");
    if (implementation_.moe_backward) {
      backward(kOtherPoison);
      require_same(grads, expected_.backward, "backward on other garbage");
      backward(kPoison);
      require_same(grads, expected_.backward, "backward on the same saved state");
    }
    infer(kPoison);
    require_same(out, expected_.forward, "inference");
  }

 private:
  using Bits = std::vector<std::vector<std::uint8_t>>;

  // Buffers of exactly the bytes that moe_sizes names, after holding the sizes to their promises.
  void lend_buffers() {
    const Problem& p = case_.problem;
    const Sizes forward = implementation_.moe_sizes(p, Pass::kForward);
    const Sizes backward = implementation_.moe_sizes(p, Pass::kBackward);
    const Sizes inference = implementation_.moe_sizes(p, Pass::kInference);
    const std::int64_t capacity = p.form == RoutingForm::kIds     ? p.tokens * p.top_k
                                  : p.form == RoutingForm::kPairs ? p.capacity
                                                                  : p.tokens;
    const std::int64_t h_bytes =
        gate_factor(p.activation.kind) * capacity * p.width * dtype_bytes(p.dtype);
    require(
        forward.h_bytes == h_bytes, Fault::kSizes,
        "h_bytes is " + std::to_string(forward.h_bytes) + ", must be " + std::to_string(h_bytes));
    const std::int64_t most = 20 * capacity + 16 * p.tokens + 1024 * p.experts;
    require(forward.saved_bytes <= most, Fault::kSizes,
            "saved_bytes is " + std::to_string(forward.saved_bytes) + ", must be at most " +
                std::to_string(most));
    require(inference.h_bytes == 0 && inference.saved_bytes == 0, Fault::kSizes,
            "inference keeps h or saved");
    h_ = &blocks_.add("h", forward.h_bytes);
    saved_ = &blocks_.add("saved", forward.saved_bytes);
    forward_scratch_ = &blocks_.add("scratch of forward", forward.scratch_bytes);
    backward_scratch_ = &blocks_.add("scratch of backward", backward.scratch_bytes);
    inference_scratch_ = &blocks_.add("scratch of inference", inference.scratch_bytes);
  }

  static Buffer lent(Block* block) { return {block->device(), block->bytes()}; }

  ForwardArgs forward_args() const {
    ForwardArgs args;
    args.x = tensors_.x.on_device();
    args.routing = tensors_.routing.on_device();
    args.weights = tensors_.weights.on_device();
    args.out = tensors_.out.on_device();
    return args;
  }

  void forward(std::uint8_t filling) {
    ForwardArgs args = forward_args();
    args.h = lent(h_);
    args.saved = lent(saved_);
    args.scratch = lent(forward_scratch_);
    call("forward", filling, expected_.forward, {h_, saved_, forward_scratch_},
         [&] { implementation_.moe_forward(case_.problem, args); });
  }

  void infer(std::uint8_t filling) {
    ForwardArgs args = forward_args();
    args.scratch = lent(inference_scratch_);
    call("inference", filling, expected_.forward, {inference_scratch_},
         [&] { implementation_.moe_forward(case_.problem, args); });
  }

  void backward(std::uint8_t filling) {
    BackwardArgs args;
    args.x = tensors_.x.on_device();
    args.routing = tensors_.routing.on_device();
    args.weights = tensors_.weights.on_device();
    args.dout = tensors_.dout.on_device();
    args.h = lent(h_);
    args.saved = lent(saved_);
    args.scratch = lent(backward_scratch_);
    args.dx = tensors_.dx.on_device();
    args.dweights = tensors_.dweights.on_device();
    args.grads = tensors_.grads.on_device();
    args.grad_mode = case_.grad_mode;
    call("backward", filling, expected_.backward, {backward_scratch_},
         [&] { implementation_.moe_backward(case_.problem, args); });
  }

  // One call on freshly filled outputs and buffers, then a look at every byte.
  template <class F>
  void call(const std::string& what, std::uint8_t filling, const std::vector<Expected>& outputs,
            const std::vector<Block*>& buffers, F run) {
    for (Block& block : blocks_.all()) block.allow_none();
    for (const Expected& e : outputs) e.placed.allow();
    for (Block* block : buffers) block->allow_all();
    for (Block& block : blocks_.all()) block.poison(filling);
    if (case_.grad_mode == GradMode::kAccumulate && &outputs == &expected_.backward) {
      fill_initial_grads(case_, tensors_.grads);
    }
    for (Block& block : blocks_.all()) block.upload();
    run();
    for (Block& block : blocks_.all()) {
      const std::optional<std::int64_t> at = block.download();
      if (!at) continue;
      const bool within = *at >= 0 && *at < block.bytes();
      const bool output = std::any_of(outputs.begin(), outputs.end(),
                                      [&](const Expected& e) { return e.placed.block == &block; });
      throw Rejected{{within && !output ? Fault::kInputChanged : Fault::kOutside,
                      what + " changed byte " + std::to_string(*at) + " of " + block.what() +
                          ", which has " + std::to_string(block.bytes()) +
                          (output ? " and is written in part" : " and is not its to write")}};
    }
  }

  void judge(const std::vector<Expected>& outputs, std::uint8_t filling) {
    for (const Expected& e : outputs) {
      Verdict verdict;
      if (case_.data == Data::kRandom) {
        Measure measure;
        verdict = judge_error(e, filling, measure);
        result_.measures.push_back(measure);
      } else if (case_.data == Data::kIntegers || !ambiguous(e)) {
        verdict = judge_equal(e, filling);
      }
      if (verdict.fault != Fault::kNone) throw Rejected{verdict};
    }
  }

  // The contract leaves open whether db1 sums dH before or after its rounding.
  static bool ambiguous(const Expected& e) { return e.what == "db_gate" || e.what == "db_up"; }

  static Bits bits(const std::vector<Expected>& outputs) {
    Bits all;
    for (const Expected& e : outputs) {
      Block& block = *e.placed.block;
      all.emplace_back(block.host(), block.host() + block.bytes());
    }
    return all;
  }

  static void require_same(const Bits& before, const std::vector<Expected>& outputs,
                           const std::string& when) {
    const Bits now = bits(outputs);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      require(now[i] == before[i], Fault::kNotRepeatable,
              outputs[i].what + " has other bits after " + when);
    }
  }

  const Case& case_;
  const Implementation& implementation_;
  CaseResult& result_;
  Blocks blocks_;
  Tensors tensors_;
  ExpectedLayer expected_;
  Block* h_ = nullptr;
  Block* saved_ = nullptr;
  Block* forward_scratch_ = nullptr;
  Block* backward_scratch_ = nullptr;
  Block* inference_scratch_ = nullptr;
};

}  // namespace

double CaseResult::worst_ratio() const {
  double worst = 0.0;
  for (const Measure& m : measures) worst = std::max(worst, m.ratio());
  return worst;
}

CaseResult run_layer_case(const Case& c, const Implementation& implementation) {
  const auto start = std::chrono::steady_clock::now();
  CaseResult result;
  result.name = c.name;
  try {
    LayerRun(c, implementation, result).run();
  } catch (const Rejected& rejected) {
    result.fault = rejected.verdict.fault;
    result.message = rejected.verdict.message;
  } catch (const std::exception& error) {
    result.fault = Fault::kThrew;
    result.message = error.what();
  }
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

std::vector<CaseResult> verify(const VerifyOptions& options, const Implementation& implementation,
                               const Progress& progress) {
  std::vector<Case> cases = layer_cases(options.extent, options.filter);
  std::erase_if(cases,
                [&](const Case& c) { return implementation.serves && !implementation.serves(c); });
  std::vector<CaseResult> results;
  for (const Case& c : cases) {
    results.push_back(run_layer_case(c, implementation));
    if (progress) progress(results.back(), results.size(), cases.size());
  }
  return results;
}

}  // namespace sonicmoe::verify
