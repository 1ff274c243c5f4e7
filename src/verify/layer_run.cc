// One case of the layer: forward and backward twice, inference once; then each part of the
// tokens that the case names.
#include "core/fp8_layout.h"
#include "verify/batch_part.h"
#include "verify/caller.h"
#include "verify/expected.h"
#include "verify/oracle_fp8.h"

namespace sonicmoe::verify {
namespace {

// The whole batch or a part of it: its tensors, its outputs and buffers of exactly its sizes.
struct Batch {
  Problem problem;
  Tensors tensors;
  std::vector<Expected> forward, backward;
  Block* h = nullptr;
  Block* saved = nullptr;
  Block* forward_scratch = nullptr;
  Block* backward_scratch = nullptr;
  Block* inference_scratch = nullptr;
};

class LayerRun {
 public:
  LayerRun(const Case& c, const Implementation& implementation, CaseResult& result)
      : case_(c), implementation_(implementation), caller_(c, implementation, result) {
    whole_.problem = c.problem;
    whole_.tensors = make_tensors(c, caller_.blocks());
    ExpectedLayer expected = expect_layer(c, whole_.tensors);
    whole_.forward = std::move(expected.forward);
    whole_.backward = std::move(expected.backward);
    sound_ = std::move(expected.sound);
  }

  void run() {
    if (sound_.fault != Fault::kNone) throw Rejected{sound_};
    add_buffers(whole_);
    if (case_.problem.precision == Precision::kFp8) quantize_weights();
    run_whole();
    if (case_.parts.empty()) return;
    // The runs of the parts write rows of the whole batch's outputs.
    const std::vector<Rows> rows = rows_of_whole();
    for (const TokenRange& range : case_.parts) run_part(range, rows);
  }

 private:
  // A backend without moe_backward is judged by its forward alone.
  bool trains() const { return static_cast<bool>(implementation_.moe_backward); }

  void run_whole() {
    forward(whole_, kPoison);
    caller_.judge(whole_.forward, kPoison);
    const Caller::Bits out = Caller::bits(whole_.forward);
    Caller::Bits grads;
    if (trains()) {
      backward(whole_, kPoison);
      caller_.judge(whole_.backward, kPoison);
      grads = Caller::bits(whole_.backward);
    }
    forward(whole_, kOtherPoison);
    Caller::require_same(out, whole_.forward, "forward on other bytes");
    if (trains()) {
      backward(whole_, kOtherPoison);
      Caller::require_same(grads, whole_.backward, "backward on other bytes");
    }
    infer(whole_, kPoison);
    Caller::require_same(out, whole_.forward, "inference");
  }

  // The bytes of each row of an output.
  struct Rows {
    std::string what;
    std::vector<std::vector<std::uint8_t>> bytes;
  };

  std::vector<Rows> rows_of_whole() const {
    std::vector<Rows> all;
    const auto add = [&](const Expected& e) {
      if (e.what != "out" && e.what != "dx" && e.what != "dweights") return;
      all.push_back({e.what, {}});
      for (std::int64_t i = 0; i < e.tensor.view.shape[0]; ++i) {
        all.back().bytes.push_back(row_bytes(e.tensor, i));
      }
    };
    for (const Expected& e : whole_.forward) add(e);
    for (const Expected& e : whole_.backward) add(e);
    return all;
  }

