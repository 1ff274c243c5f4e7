// One case of the layer: forward twice, backward three times, inference once.
#include "core/fp8_layout.h"
#include "verify/caller.h"
#include "verify/expected.h"
#include "verify/oracle_fp8.h"

namespace sonicmoe::verify {
namespace {

class LayerRun {
 public:
  LayerRun(const Case& c, const Implementation& implementation, CaseResult& result)
      : case_(c),
        implementation_(implementation),
        caller_(c, implementation, result),
        tensors_(make_tensors(c, caller_.blocks())),
        expected_(expect_layer(c, tensors_)) {}

  void run() {
    if (expected_.sound.fault != Fault::kNone) throw Rejected{expected_.sound};
    add_buffers();
    if (case_.problem.precision == Precision::kFp8) quantize_weights();
    forward(kPoison);
    caller_.judge(expected_.forward, kPoison);
    const Caller::Bits out = Caller::bits(expected_.forward);
    // A backend without moe_backward is judged by its forward alone.
    const bool trains = static_cast<bool>(implementation_.moe_backward);
    Caller::Bits grads;
    if (trains) {
      backward(kPoison);
      caller_.judge(expected_.backward, kPoison);
      grads = Caller::bits(expected_.backward);
    }
    forward(kOtherPoison);
    Caller::require_same(out, expected_.forward, "forward on other bytes");
    if (trains) {
      backward(kOtherPoison);
      Caller::require_same(grads, expected_.backward, "backward on other bytes");
      backward(kPoison);
      Caller::require_same(grads, expected_.backward, "backward on the same saved state");
    }
    infer(kPoison);
    Caller::require_same(out, expected_.forward, "inference");
  }

 private:
  // Checks the limits of moe_sizes, then creates buffers of exactly its sizes.
  void add_buffers() {
    const Problem& p = case_.problem;
    const Sizes forward = implementation_.moe_sizes(p, Pass::kForward);
    const Sizes backward = implementation_.moe_sizes(p, Pass::kBackward);
    const Sizes inference = implementation_.moe_sizes(p, Pass::kInference);
    const std::int64_t capacity = oracle::slot_count(p);
    const std::int64_t h_bytes = kept_h_bytes(p);
    require(
        forward.h_bytes == h_bytes, Fault::kSizes,
        "h_bytes is " + std::to_string(forward.h_bytes) + ", must be " + std::to_string(h_bytes));
    const std::int64_t most = 20 * capacity + 16 * p.tokens + 1024 * p.experts;
    require(forward.saved_bytes <= most, Fault::kSizes,
            "saved_bytes is " + std::to_string(forward.saved_bytes) + ", must be at most " +
                std::to_string(most));
    require(inference.h_bytes == 0 && inference.saved_bytes == 0, Fault::kSizes,
            "inference keeps h or saved");
    Blocks& blocks = caller_.blocks();
    h_ = &blocks.add("h", forward.h_bytes);
    saved_ = &blocks.add("saved", forward.saved_bytes);
    forward_scratch_ = &blocks.add("scratch of forward", forward.scratch_bytes);
    backward_scratch_ = &blocks.add("scratch of backward", backward.scratch_bytes);
    inference_scratch_ = &blocks.add("scratch of inference", inference.scratch_bytes);
  }

  static Buffer buffer_of(Block* block) {
    return block == nullptr ? Buffer{} : Buffer{block->device(), block->bytes()};
  }

  // Every code and every scale must have the oracle's bits.
  void quantize_weights() {
    const Problem& p = case_.problem;
    fp8_weights_ = &caller_.blocks().add("fp8_weights", fp8::weights_layout(p).bytes);
    caller_.call({"quantize_weights", kPoison, {fp8_weights_}, {}}, {}, [&] {
      implementation_.quantize_weights(p, tensors_.weights.on_device(), buffer_of(fp8_weights_));
    });
    std::vector<std::uint8_t> wanted(static_cast<std::size_t>(fp8_weights_->bytes()));
    oracle::write_fp8_weights(oracle::read_weights(p, tensors_.weights.on_host()), wanted.data());
    const std::int64_t at = oracle::first_difference(p, fp8_weights_->host(), wanted.data());
    require(at < 0, Fault::kUnequal, "byte " + std::to_string(at) + " of fp8_weights differs");
  }

  ForwardArgs forward_args() const {
    ForwardArgs args;
    args.x = tensors_.x.on_device();
    args.routing = tensors_.routing.on_device();
    args.weights = tensors_.weights.on_device();
    args.out = tensors_.out.on_device();
    args.fp8_weights = buffer_of(fp8_weights_);
    return args;
  }

  void forward(std::uint8_t filling) {
    ForwardArgs args = forward_args();
    args.h = buffer_of(h_);
    args.saved = buffer_of(saved_);
    args.scratch = buffer_of(forward_scratch_);
    caller_.call({"forward", filling, {h_, saved_, forward_scratch_}, {}}, expected_.forward,
                 [&] { implementation_.moe_forward(case_.problem, args); });
  }

  void infer(std::uint8_t filling) {
    ForwardArgs args = forward_args();
    args.scratch = buffer_of(inference_scratch_);
    caller_.call({"inference", filling, {inference_scratch_}, {}}, expected_.forward,
                 [&] { implementation_.moe_forward(case_.problem, args); });
  }

  void backward(std::uint8_t filling) {
    BackwardArgs args;
    args.x = tensors_.x.on_device();
    args.routing = tensors_.routing.on_device();
    args.weights = tensors_.weights.on_device();
    args.dout = tensors_.dout.on_device();
    args.fp8_weights = buffer_of(fp8_weights_);
    args.h = buffer_of(h_);
    args.saved = buffer_of(saved_);
    args.scratch = buffer_of(backward_scratch_);
    const auto wanted = [&](const char* name, const BlockView& tensor) {
      return wants(case_, name) ? tensor.on_device() : Tensor{};
    };
    const WeightViews& grads = tensors_.grads;
    args.dx = wanted("dx", tensors_.dx);
    args.dweights = wanted("dweights", tensors_.dweights);
    args.grads.gate = wanted("dgate", grads.gate);
    args.grads.up = wanted("dup", grads.up);
    args.grads.down = wanted("ddown", grads.down);
    args.grads.b_gate = wanted("db_gate", grads.b_gate);
    args.grads.b_up = wanted("db_up", grads.b_up);
    args.grads.b_down = wanted("db_down", grads.b_down);
    args.grad_mode = case_.grad_mode;
    std::function<void()> prepare;
    if (case_.grad_mode == GradMode::kAccumulate) {
      prepare = [this] { fill_initial_grads(case_, tensors_.grads); };
    }
    caller_.call({"backward", filling, {backward_scratch_}, prepare}, expected_.backward,
                 [&] { implementation_.moe_backward(case_.problem, args); });
  }

  const Case& case_;
  const Implementation& implementation_;
  Caller caller_;
  Tensors tensors_;
  ExpectedLayer expected_;
  Block* fp8_weights_ = nullptr;  ///< null unless the case is in fp8
  Block* h_ = nullptr;
  Block* saved_ = nullptr;
  Block* forward_scratch_ = nullptr;
  Block* backward_scratch_ = nullptr;
  Block* inference_scratch_ = nullptr;
};

}  // namespace

void run_layer(const Case& c, const Implementation& implementation, CaseResult& result) {
  LayerRun(c, implementation, result).run();
}

}  // namespace sonicmoe::verify
