// Precision::kFp8 on the device: quantisers bit for bit, layers of integers against the CPU, equal
// bits in every run and in a graph, and refusals.
#include <gtest/gtest.h>

#include <random>

#include "core/fp8_layout.h"
#include "core/fp8_quantize.h"
#include "core/numeric.h"
#include "cuda/layer/engine.h"
#include "device_layer.h"
#include "each_engine.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::LayerShape;
using testing::LayerWeights;
using testing::must;
using testing::period_of;
using Bytes = std::vector<std::uint8_t>;

/// Zeros at a multiple of 64 bytes, as the CPU takes its buffers.
class HostArray {
 public:
  explicit HostArray(std::int64_t bytes)
      : memory_(static_cast<std::size_t>(bytes + kAlign - 1)), bytes_(bytes) {}
  std::uint8_t* data() {
    return memory_.data() + -reinterpret_cast<std::uintptr_t>(memory_.data()) % kAlign;
  }
  Buffer buffer() { return {data(), bytes_}; }
  Bytes get() { return {data(), data() + bytes_}; }

 private:
  static constexpr std::int64_t kAlign = 64;
  Bytes memory_;
  std::int64_t bytes_;
};

/// bf16 bits: all kinds of numbers, blocks of zeros, of tiny values, with NaN and infinities.
std::vector<std::uint16_t> any_values(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t block = i / fp8::kBlock;
    const auto bits = static_cast<std::uint32_t>(random());
    std::uint32_t exponent = 100 + bits % 50;              // beside each other
    if (block % 5 == 1) exponent = 0;                      // zeros and subnormals
    if (block % 5 == 2) exponent = bits % 255;             // anything finite
    if (block % 5 == 3 && bits % 16 == 0) exponent = 255;  // some NaN, infinities
    const std::uint32_t mantissa =
        block % 10 == 1 || (exponent == 255 && bits & 32) ? 0 : bits >> 8 & 127;
    values[i] = static_cast<std::uint16_t>((bits >> 31) << 15 | exponent << 7 | mantissa);
  }
  return values;
}

/// With the engine that has FP8 on device 0.
class CudaFp8 : public ::testing::Test {
 protected:
  void SetUp() override {
    const int capability = testing::test_device().capability;
    if (capability != 90 && capability != 100 && capability != 103) {
      GTEST_SKIP() << "no engine has FP8 for this GPU";
    }
    engine_ = capability == 90 ? "hopper" : "blackwell";
    device_ = cuda::open_device(0, engine_);
    exec_.backend = Backend::kCuda;
    exec_.device = device_;
  }
  void TearDown() override {
    if (device_ != nullptr) cuda::close_device(device_);
  }

  const char* engine_ = nullptr;
  const cuda::Device* device_ = nullptr;
  Exec exec_;
};

TEST_F(CudaFp8, QuantisesRowsAsTheHostDoes) {
  constexpr std::int64_t kRows = 67, kWidth = 576, kDepth = 640, kStride = 648;
  const std::vector<std::uint16_t> values = any_values(kRows * kStride, 1);
  DeviceArray rows(kRows * kStride * 2), codes(kRows * kDepth), scales(kRows * kDepth / 128 * 4);
  rows.set(values);
  Tensor view = tensor2(rows.data(), DType::kBF16, kRows, kWidth);
  view.stride[0] = kStride;
  const cuda::CodedRows out{tensor2(codes.data(), DType::kBF16, kRows, kDepth),
                            {static_cast<float*>(scales.data()), 0}};
  device_->engine->quantizers->rows(*device_, {view, out}, nullptr);
  must(cudaDeviceSynchronize());
  const Bytes got = codes.get();
  const std::vector<float> got_scales = scales.get<float>();
  for (std::int64_t block = 0; block < kRows * kDepth / 128; ++block) {
    const std::int64_t row = block / (kDepth / 128), first = block % (kDepth / 128) * 128;
    const auto value = [&](std::int64_t i) {
      return first + i < kWidth ? to_float(BF16{values[row * kStride + first + i]}) : 0.0f;
    };
    std::uint32_t largest = 0;
    for (int i = 0; i < 128; ++i) largest = std::max(largest, fp8::magnitude_of(value(i)));
    const float scale = fp8::scale_of(largest);
    ASSERT_EQ(got_scales[block], scale) << "row " << row << ", column " << first;
    for (int i = 0; i < 128; ++i) {
      ASSERT_EQ(got[row * kDepth + first + i], fp8::code_of(value(i), fp8::inverse_of(scale)))
          << "row " << row << ", column " << first + i << ", value " << value(i);
    }
  }
}

