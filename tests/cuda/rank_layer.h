// One rank's layer under expert parallelism: bf16 or fp8, ids, swiglu. Tensors depend on the rank
// alone, so that ranks of one process and ranks of several compute the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <vector>

#include "cuda/device_array.h"
#include "cuda/exchange/step.h"

namespace sonicmoe::testing {

using Bits = std::vector<std::vector<std::uint8_t>>;

inline constexpr ExchangePart kParts[] = {ExchangePart::kBegin, ExchangePart::kCompute,
                                          ExchangePart::kFinish};

/// A rank and where it runs.
struct RankHandle {
  Exchange* exchange;
  Exec exec;
  int ordinal;
  std::int32_t rank;
  std::int32_t ranks;
};

struct RankShape {
  std::int64_t tokens = 300, hidden = 264, width = 136, experts = 24, top_k = 4;
  Precision precision = Precision::kTensors;
};

inline std::vector<std::uint16_t> random_bf16(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<std::uint16_t> out(count);
  for (std::uint16_t& v : out) {
    const float f = uniform(random);
    std::uint32_t word = 0;
    __builtin_memcpy(&word, &f, 4);
    v = static_cast<std::uint16_t>(word >> 16);
  }
  return out;
}

/// A shape with 250 rows of each token's rank for every expert. So each rank has full tile records
/// of its own rows, which it multiplies before the rows of other ranks have arrived. RankShape{}
/// has about 48 such rows for an expert and no full record of them.
inline RankShape shape_with_own_records(std::int32_t ranks) {
  RankShape s;
  s.experts = s.top_k = 2 * ranks;
  return s;
}

/// One rank's tensors, buffers and calls, on its own GPU.
class RankLayer {
 public:
  RankLayer(const RankHandle& at, const RankShape& s, std::int64_t rows) : at_(at), rows_(rows) {
    must(cudaSetDevice(at.ordinal));
    // Ranks have different numbers of tokens.
    tokens_ = std::max<std::int64_t>(s.tokens - 7 * at.rank, 0);
    const std::int64_t experts = s.experts / at.ranks;
    problem_.tokens = tokens_;
    problem_.hidden = s.hidden;
    problem_.width = s.width;
    problem_.experts = s.experts;
    problem_.top_k = s.top_k;
    problem_.dtype = DType::kBF16;
    problem_.precision = s.precision;
    const Sizes f = exchange_sizes(*at.exchange, problem_, rows, Pass::kForward, exec());
    const Sizes b = exchange_sizes(*at.exchange, problem_, rows, Pass::kBackward, exec());
    x_ = random_array(tokens_ * s.hidden, 10 + at.rank);
    dout_ = random_array(tokens_ * s.hidden, 30 + at.rank);
    up_ = random_array(experts * 2 * s.width * s.hidden, 50 + at.rank);
    down_ = random_array(experts * s.hidden * s.width, 70 + at.rank);
    ids_ = array(tokens_ * s.top_k * 4);
    weights_ = array(tokens_ * s.top_k * 4);
    out_ = array(tokens_ * s.hidden * 2);
    dx_ = array(tokens_ * s.hidden * 2);
    dweights_ = array(tokens_ * s.top_k * 4);
    dup_ = array(up_->bytes());
    ddown_ = array(down_->bytes());
    forward_.x = rows_at(x_);
    forward_.routing.ids = tensor2(ids_->data(), DType::kI32, tokens_, s.top_k);
    forward_.routing.weights = tensor2(weights_->data(), DType::kF32, tokens_, s.top_k);
    forward_.weights = experts_at(up_, down_, s, experts);
    forward_.fp8_weights = codes(experts);
    forward_.out = rows_at(out_);
    forward_.h = array(f.h_bytes)->buffer();
    forward_.saved = array(f.saved_bytes)->buffer();
    forward_.scratch = array(std::max(f.scratch_bytes, b.scratch_bytes))->buffer();
    backward_.x = forward_.x;
    backward_.routing = forward_.routing;
    backward_.weights = forward_.weights;
    backward_.fp8_weights = forward_.fp8_weights;
    backward_.dout = rows_at(dout_);
    backward_.h = forward_.h;
    backward_.saved = forward_.saved;
    backward_.scratch = forward_.scratch;
    backward_.dx = rows_at(dx_);
    backward_.dweights = tensor2(dweights_->data(), DType::kF32, tokens_, s.top_k);
    backward_.grads = experts_at(dup_, ddown_, s, experts);
    must(cudaSetDevice(0));
  }

