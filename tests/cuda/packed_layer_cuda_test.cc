// moe_forward() and moe_backward() on packed weights, which unpack a few experts at a time or
// inside the products, against the same passes on weights that unpack_weights() wrote: every byte
// of every result.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <random>

#include "core/numeric.h"
#include "device_array.h"
#include "each_engine.h"
#include "packed_cases.h"
#include "sonicmoe/packed.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::PackedCase;

constexpr std::int64_t kTokens = 90, kHidden = 320, kExperts = 5, kTopK = 2;
constexpr std::int64_t kRank = 40;  // two k tiles of depth 32, the second with a tail
constexpr std::int64_t kWidth = 192, kOneTile = 32;  // of the experts: several k tiles, and one

/// How many experts' weights fit into the memory of a pass.
struct Room {
  std::int64_t up, down;
};

/// Where gate and up are in the unpacked tensor.
enum class Halves { kConcatenated, kAlternating };

/// The contiguous dimension of the packed tensors: d of up and n of down, or the other one.
enum class Order { kAsShipped, kTransposed };

/// Finite scales, so that no NaN hides a difference. An expert's blocks of NF4 are no multiple of
/// the 256 that share a nested scale.
PackedCase packed_case(PackedFormat format, bool nested, std::int64_t rows, std::int64_t columns,
                       unsigned seed) {
  std::mt19937 random(seed);
  PackedCase c = format == PackedFormat::kNF4
                     ? testing::nf4_case(kExperts, rows, columns, nested ? 64 : 32, nested)
                 : format == PackedFormat::kMXFP4 ? testing::mxfp4_case(kExperts, rows, columns)
                                                  : testing::fp8_case(kExperts, rows, columns);
  const auto floats = [&random](std::size_t bytes, float low, float high) {
    std::uniform_real_distribution<float> draw(low, high);
    std::vector<float> values(bytes / 4);
    for (float& v : values) v = draw(random);
    return testing::bytes_of(values);
  };
  for (auto& code : c.codes) code = static_cast<std::uint8_t>(random());
  if (format == PackedFormat::kMXFP4) {
    for (auto& s : c.scales) s = static_cast<std::uint8_t>(118 + random() % 4);
  } else if (nested) {
    for (auto& s : c.scales) s = static_cast<std::uint8_t>(random());
    c.nested_map = floats(c.nested_map.size(), -1.0f, 1.0f);
    c.nested_scales = floats(c.nested_scales.size(), 0.01f, 0.05f);
  } else {
    if (format == PackedFormat::kFP8Blocks) {
      for (auto& code : c.codes) code &= 0xbfu;  // below 2, and never NaN
    }
    c.scales = floats(c.scales.size(), 0.02f, 0.1f);
  }
  return c;
}