void expect_weights_of_the_cpu(const Exec& exec, std::int64_t d, std::int64_t n) {
  constexpr std::int64_t kE = 3;
  Problem p;
  p.tokens = 1;
  p.hidden = d;
  p.width = n;
  p.experts = kE;
  p.top_k = 1;
  p.dtype = DType::kBF16;
  p.precision = Precision::kFp8;
  const std::vector<std::uint16_t> up = any_values(kE * 2 * n * d, 2);
  const std::vector<std::uint16_t> down = any_values(kE * d * n, 3);
  DeviceArray device_up(kE * 2 * n * d * 2), device_down(kE * d * n * 2);
  device_up.set(up);
  device_down.set(down);
  // Gate and up: side by side; rows alternate; transposed; columns alternate ("paired").
  for (int layout = 0; layout < 4; ++layout) {
    const auto weights = [&](const void* u, const void* v) {
      Weights w;
      auto* first = const_cast<std::uint16_t*>(static_cast<const std::uint16_t*>(u));
      w.gate = tensor3(first, DType::kBF16, kE, n, d);
      w.gate.stride[0] = 2 * n * d;
      std::int64_t next = n * d;
      if (layout == 1) {
        w.gate.stride[1] = 2 * d;
        next = d;
      } else if (layout == 2) {
        w.gate.stride[1] = 1;
        w.gate.stride[2] = n;
      } else if (layout == 3) {
        w.gate.stride[1] = 2;
        w.gate.stride[2] = 2 * n;
        next = 1;
      }
      w.up = w.gate;
      w.up.data = first + next;
      w.down = tensor3(const_cast<void*>(v), DType::kBF16, kE, d, n);
      if (layout >= 2) {
        w.down.stride[1] = 1;
        w.down.stride[2] = d;
      }
      return w;
    };
    const std::int64_t bytes = fp8_weights_bytes(p, exec);
    HostArray want(bytes);
    DeviceArray got(bytes);
    got.fill(0);
    quantize_weights(p, weights(up.data(), down.data()), want.buffer());
    quantize_weights(p, weights(device_up.data(), device_down.data()), got.buffer(), exec);
    must(cudaDeviceSynchronize());
    EXPECT_EQ(got.get(), want.get()) << "layout " << layout << ", d " << d << ", n " << n;
  }
}

TEST_F(CudaFp8, QuantisesWeightsAsTheCpuDoes) {
  expect_weights_of_the_cpu(exec_, 256, 384);
  expect_weights_of_the_cpu(exec_, 192, 320);
}

/// A layer of integers on either backend, and its results.
class IntegerLayer {
 public:
  IntegerLayer(const LayerShape& s, KeptH kept) : shape_(s) {
    problem_.tokens = s.tokens;
    problem_.hidden = s.hidden;
    problem_.width = s.width;
    problem_.experts = s.experts;
    problem_.top_k = s.top_k;
    problem_.dtype = DType::kBF16;
    problem_.activation.kind = ActivationKind::kReGLU;
    problem_.precision = Precision::kFp8;
    problem_.kept_h = kept;
    // Sparse rows: the tensor core keeps 14 bits of the sum of a block.
    x_ = values(s.tokens * s.hidden, 1, 7);
    dout_ = values(s.tokens * s.hidden, 2, 7);
    up_ = values(s.experts * 2 * s.width * s.hidden, 3, 1);
    down_ = values(s.experts * s.hidden * s.width, 4, 1);
    vary_scales(s);
    for (std::int64_t i = 0; i < s.tokens * s.top_k; ++i) {
      const auto expert = static_cast<std::int32_t>((i * 7 + i / s.top_k) % s.experts);
      ids_.push_back(i % 3 == 0 ? 0 : expert);
      scores_.push_back(testing::score_of(i, 0));
    }
  }