  const Exec& exec() const { return at_.exec; }
  const Problem& problem() const { return problem_; }
  std::int64_t rows() const { return rows_; }
  const ForwardArgs& forward_args() const { return forward_; }
  const BackwardArgs& backward_args() const { return backward_; }
  /// Ids below `experts`, some slots empty.
  void route(unsigned seed, int experts) {
    must(cudaSetDevice(at_.ordinal));
    std::mt19937 random(seed * 100 + at_.rank);
    std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
    std::vector<std::int32_t> ids(tokens_ * problem_.top_k);
    std::vector<float> weights(ids.size());
    for (std::int32_t& id : ids) id = static_cast<int>(random() % (experts + 1)) - 1;
    for (float& w : weights) w = uniform(random);
    ids_->set(ids);
    weights_->set(weights);
    must(cudaSetDevice(0));
  }
  void forward(ExchangePart part) {
    exchange_forward(*at_.exchange, problem_, rows_, forward_, part, exec());
  }
  void backward(ExchangePart part) {
    exchange_backward(*at_.exchange, problem_, rows_, backward_, part, exec());
  }
  std::int64_t rows_asked() const { return exchange_rows(*at_.exchange, exec()); }
  void poison() {
    must(cudaSetDevice(at_.ordinal));
    for (DeviceArray* a : outputs()) a->fill(0x7f);
    must(cudaSetDevice(0));
  }
  void append(Bits& bits) const {
    for (const DeviceArray* a : outputs()) bits.push_back(a->get());
  }
  /// Enqueues a copy of the outputs, as repeat `index`, and then fills the outputs, h, saved and
  /// scratch, so that no later step can use what this one has left there. Every repeat can be
  /// compared, although the host waits only after the last one.
  void keep(std::size_t index) {
    must(cudaSetDevice(at_.ordinal));
    const auto stream = static_cast<cudaStream_t>(exec().stream);
    while (kept_.size() <= index) {
      kept_.emplace_back();
      for (const DeviceArray* a : outputs()) kept_.back().push_back(array(a->bytes()));
    }
    for (std::size_t i = 0; i < outputs().size(); ++i) {
      DeviceArray* a = outputs()[i];
      must(cudaMemcpyAsync(kept_[index][i]->data(), a->data(), a->bytes(), cudaMemcpyDeviceToDevice,
                           stream));
      must(cudaMemsetAsync(a->data(), 0x7f, a->bytes(), stream));
    }
    for (const Buffer& b : {forward_.h, forward_.saved, forward_.scratch}) {
      must(cudaMemsetAsync(b.data, 0xff, b.bytes, stream));
    }
    must(cudaSetDevice(0));
  }
  void append_kept(std::size_t index, Bits& bits) const {
    for (const DeviceArray* a : kept_[index]) bits.push_back(a->get());
  }
  /// The number of tile records that the last step of `pass` multiplied before the rows of other
  /// ranks had arrived. The step must be complete.
  std::int32_t own_records(Pass pass) const {
    const Problem layer = cuda::layer_problem(*at_.exchange, problem_, rows_);
    const cuda::StepMemory memory =
        cuda::step_memory(layer, pass, {forward_.saved.data, forward_.scratch.data}, exec());
    std::int32_t count = 0;
    must(cudaMemcpy(&count, memory.split.own.record_count, 4, cudaMemcpyDeviceToHost));
    return count;
  }
  const DeviceArray& out() const { return *out_; }
  const DeviceArray& dx() const { return *dx_; }

 private:
  std::array<DeviceArray*, 5> outputs() const { return {out_, dx_, dweights_, dup_, ddown_}; }
  DeviceArray* array(std::int64_t bytes) {
    return arrays_.emplace_back(std::make_unique<DeviceArray>(bytes)).get();
  }
  DeviceArray* random_array(std::int64_t count, unsigned seed) {
    DeviceArray* a = array(count * 2);
    a->set(random_bf16(count, seed));
    return a;
  }
  /// The quantised weights of this rank's experts; empty without fp8.
  Buffer codes(std::int64_t experts) {
    if (problem_.precision == Precision::kTensors) return {};
    Problem own = problem_;
    own.experts = experts;
    const Buffer buffer = array(fp8_weights_bytes(own, exec()))->buffer();
    quantize_weights(own, forward_.weights, buffer, exec());
    return buffer;
  }
  Tensor rows_at(const DeviceArray* a) const {
    return tensor2(a->data(), DType::kBF16, tokens_, problem_.hidden);
  }
  static Weights experts_at(const DeviceArray* up, const DeviceArray* down, const RankShape& s,
                            std::int64_t experts) {
    Weights w;
    w.gate = tensor3(up->data(), DType::kBF16, experts, s.width, s.hidden);
    w.gate.stride[0] *= 2;
    w.up = w.gate;
    w.up.data = static_cast<std::uint16_t*>(up->data()) + s.width * s.hidden;
    w.down = tensor3(down->data(), DType::kBF16, experts, s.hidden, s.width);
    return w;
  }

  RankHandle at_;
  std::int64_t rows_;
  std::int64_t tokens_ = 0;
  Problem problem_;
  ForwardArgs forward_;
  BackwardArgs backward_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  std::vector<std::vector<DeviceArray*>> kept_;  ///< outputs of each repeat
  DeviceArray *x_, *dout_, *up_, *down_, *ids_, *weights_, *out_, *dx_, *dweights_, *dup_, *ddown_;
};

}  // namespace sonicmoe::testing