  // Forward and backward with all gradients, then inference. Each row of out, dx and dweights must
  // have the bits that it has in the whole batch.
  void run_part(const TokenRange& range, const std::vector<Rows>& whole) {
    const BatchPart part = part_of(case_, whole_.tensors, range, caller_.blocks());
    Batch batch;
    batch.problem = part.problem;
    batch.tensors = part.tensors;
    batch.forward.push_back({"out", part.tensors.out, {}, {}, 0});
    for (const Expected& e : whole_.backward) {
      const BlockView& tensor = e.what == "dx"         ? part.tensors.dx
                                : e.what == "dweights" ? part.tensors.dweights
                                                       : e.tensor;
      batch.backward.push_back({e.what, tensor, {}, {}, 0});
    }
    add_buffers(batch);
    const std::string tokens = "the batch of tokens " + std::to_string(range.begin) + " to " +
                               std::to_string(range.end - 1);
    forward(batch, kPoison);
    require_rows(batch.forward, range, part, whole, tokens);
    if (trains()) {
      backward(batch, kPoison);
      require_rows(batch.backward, range, part, whole, tokens);
    }
    infer(batch, kPoison);
    require_rows(batch.forward, range, part, whole, "inference of " + tokens);
  }

  static void require_rows(const std::vector<Expected>& outputs, const TokenRange& range,
                           const BatchPart& part, const std::vector<Rows>& whole,
                           const std::string& when) {
    for (const Rows& rows : whole) {
      for (const Expected& e : outputs) {
        if (e.what != rows.what) continue;
        for (std::int64_t i = 0; i < e.tensor.view.shape[0]; ++i) {
          const std::int64_t row = e.what == "dweights" ? part.dweights_rows[i] : range.begin + i;
          require(row_bytes(e.tensor, i) == rows.bytes[row], Fault::kBatch,
                  "row " + std::to_string(row) + " of " + e.what + " has other bits in " + when);
        }
      }
    }
  }

  // Checks the limits of moe_sizes, then creates buffers of exactly its sizes.
  void add_buffers(Batch& batch) {
    const Problem& p = batch.problem;
    const Sizes forward = implementation_.moe_sizes(p, Pass::kForward);
    const Sizes backward = implementation_.moe_sizes(p, Pass::kBackward);
    const Sizes inference = implementation_.moe_sizes(p, Pass::kInference);
    const std::int64_t capacity = oracle::slot_count(p);
    const std::int64_t h_bytes = kept_h_bytes(p);
    require(
        forward.h_bytes == h_bytes, Fault::kSizes,
        "h_bytes is " + std::to_string(forward.h_bytes) + ", must be " + std::to_string(h_bytes));
    const std::int64_t most = 20 * capacity + 16 * p.tokens + 1024 * p.experts +
                              capacity * p.up_rank * dtype_bytes(p.dtype);
    require(forward.saved_bytes <= most, Fault::kSizes,
            "saved_bytes is " + std::to_string(forward.saved_bytes) + ", must be at most " +
                std::to_string(most));
    require(inference.h_bytes == 0 && inference.saved_bytes == 0, Fault::kSizes,
            "inference keeps h or saved");
    Blocks& blocks = caller_.blocks();
    batch.h = &blocks.add("h", forward.h_bytes);
    batch.saved = &blocks.add("saved", forward.saved_bytes);
    batch.forward_scratch = &blocks.add("scratch of forward", forward.scratch_bytes);
    batch.backward_scratch = &blocks.add("scratch of backward", backward.scratch_bytes);
    batch.inference_scratch = &blocks.add("scratch of inference", inference.scratch_bytes);
  }

  static Buffer buffer_of(Block* block) {
    return block == nullptr ? Buffer{} : Buffer{block->device(), block->bytes()};
  }

  // Every code and every scale must have the oracle's bits.
  void quantize_weights() {
    const Problem& p = case_.problem;
    fp8_weights_ = &caller_.blocks().add("fp8_weights", fp8::weights_layout(p).bytes);
    caller_.call({"quantize_weights", kPoison, {fp8_weights_}, {}}, {}, [&] {
      implementation_.quantize_weights(p, whole_.tensors.weights.on_device(),
                                       buffer_of(fp8_weights_));
    });
    std::vector<std::uint8_t> wanted(static_cast<std::size_t>(fp8_weights_->bytes()));
    oracle::write_fp8_weights(oracle::read_weights(p, whole_.tensors.weights.on_host()),
                              wanted.data());
    const std::int64_t at = oracle::first_difference(p, fp8_weights_->host(), wanted.data());
    require(at < 0, Fault::kUnequal, "byte " + std::to_string(at) + " of fp8_weights differs");
  }