  /// Makes one element of a token of x and of another token of dout so large that products
  /// overflow: H and A get infinities and NaN in the first token's rows, dH in the other's.
  void overflow(std::int64_t of_x, std::int64_t of_dout) {
    constexpr std::uint16_t kLarge = 0x7f00;  // 2^127
    x_[static_cast<std::size_t>(of_x * shape_.hidden)] = kLarge;
    dout_[static_cast<std::size_t>(of_dout * shape_.hidden)] = kLarge;
  }

  /// out, dx, dweights, dup and ddown.
  std::vector<Bytes> on_cpu() {
    std::vector<Bytes> results = empty_results();
    std::vector<HostArray> buffers;
    for (const std::int64_t b : buffer_bytes({})) buffers.emplace_back(b);
    const auto at = [](auto& v) { return const_cast<void*>(static_cast<const void*>(v.data())); };
    run({at(x_), at(dout_), at(up_), at(down_), at(ids_), at(scores_)},
        {at(results[0]), at(results[1]), at(results[2]), at(results[3]), at(results[4])},
        {buffers[0].data(), buffers[1].data(), buffers[2].data(), buffers[3].data()}, {});
    return results;
  }

  /// The same on a device; `around` is called with a function that enqueues the whole step.
  template <class Around>
  std::vector<Bytes> on_device(const Exec& exec, const Around& around) {
    DeviceArray x(bytes(x_)), dout(bytes(dout_)), up(bytes(up_)), down(bytes(down_));
    DeviceArray ids(bytes(ids_)), scores(bytes(scores_));
    x.set(x_);
    dout.set(dout_);
    up.set(up_);
    down.set(down_);
    ids.set(ids_);
    scores.set(scores_);
    std::vector<std::unique_ptr<DeviceArray>> results, buffers;
    for (const Bytes& r : empty_results()) {
      results.push_back(std::make_unique<DeviceArray>(bytes(r)));
    }
    for (const std::int64_t b : buffer_bytes(exec)) {
      buffers.push_back(std::make_unique<DeviceArray>(b));
    }
    around([&](const Exec& e) {
      run({x.data(), dout.data(), up.data(), down.data(), ids.data(), scores.data()},
          {results[0]->data(), results[1]->data(), results[2]->data(), results[3]->data(),
           results[4]->data()},
          {buffers[0]->data(), buffers[1]->data(), buffers[2]->data(), buffers[3]->data()}, e);
    });
    must(cudaDeviceSynchronize());
    std::vector<Bytes> bits;
    for (const auto& r : results) bits.push_back(r->get());
    return bits;
  }
  std::vector<Bytes> on_device(const Exec& exec) {
    return on_device(exec, [&](const auto& step) { step(exec); });
  }

 private:
  using Pointers = std::vector<void*>;

