// One layer in device memory: reglu, bf16, ids, gate and up as halves of one tensor. Values repeat
// with a prime period that divides no extent, so that an offset that overflows reads other values.
#pragma once

#include <algorithm>
#include <memory>

#include "core/numeric.h"
#include "device_array.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::testing {

inline constexpr std::int64_t kPeriod = 1048573;  // a prime

/// One period of -1, 0 and 1 as bf16; an eighth of the values is not 0.
inline std::vector<std::uint16_t> period_of(std::uint64_t seed) {
  std::vector<std::uint16_t> values(kPeriod);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (std::uint16_t& v : values) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto draw = static_cast<int>(state >> 60);
    v = draw == 0 ? 0x3f80 : draw == 1 ? 0xbf80 : 0;
  }
  return values;
}

/// A tensor of `count` values that repeats the values of period_of().
class Periodic {
 public:
  Periodic(std::int64_t count, std::uint64_t seed) : values_(period_of(seed)), array_(count * 2) {
    auto* at = static_cast<std::uint16_t*>(array_.data());
    for (std::int64_t done = 0; done < count;) {
      // After the first period, copies double the filled part.
      const std::int64_t part = done == 0 ? std::min(kPeriod, count) : std::min(done, count - done);
      must(cudaMemcpy(at + done, done == 0 ? static_cast<const void*>(values_.data()) : at,
                      static_cast<std::size_t>(part * 2), cudaMemcpyDefault));
      done += part;
    }
    DeviceArray::wait();
  }
  void* data() const { return array_.data(); }
  int value(std::int64_t i) const {
    const std::uint16_t v = values_[static_cast<std::size_t>(i % kPeriod)];
    return v == 0 ? 0 : v == 0x3f80 ? 1 : -1;
  }

 private:
  std::vector<std::uint16_t> values_;
  DeviceArray array_;
};

struct LayerShape {
  std::int64_t tokens, hidden, width, experts, top_k;
};

/// The weights, which several layers may use.
struct LayerWeights {
  explicit LayerWeights(const LayerShape& s)
      : shape(s),
        up(s.experts * 2 * s.width * s.hidden, 3),
        down(s.experts * s.hidden * s.width, 4) {}

  static Weights views(const LayerShape& s, void* up, void* down) {
    Weights w;
    w.gate = tensor3(up, DType::kBF16, s.experts, s.width, s.hidden);
    w.gate.stride[0] *= 2;
    w.up = w.gate;
    w.up.data = static_cast<std::uint16_t*>(up) + s.width * s.hidden;
    w.down = tensor3(down, DType::kBF16, s.experts, s.hidden, s.width);
    return w;
  }

  LayerShape shape;
  Periodic up;
  Periodic down;
};

/// A layer on a range of tokens. The caller owns the inputs, the layer its results and buffers.
class DeviceLayer {
 public:
  struct Inputs {
    void* x;
    void* dout;
    void* ids;      ///< (T, K) i32
    void* weights;  ///< (T, K) fp32
  };

  DeviceLayer(const LayerShape& s, const LayerWeights& w, const Inputs& in, const Exec& exec)
      : exec_(exec), problem_(problem_of(s)) {
    const Sizes forward = moe_sizes(problem_, Pass::kForward, exec);
    const Sizes backward = moe_sizes(problem_, Pass::kBackward, exec);
    const auto array = [&](std::int64_t bytes) {
      arrays_.push_back(std::make_unique<DeviceArray>(bytes));
      return arrays_.back().get();
    };
    out_ = array(s.tokens * s.hidden * 2);
    dx_ = array(s.tokens * s.hidden * 2);
    dweights_ = array(s.tokens * s.top_k * 4);
    dup_ = array(s.experts * 2 * s.width * s.hidden * 2);
    ddown_ = array(s.experts * s.hidden * s.width * 2);
    forward_.x = tensor2(in.x, DType::kBF16, s.tokens, s.hidden);
    forward_.routing.ids = tensor2(in.ids, DType::kI32, s.tokens, s.top_k);
    forward_.routing.weights = tensor2(in.weights, DType::kF32, s.tokens, s.top_k);
    forward_.weights = LayerWeights::views(s, w.up.data(), w.down.data());
    forward_.out = tensor2(out_->data(), DType::kBF16, s.tokens, s.hidden);
    forward_.h = array(forward.h_bytes)->buffer();
    forward_.saved = array(forward.saved_bytes)->buffer();
    forward_.scratch = array(std::max(forward.scratch_bytes, backward.scratch_bytes))->buffer();
    backward_.x = forward_.x;
    backward_.routing = forward_.routing;
    backward_.weights = forward_.weights;
    backward_.dout = tensor2(in.dout, DType::kBF16, s.tokens, s.hidden);
    backward_.h = forward_.h;
    backward_.saved = forward_.saved;
    backward_.scratch = forward_.scratch;
    backward_.dx = tensor2(dx_->data(), DType::kBF16, s.tokens, s.hidden);
    backward_.dweights = tensor2(dweights_->data(), DType::kF32, s.tokens, s.top_k);
    backward_.grads = LayerWeights::views(s, dup_->data(), ddown_->data());
  }

  void step(const Exec& exec) {
    moe_forward(problem_, forward_, exec);
    moe_backward(problem_, backward_, exec);
  }
  void step() { step(exec_); }
  /// Fills every result with NaN.
  void poison() {
    for (DeviceArray* a : results()) a->fill(0xff);
    must(cudaDeviceSynchronize());
  }
  std::vector<DeviceArray*> results() const { return {out_, dx_, dweights_, dup_, ddown_}; }
  const DeviceArray& out() const { return *out_; }
  const DeviceArray& dx() const { return *dx_; }
  const DeviceArray& dweights() const { return *dweights_; }
  const DeviceArray& dup() const { return *dup_; }
  const DeviceArray& ddown() const { return *ddown_; }

 private:
  static Problem problem_of(const LayerShape& s) {
    Problem p;
    p.tokens = s.tokens;
    p.hidden = s.hidden;
    p.width = s.width;
    p.experts = s.experts;
    p.top_k = s.top_k;
    p.dtype = DType::kBF16;
    p.activation.kind = ActivationKind::kReGLU;
    return p;
  }

  Exec exec_;
  Problem problem_;
  ForwardArgs forward_;
  BackwardArgs backward_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  DeviceArray* out_ = nullptr;
  DeviceArray* dx_ = nullptr;
  DeviceArray* dweights_ = nullptr;
  DeviceArray* dup_ = nullptr;
  DeviceArray* ddown_ = nullptr;
};

/// Expert of a token's slot k; the slots of a token have different experts for top_k <= 8.
inline std::int32_t expert_of(const LayerShape& s, std::int64_t token, std::int64_t k) {
  return static_cast<std::int32_t>((token * 7 + k * (s.experts / 8) + token / 1000) % s.experts);
}
inline float score_of(std::int64_t token, std::int64_t k) {
  constexpr float kScores[] = {0.5f, 1.0f, 2.0f};
  return kScores[(token + k) % 3];
}

}  // namespace sonicmoe::testing