  ForwardArgs forward_args(const Batch& batch) const {
    ForwardArgs args;
    args.x = batch.tensors.x.on_device();
    args.routing = batch.tensors.routing.on_device();
    args.weights = batch.tensors.weights.on_device();
    args.out = batch.tensors.out.on_device();
    args.fp8_weights = buffer_of(fp8_weights_);
    args.lora = batch.tensors.factors.on_device();
    return args;
  }

  void forward(const Batch& batch, std::uint8_t filling) {
    ForwardArgs args = forward_args(batch);
    args.h = buffer_of(batch.h);
    args.saved = buffer_of(batch.saved);
    args.scratch = buffer_of(batch.forward_scratch);
    caller_.call({"forward", filling, {batch.h, batch.saved, batch.forward_scratch}, {}},
                 batch.forward, [&] { implementation_.moe_forward(batch.problem, args); });
  }

  void infer(const Batch& batch, std::uint8_t filling) {
    ForwardArgs args = forward_args(batch);
    args.scratch = buffer_of(batch.inference_scratch);
    caller_.call({"inference", filling, {batch.inference_scratch}, {}}, batch.forward,
                 [&] { implementation_.moe_forward(batch.problem, args); });
  }

  void backward(const Batch& batch, std::uint8_t filling) {
    BackwardArgs args;
    args.x = batch.tensors.x.on_device();
    args.routing = batch.tensors.routing.on_device();
    args.weights = batch.tensors.weights.on_device();
    args.dout = batch.tensors.dout.on_device();
    args.fp8_weights = buffer_of(fp8_weights_);
    args.h = buffer_of(batch.h);
    args.saved = buffer_of(batch.saved);
    args.scratch = buffer_of(batch.backward_scratch);
    const auto wanted = [&](const char* name, const BlockView& tensor) {
      return wants(case_, name) ? tensor.on_device() : Tensor{};
    };
    const WeightViews& grads = batch.tensors.grads;
    args.dx = wanted("dx", batch.tensors.dx);
    args.dweights = wanted("dweights", batch.tensors.dweights);
    args.grads.gate = wanted("dgate", grads.gate);
    args.grads.up = wanted("dup", grads.up);
    args.grads.down = wanted("ddown", grads.down);
    args.grads.b_gate = wanted("db_gate", grads.b_gate);
    args.grads.b_up = wanted("db_up", grads.b_up);
    args.grads.b_down = wanted("db_down", grads.b_down);
    args.lora = batch.tensors.factors.on_device();
    const FactorViews& factors = batch.tensors.factor_grads;
    args.lora_grads.up = {wanted("dup.a", factors.up_a), wanted("dup.b", factors.up_b),
                          wanted("dup.gate_b", factors.up_gate_b)};
    args.lora_grads.down = {wanted("ddown.a", factors.down_a), wanted("ddown.b", factors.down_b)};
    args.grad_mode = case_.grad_mode;
    std::function<void()> prepare;
    if (case_.grad_mode == GradMode::kAccumulate) {
      prepare = [this] { fill_initial_grads(case_, whole_.tensors); };
    }
    caller_.call({"backward", filling, {batch.backward_scratch}, prepare}, batch.backward,
                 [&] { implementation_.moe_backward(batch.problem, args); });
  }

  const Case& case_;
  const Implementation& implementation_;
  Caller caller_;
  Batch whole_;
  Verdict sound_;
  Block* fp8_weights_ = nullptr;  ///< null unless the case is in fp8
};

}  // namespace

void run_layer(const Case& c, const Implementation& implementation, CaseResult& result) {
  LayerRun(c, implementation, result).run();
}

}  // namespace sonicmoe::verify