  /// Zero but for every `step`-th one.
  static std::vector<std::uint16_t> values(std::int64_t count, std::uint64_t seed, int step) {
    const std::vector<std::uint16_t> period = period_of(seed);
    std::vector<std::uint16_t> all(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; i += step) all[i] = period[i % testing::kPeriod];
    return all;
  }
  /// Multiplies each block of 128 columns, or rows, of an operand by a power of two of its own, and
  /// its counterpart in the other operand by the inverse. No sum changes, but a product with the
  /// scale of another block is wrong.
  void vary_scales(const LayerShape& s) {
    constexpr std::int64_t kBlock = 128;
    const auto scale = [](std::uint16_t& value, std::int64_t index, int sign) {
      const int exponent = sign * static_cast<int>(index / kBlock % 3);
      if ((value & 0x7fff) != 0) value += static_cast<std::uint16_t>(exponent * (1 << 7));
    };
    for (std::size_t i = 0; i < x_.size(); ++i) scale(x_[i], i % s.hidden, -1);
    for (std::size_t i = 0; i < up_.size(); ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i) / s.hidden % (2 * s.width);
      scale(up_[i], i % s.hidden, 1);
      if (row >= s.width) scale(up_[i], row - s.width, -1);  // A, by which down is multiplied
    }
    for (std::size_t i = 0; i < down_.size(); ++i) scale(down_[i], i % s.width, 1);
  }
  template <class T>
  static std::int64_t bytes(const std::vector<T>& v) {
    return static_cast<std::int64_t>(v.size() * sizeof(T));
  }
  std::vector<Bytes> empty_results() const {
    const LayerShape& s = shape_;
    std::vector<Bytes> results;
    for (const std::int64_t size :
         {s.tokens * s.hidden * 2, s.tokens * s.hidden * 2, s.tokens * s.top_k * 4,
          s.experts * 2 * s.width * s.hidden * 2, s.experts * s.hidden * s.width * 2}) {
      results.emplace_back(static_cast<std::size_t>(size));
    }
    return results;
  }
  /// Of fp8_weights, h, saved and scratch.
  std::vector<std::int64_t> buffer_bytes(const Exec& exec) const {
    const Sizes f = moe_sizes(problem_, Pass::kForward, exec);
    const Sizes b = moe_sizes(problem_, Pass::kBackward, exec);
    return {fp8_weights_bytes(problem_, exec), f.h_bytes, f.saved_bytes,
            std::max(f.scratch_bytes, b.scratch_bytes)};
  }

  void run(const Pointers& in, const Pointers& out, const Pointers& work, const Exec& exec) const {
    const LayerShape& s = shape_;
    const std::vector<std::int64_t> size = buffer_bytes(exec);
    const auto rows = [&](void* data) { return tensor2(data, DType::kBF16, s.tokens, s.hidden); };
    ForwardArgs f;
    f.x = rows(in[0]);
    f.routing.ids = tensor2(in[4], DType::kI32, s.tokens, s.top_k);
    f.routing.weights = tensor2(in[5], DType::kF32, s.tokens, s.top_k);
    f.weights = LayerWeights::views(s, in[2], in[3]);
    f.out = rows(out[0]);
    f.fp8_weights = {work[0], size[0]};
    f.h = {work[1], size[1]};
    f.saved = {work[2], size[2]};
    f.scratch = {work[3], size[3]};
    BackwardArgs b;
    b.x = f.x;
    b.routing = f.routing;
    b.weights = f.weights;
    b.dout = rows(in[1]);
    b.fp8_weights = f.fp8_weights;
    b.h = f.h;
    b.saved = f.saved;
    b.scratch = f.scratch;
    b.dx = rows(out[1]);
    b.dweights = tensor2(out[2], DType::kF32, s.tokens, s.top_k);
    b.grads = LayerWeights::views(s, out[3], out[4]);
    quantize_weights(problem_, f.weights, f.fp8_weights, exec);
    moe_forward(problem_, f, exec);
    moe_backward(problem_, b, exec);
  }

  LayerShape shape_;
  Problem problem_;
  std::vector<std::uint16_t> x_, dout_, up_, down_;
  std::vector<std::int32_t> ids_;
  std::vector<float> scores_;
};