/// Device memory of exactly these bytes. Without the guards of DeviceArray the emulator and
/// memcheck see a read that begins right after it.
class ExactArray {
 public:
  explicit ExactArray(const std::vector<std::uint8_t>& bytes)
      : bytes_(static_cast<std::int64_t>(bytes.size())) {
    testing::must(cudaMalloc(&data_, bytes.size()));
    testing::must(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  }
  ~ExactArray() { cudaFree(data_); }
  ExactArray(const ExactArray&) = delete;
  ExactArray& operator=(const ExactArray&) = delete;

  Buffer buffer() const { return {data_, bytes_}; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_;
};

/// A layer with low-rank factors and biases, and its packed weights.
class Layer {
 public:
  Layer(PackedFormat format, bool nested, Halves halves, const Exec& exec,
        Order order = Order::kAsShipped, std::int64_t width = kWidth)
      : halves_(halves),
        order_(order),
        width_(width),
        exec_(exec),
        up_(case_of(format, nested, 2 * width_, kHidden, 1)),
        down_(case_of(format, nested, kHidden, width_, 2)) {
    problem_.tokens = kTokens;
    problem_.hidden = kHidden;
    problem_.width = width_;
    problem_.experts = kExperts;
    problem_.top_k = kTopK;
    problem_.dtype = DType::kBF16;
    problem_.activation.kind = ActivationKind::kSwiGLU;
    problem_.up_rank = problem_.down_rank = kRank;
    packed_ = {on_device(up_), on_device(down_)};
    x_ = values(kTokens * kHidden, 3);
    dout_ = values(kTokens * kHidden, 4);
    std::mt19937 random(5);
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < kTokens; ++i) {
      // Expert 3 has no rows, expert 0 more than a tile's.
      const bool all = i < 20;
      ids.push_back(all ? static_cast<std::int32_t>(random() % 3) : 0);
      ids.push_back(i % 2 == 0 ? 4 : 1);
    }
    ids_ = array(std::move(ids));
    std::vector<float> scores;
    for (std::int64_t i = 0; i < kTokens * kTopK; ++i) {
      scores.push_back(0.25f + static_cast<float>(random() % 100) / 100.0f);
    }
    scores_ = array(std::move(scores));
    b_up_ = values(kExperts * 2 * width_, 6);
    b_down_ = values(kExperts * kHidden, 7);
    for (int i = 0; i < 4; ++i) {
      const std::int64_t lines[] = {kHidden, 2 * width_, width_, kHidden};
      factors_[i] = values(kExperts * kRank * lines[i], 8 + i);
    }
  }

  /// The results of both passes on weights that are all unpacked before.
  std::vector<std::vector<std::uint8_t>> expected() {
    DeviceArray up(kExperts * 2 * elements() * 2), down(kExperts * elements() * 2);
    const auto unpack = [this](const PackedWeights& packed, void* out) {
      unpack_weights(packed, tensor3(out, DType::kBF16, kExperts, packed.rows, packed.columns),
                     exec_);
    };
    unpack(packed_.up, up.data());
    unpack(packed_.down, down.data());
    return results(weights_at(up.data(), down.data(), {kExperts, kExperts}), nullptr);
  }

  /// The same on packed weights. Both operands are unpacked into the same memory.
  std::vector<std::vector<std::uint8_t>> packed(const Room& room) {
    DeviceArray memory(std::max(room.up * 2, room.down) * elements() * 2);
    auto found = results(weights_at(memory.data(), memory.data(), room), &packed_);
    const auto left = memory.get();
    wrote_ = std::any_of(left.begin(), left.end(), [](std::uint8_t byte) { return byte != 0xff; });
    return found;
  }
  /// Whether the last packed() wrote to the memory for unpacked weights.
  bool wrote_memory() const { return wrote_; }

  /// Changes the packed weights of up and of down.
  void change(const std::function<void(PackedCase&)>& of_up,
              const std::function<void(PackedCase&)>& of_down) {
    of_up(up_);
    of_down(down_);
    packed_ = {on_device(up_), on_device(down_)};
  }

  /// Makes each row of x and of dO a unit vector. So H has weights without rounding, and so does
  /// dO W2^T.
  void use_unit_vectors() {
    std::vector<std::uint16_t> rows(kTokens * kHidden);
    for (std::int64_t t = 0; t < kTokens; ++t)
      rows[t * kHidden + t * 37 % kHidden] = to_bf16(1).bits;
    x_->set(rows);
    dout_->set(rows);
  }

  std::string refusal(const Room& room, const std::function<void(PackedLayer&, Weights&)>& spoil) {
    DeviceArray memory(std::max(room.up * 2, room.down) * elements() * 2);
    PackedLayer packed = packed_;
    Weights weights = weights_at(memory.data(), memory.data(), room);
    spoil(packed, weights);
    try {
      results(weights, &packed);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  }

 private:
  std::int64_t elements() const { return kHidden * width_; }  ///< of a matrix
  PackedCase case_of(PackedFormat format, bool nested, std::int64_t out, std::int64_t in,
                     unsigned seed) const {
    const bool shipped = order_ == Order::kAsShipped;
    return packed_case(format, nested, shipped ? out : in, shipped ? in : out, seed);
  }
  /// Matrices (E, out, in) in the order of the packed tensors.
  Tensor matrices(void* data, std::int64_t experts, std::int64_t out, std::int64_t in) const {
    Tensor t = tensor3(data, DType::kBF16, experts, out, in);
    if (order_ == Order::kTransposed) {
      t.stride[1] = 1;
      t.stride[2] = out;
    }
    return t;
  }
  template <class T>
  DeviceArray* array(const std::vector<T>& values) {
    arrays_.push_back(
        std::make_unique<DeviceArray>(static_cast<std::int64_t>(values.size() * sizeof(T))));
    arrays_.back()->set(values);
    return arrays_.back().get();
  }
  DeviceArray* values(std::int64_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> bits;
    for (std::int64_t i = 0; i < count; ++i) bits.push_back(to_bf16(0.5f * normal(random)).bits);
    return array(bits);
  }
  PackedWeights on_device(const PackedCase& c) {
    return c.with([this](const std::vector<std::uint8_t>& bytes) {
      if (bytes.empty()) return Buffer{};
      return buffers_.emplace_back(std::make_unique<ExactArray>(bytes))->buffer();
    });
  }

  /// (E, 2n, r) or a bias (E, 2n) with its gate and up as the weights have them.
  void split(Tensor all, Tensor& gate, Tensor& up) const {
    const bool alternate = halves_ == Halves::kAlternating;
    all.shape[1] = width_;
    gate = up = all;
    const std::int64_t offset = alternate ? all.stride[1] : all.stride[1] * width_;
    up.data = static_cast<std::uint16_t*>(all.data) + offset;
    if (alternate) gate.stride[1] = up.stride[1] = 2 * all.stride[1];
  }

  Weights weights_at(void* up, void* down, const Room& room) const {
    Weights w;
    split(matrices(up, room.up, 2 * width_, kHidden), w.gate, w.up);
    w.down = matrices(down, room.down, kHidden, width_);
    split(tensor2(b_up_->data(), DType::kBF16, kExperts, 2 * width_), w.b_gate, w.b_up);
    w.b_down = tensor2(b_down_->data(), DType::kBF16, kExperts, kHidden);
    return w;
  }

  Lora lora_at(const std::array<void*, 4>& at) const {
    Lora lora;
    lora.up.a = tensor3(at[0], DType::kBF16, kExperts, kRank, kHidden);
    split(tensor3(at[1], DType::kBF16, kExperts, 2 * width_, kRank), lora.up.gate_b, lora.up.b);
    lora.down.a = tensor3(at[2], DType::kBF16, kExperts, kRank, width_);
    lora.down.b = tensor3(at[3], DType::kBF16, kExperts, kHidden, kRank);
    return lora;
  }

  /// out, dX, dS and the gradients of the biases and of the factors; H after each pass.
  std::vector<std::vector<std::uint8_t>> results(const Weights& weights,
                                                 const PackedLayer* packed) {
    const Sizes forward = moe_sizes(problem_, Pass::kForward, exec_);
    const Sizes backward = moe_sizes(problem_, Pass::kBackward, exec_);
    DeviceArray h(forward.h_bytes), saved(forward.saved_bytes);
    DeviceArray scratch(std::max(forward.scratch_bytes, backward.scratch_bytes));
    std::vector<std::unique_ptr<DeviceArray>> made;
    const auto result = [&made](std::int64_t bytes) {
      made.push_back(std::make_unique<DeviceArray>(bytes));
      return made.back()->data();
    };
    const auto rows = [](void* data) { return tensor2(data, DType::kBF16, kTokens, kHidden); };
    ForwardArgs f{.x = rows(x_->data()), .weights = weights};
    f.routing.ids = tensor2(ids_->data(), DType::kI32, kTokens, kTopK);
    f.routing.weights = tensor2(scores_->data(), DType::kF32, kTokens, kTopK);
    f.out = rows(result(kTokens * kHidden * 2));
    f.h = h.buffer();
    f.saved = saved.buffer();
    f.scratch = scratch.buffer();
    f.lora = lora_at(
        {factors_[0]->data(), factors_[1]->data(), factors_[2]->data(), factors_[3]->data()});
    BackwardArgs b{.x = f.x, .routing = f.routing, .weights = weights};
    b.dout = rows(dout_->data());
    b.h = f.h;
    b.saved = f.saved;
    b.scratch = f.scratch;
    b.lora = f.lora;
    b.dx = rows(result(kTokens * kHidden * 2));
    b.dweights = tensor2(result(kTokens * kTopK * 4), DType::kF32, kTokens, kTopK);
    split(tensor2(result(kExperts * 2 * width_ * 2), DType::kBF16, kExperts, 2 * width_),
          b.grads.b_gate, b.grads.b_up);
    b.grads.b_down = tensor2(result(kExperts * kHidden * 2), DType::kBF16, kExperts, kHidden);
    b.lora_grads = lora_at({result(factors_[0]->bytes()), result(factors_[1]->bytes()),
                            result(factors_[2]->bytes()), result(factors_[3]->bytes())});
    packed == nullptr ? moe_forward(problem_, f, exec_) : moe_forward(problem_, f, *packed, exec_);
    testing::must(cudaDeviceSynchronize());
    const auto forward_h = h.get();
    packed == nullptr ? moe_backward(problem_, b, exec_)
                      : moe_backward(problem_, b, *packed, exec_);
    testing::must(cudaDeviceSynchronize());
    std::vector<std::vector<std::uint8_t>> bytes;
    for (const auto& a : made) bytes.push_back(a->get());
    bytes.push_back(forward_h);
    bytes.push_back(h.get());
    return bytes;
  }

  Halves halves_;
  Order order_;
  std::int64_t width_;
  Exec exec_;
  bool wrote_ = false;
  PackedCase up_, down_;
  Problem problem_;
  PackedLayer packed_;
  std::vector<std::unique_ptr<DeviceArray>> arrays_;
  std::vector<std::unique_ptr<ExactArray>> buffers_;
  DeviceArray *x_, *dout_, *ids_, *scores_, *b_up_, *b_down_;
  std::array<DeviceArray*, 4> factors_;
};

/// Of bf16.
bool is_finite(const std::vector<std::uint8_t>& bytes) {
  for (std::size_t i = 1; i < bytes.size(); i += 2) {
    if ((bytes[i] & 0x7f) == 0x7f && (bytes[i - 1] & 0x80) != 0) return false;
  }
  return true;
}

/// The first code of the second expert, of codes of 4 bits.
std::vector<std::uint8_t>::iterator second_expert(PackedCase& c) {
  return c.codes.begin() + c.rows * c.columns / 2;
}

struct Form {
  const char* name;
  PackedFormat format;
  bool nested;
  Halves halves;
  Order order = Order::kAsShipped;
  std::int64_t width = kWidth;
};
constexpr Form kForms[] = {
    {"nf4", PackedFormat::kNF4, false, Halves::kConcatenated},
    {"nf4 nested", PackedFormat::kNF4, true, Halves::kConcatenated},
    {"mxfp4", PackedFormat::kMXFP4, false, Halves::kAlternating},
    {"nf4, one k tile", PackedFormat::kNF4, false, Halves::kConcatenated, Order::kAsShipped,
     kOneTile},
    {"nf4 transposed", PackedFormat::kNF4, false, Halves::kConcatenated, Order::kTransposed},
    {"fp8_blocks", PackedFormat::kFP8Blocks, false, Halves::kConcatenated},
    {"fp8_blocks, one k tile", PackedFormat::kFP8Blocks, false, Halves::kAlternating,
     Order::kAsShipped, kOneTile},
    {"fp8_blocks transposed", PackedFormat::kFP8Blocks, false, Halves::kConcatenated,
     Order::kTransposed},
};

class CudaPackedLayer : public testing::EachEngine {
 protected:
  /// Whether the engine unpacks inside all products, without memory for it.
  static bool products_unpack(const Form& form) {
    const int capability = testing::test_device().capability;
    return GetParam() == "portable" && (capability < 100 || capability >= 120) &&
           form.order == Order::kAsShipped;
  }
};
SONICMOE_FOR_EACH_ENGINE(CudaPackedLayer);

/// Room for one expert, for numbers that do not divide E, and for all experts.
TEST_P(CudaPackedLayer, HasTheBitsOfUnpackedWeights) {
  for (const Form& form : kForms) {
    Layer layer(form.format, form.nested, form.halves, exec(), form.order, form.width);
    const auto expected = layer.expected();
    EXPECT_TRUE(is_finite(expected[0])) << form.name;
    for (const Room room : {Room{1, 3}, Room{2, 5}}) {
      SCOPED_TRACE(std::string(form.name) + ", experts at a time: " + std::to_string(room.up) +
                   ", " + std::to_string(room.down));
      const auto found = layer.packed(room);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(found[i] == expected[i]) << "result " << i;
      }
      EXPECT_EQ(layer.wrote_memory(), !products_unpack(form));
    }
  }
}

TEST_P(CudaPackedLayer, TheComparisonRejectsTheNextExpertsWeights) {
  Layer layer(PackedFormat::kNF4, true, Halves::kConcatenated, exec());
  const auto expected = layer.expected();
  layer.change(
      [](PackedCase&) {},
      [](PackedCase& c) { std::rotate(c.codes.begin(), second_expert(c), c.codes.end()); });
  const auto found = layer.packed({2, 2});
  EXPECT_FALSE(found[0] == expected[0]) << "out";
  EXPECT_FALSE(found[1] == expected[1]) << "dX";
}

TEST_P(CudaPackedLayer, TheComparisonRejectsTheNeighboursFp8) {
  const auto next_code = [](PackedCase& c) {
    std::rotate(c.codes.begin(), c.codes.begin() + 1, c.codes.end());
  };
  const auto next_scale = [](PackedCase& c) { testing::rotate_floats(c.scales); };
  const auto none = [](PackedCase&) {};
  const auto expect_rejected = [&](const auto& of_up, const auto& of_down) {
    Layer layer(PackedFormat::kFP8Blocks, false, Halves::kConcatenated, exec());
    const auto expected = layer.expected();
    layer.change(of_up, of_down);
    const auto found = layer.packed({2, 2});
    EXPECT_FALSE(found[0] == expected[0]) << "out";
    EXPECT_FALSE(found[1] == expected[1]) << "dX";
  };
  expect_rejected(next_code, none);
  expect_rejected(none, next_code);
  expect_rejected(next_scale, none);
  expect_rejected(none, next_scale);
}

/// All codes, also NaN, and scales that fp32 can just hold.
TEST_P(CudaPackedLayer, UnpacksEveryCodeOfFp8) {
  for (const bool extreme : {false, true}) {
    Layer layer(PackedFormat::kFP8Blocks, false, Halves::kConcatenated, exec());
    layer.use_unit_vectors();
    const auto all_codes = [extreme](PackedCase& c) {
      for (std::int64_t i = 0; i < c.elements(); ++i) {
        auto& code = c.codes[static_cast<std::size_t>(i)];
        code = static_cast<std::uint8_t>(i + i / 256 * 101);
        const bool row_with_nan = extreme && i / c.columns % 8 == 5;
        if ((code & 0x7f) == 0x7f && !row_with_nan) code = static_cast<std::uint8_t>(code - 1);
      }
      if (!extreme) return;
      std::vector<float> scales(c.scales.size() / 4, 0.03f);
      for (std::size_t i = 0; i < scales.size(); i += 3) {
        scales[i] = i % 2 == 0 ? 0x1.8p120f : -0x1.4p-130f;
      }
      scales[1] = 0.0f;
      c.scales = testing::bytes_of(scales);
    };
    layer.change(all_codes, all_codes);
    const auto expected = layer.expected();
    EXPECT_EQ(is_finite(expected[0]), !extreme);
    const auto found = layer.packed({2, 5});
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(found[i] == expected[i]) << "result " << i << (extreme ? ", extreme" : "");
    }
  }
}

TEST_P(CudaPackedLayer, RefusesWeightsOfAnotherLayerAndWrongMemory) {
  Layer layer(PackedFormat::kMXFP4, false, Halves::kConcatenated, exec());
  EXPECT_EQ(layer.refusal({2, 2}, [](PackedLayer& p, Weights&) { std::swap(p.up, p.down); }),
            "packed.up has 5 experts of 320 * 192 elements, must have 5 of 122880");
  EXPECT_EQ(layer.refusal({2, 2}, [](PackedLayer&, Weights& w) { w.gate.shape[0] = 1; }),
            "weights.up has memory for 1 experts, must have it for 1 to 5, gate as up");
  EXPECT_EQ(layer.refusal({2, 2}, [](PackedLayer&, Weights& w) { w.down.stride[0] += 8; }),
            "weights.down has strides (61448, 192, 1), must have those of a view of a contiguous "
            "tensor (E', rows, columns) of packed.down");
  EXPECT_EQ(
      layer.refusal({2, 2}, [](PackedLayer& p, Weights& w) { w.down.data = p.down.codes.data; }),
      "weights.down overlaps codes, must be memory of its own");
}

}  // namespace
}  // namespace sonicmoe