// Sums of integers are exact, so the CPU and the device have the same bits. The first shape has
// more blocks of K than a warp keeps scales of. The other shapes cover a dynamic tile order in A
// and dH, and in dX~.
TEST_F(CudaFp8, IntegersEqualTheCpu) {
  constexpr LayerShape kShapes[] = {
      {5, 8448, 128, 1, 1},  {130, 128, 4224, 2, 1}, {700, 256, 384, 2, 2},  {900, 384, 640, 3, 2},
      {700, 192, 704, 2, 2}, {5, 2880, 64, 1, 1},    {130, 1088, 320, 2, 1}, {300, 128, 192, 9, 3}};
  // The last four have blocks of 64.
  const char* names[] = {"out", "dx", "dweights", "dup", "ddown"};
  for (const LayerShape& s : kShapes) {
    for (const KeptH kept : {KeptH::kPrecision, KeptH::kTensors}) {
      IntegerLayer layer(s, kept);
      const std::vector<Bytes> want = layer.on_cpu(), got = layer.on_device(exec_);
      for (int i = 0; i < 5; ++i) {
        EXPECT_TRUE(got[i] == want[i])
            << names[i] << " of d = " << s.hidden << ", n = " << s.width << ", kept "
            << static_cast<int>(kept) << " differs at byte "
            << std::mismatch(got[i].begin(), got[i].end(), want[i].begin()).first - got[i].begin();
      }
    }
  }
}

/// The number of bf16 elements of a row that are NaN.
std::int64_t count_nan(const Bytes& elements, std::int64_t row, std::int64_t width) {
  std::int64_t count = 0;
  for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
    const int magnitude = elements[2 * i] | (elements[2 * i + 1] & 0x7f) << 8;
    count += magnitude > 0x7f80 ? 1 : 0;
  }
  return count;
}

// Infinities get the NaN code in the epilogues of A and dH, so they reach the outputs as NaN: the
// code of 448 in their place would give a finite output. Other tokens keep their bits.
TEST_F(CudaFp8, InfinitiesOfATokenBecomeNaN) {
  constexpr std::int64_t kOfX = 3, kOfDout = 70;
  for (int variant = 0; variant < 4; ++variant) {
    const LayerShape shape{130, 256, variant < 2 ? 384 : 320, 2, 2};
    const KeptH kept = variant % 2 == 0 ? KeptH::kPrecision : KeptH::kTensors;
    const std::vector<Bytes> usual = IntegerLayer(shape, kept).on_device(exec_);
    IntegerLayer layer(shape, kept);
    layer.overflow(kOfX, kOfDout);
    const std::vector<Bytes> want = layer.on_cpu(), got = layer.on_device(exec_);
    EXPECT_GT(count_nan(want[0], kOfX, shape.hidden), 0);
    EXPECT_GT(count_nan(want[1], kOfDout, shape.hidden), 0);
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
      for (int i = 0; i < 2; ++i) {  // out, dx
        EXPECT_EQ(count_nan(got[i], t, shape.hidden), count_nan(want[i], t, shape.hidden))
            << "output " << i << ", token " << t;
        if (t == kOfX || t == kOfDout) continue;
        const std::int64_t row = shape.hidden * 2;
        EXPECT_TRUE(std::equal(got[i].begin() + t * row, got[i].begin() + (t + 1) * row,
                               usual[i].begin() + t * row))
            << "output " << i << ", token " << t;
      }
    }
  }
}

TEST_F(CudaFp8, EveryRunHasTheSameBits) {
  IntegerLayer layer({3001, 384, 640, 24, 3}, KeptH::kPrecision);
  auto* fewer = const_cast<cuda::Device*>(cuda::open_device(0, engine_));
  Exec exec = exec_;
  exec.device = fewer;
  const std::vector<Bytes> want = layer.on_device(exec);
  for (const int multiprocessors : {2, 34, 130, 132, 132, 132}) {
    fewer->multiprocessors = multiprocessors;
    EXPECT_TRUE(layer.on_device(exec) == want) << multiprocessors << " multiprocessors";
  }
  cuda::close_device(fewer);
}

TEST_F(CudaFp8, GraphsReplayTheStep) {
  IntegerLayer layer({301, 256, 128, 9, 3}, KeptH::kPrecision);
  const std::vector<Bytes> want = layer.on_device(exec_);
  const std::vector<Bytes> replayed = layer.on_device(exec_, [&](const auto& step) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Exec exec = exec_;
    exec.stream = stream;
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    step(exec);
    must(cudaStreamEndCapture(stream, &graph));
    must(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 3; ++i) must(cudaGraphLaunch(replay, stream));
    must(cudaStreamSynchronize(stream));
    must(cudaGraphExecDestroy(replay));
    must(cudaGraphDestroy(graph));
    must(cudaStreamDestroy(stream));
  });
  EXPECT_TRUE(replayed == want);
}

/// One token and one expert, of the smallest extents that fp8 takes.
Problem smallest_problem() {
  Problem p;
  p.tokens = p.experts = p.top_k = 1;
  p.hidden = p.width = 128;
  p.dtype = DType::kBF16;
  p.precision = Precision::kFp8;
  return p;
}

void expect_refusal(const Problem& p, Pass pass, const Exec& exec, const std::string& part) {
  try {
    moe_sizes(p, pass, exec);
    ADD_FAILURE() << "it was served";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST_F(CudaFp8, ThePortableEngineRefuses) {
  const cuda::Device* portable = cuda::open_device(0, "portable");
  Exec exec = exec_;
  exec.device = portable;
  expect_refusal(smallest_problem(), Pass::kForward, exec, "the engine portable has no FP8");
  cuda::close_device(portable);
}

// Nobody has measured fp8 on Blackwell, so "auto" does not take it there.
TEST_F(CudaFp8, FactorsAndAutoAreTheEnginesChoice) {
  const bool is_hopper = std::string(engine_) == "hopper";
  Problem p = smallest_problem();
  p.hidden = p.width = 1024;
  p.tokens = 1 << 16;
  EXPECT_EQ(auto_precision(p, exec_), is_hopper ? Precision::kFp8 : Precision::kTensors);
  p.up_rank = 16;
  if (is_hopper) {
    EXPECT_NO_THROW(moe_sizes(p, Pass::kForward, exec_));
  } else {
    expect_refusal(
        p, Pass::kForward, exec_,
        "precision is fp8, must be tensors with low-rank factors on the engine blackwell");
  }
}

// 32-bit offsets in units of 16 bytes reach 2^36 codes. Only sizes are asked for: no memory is
// allocated.
TEST_F(CudaFp8, MoreCodesThanOffsetsReachAreRefused) {
  for (const Pass pass : {Pass::kInference, Pass::kForward, Pass::kBackward}) {
    for (const std::int64_t hidden : {128, 8192}) {
      Problem p = smallest_problem();
      p.hidden = hidden;
      p.tokens = (std::int64_t{1} << 36) / hidden;
      EXPECT_NO_THROW(moe_sizes(p, pass, exec_)) << "hidden " << hidden;
      p.tokens++;
      expect_refusal(p, pass, exec_,
                     "tokens * hidden is " + std::to_string((std::int64_t{1} << 36) + hidden) +
                         ", must be at most 68719476736 for fp8 on CUDA");
      p.precision = Precision::kTensors;
      EXPECT_NO_THROW(moe_sizes(p, pass, exec_)) << "hidden " << hidden << " in bf16";
    }
    Problem p = smallest_problem();
    p.hidden = 64;
    p.tokens = (std::int64_t{1} << 36) / 128;
    EXPECT_NO_THROW(moe_sizes(p, pass, exec_));
    p.tokens++;
    expect_refusal(p, pass, exec_,
                   "tokens * hidden, rounded up to a multiple of 128, is 68719476864, must be");
  }
}

}  // namespace
}  // namespace sonicmoe
