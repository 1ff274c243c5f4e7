// Compares expert choice and the auxiliary losses on CUDA with the CPU backend, through the public
// API: lists bit for bit, sums and gradients within rounding.
#include <cmath>
#include <random>

#include "../routing_support.h"
#include "cuda/engines.h"
#include "device_array.h"

namespace sonicmoe {
namespace {

using testing::DeviceArray;
using testing::Flavour;
using testing::Guarded;

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

struct Shape {
  std::int64_t tokens, experts, top_k;
};
constexpr Shape kShapes[] = {{0, 8, 2},    {1, 1, 1},     {5, 3, 3},      {67, 8, 2},
                             {300, 64, 8}, {129, 100, 8}, {1000, 256, 8}, {257, 256, 16},
                             {90, 384, 8}, {40, 1000, 7}, {35, 1024, 32}, {20001, 48, 4}};

class CudaRouter : public ::testing::Test {
 protected:
  CudaRouter() : device_(cuda::open_device(0)) {
    exec_.backend = Backend::kCuda;
    exec_.device = device_;
  }
  ~CudaRouter() override { cuda::close_device(device_); }

  /// A device copy of a host buffer's elements.
  static void copy(Guarded& from, DeviceArray& to) {
    if (to.bytes() == 0) return;
    testing::must(cudaMemcpy(to.data(), from.data(), static_cast<std::size_t>(to.bytes()),
                             cudaMemcpyHostToDevice));
  }
  static void copy(DeviceArray& from, Guarded& to) {
    if (from.bytes() == 0) return;
    testing::must(cudaMemcpy(to.data(), from.data(), static_cast<std::size_t>(from.bytes()),
                             cudaMemcpyDeviceToHost));
  }

  const cuda::Device* device_;
  Exec exec_;
};

std::int64_t bytes_of(Guarded& g) { return g.buffer().bytes; }

void expect_same(Guarded& want, Guarded& got, const char* what) {
  for (std::int64_t i = 0; i < want.count(); ++i) {
    ASSERT_EQ(want.value(i), got.value(i)) << what << " at " << i;
  }
}

/// Within rounding. The absolute term is for elements that cancel: the inputs have unit scale.
void expect_close(Guarded& want, Guarded& got, double relative) {
  for (std::int64_t i = 0; i < want.count(); ++i) {
    const double w = want.value(i);
    if (w == got.value(i)) continue;  // infinities too
    ASSERT_NEAR(w, got.value(i), relative * std::abs(w) + 4e-6) << "at " << i;
  }
}

double ulp(DType dtype) {
  return dtype == DType::kF32 ? 4e-6 : dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
}

struct Lists {
  Guarded token, expert, weight, offsets;
  Lists(std::int64_t capacity, std::int64_t experts)
      : token(DType::kI32, capacity),
        expert(DType::kI32, capacity),
        weight(DType::kF32, capacity),
        offsets(DType::kI64, experts + 1) {}
  Pairs pairs() { return {token.vector(), expert.vector(), weight.vector(), offsets.vector()}; }
};

TEST_F(CudaRouter, ExpertChoiceEqualsTheCpu) {
  std::mt19937_64 random(21);
  for (const Shape& s : kShapes) {
    for (const DType dtype : kDTypes) {
      for (const Flavour flavour : testing::kFlavours) {
        for (const std::int64_t capacity : {std::int64_t{1}, s.tokens / 3 + 1, s.tokens + 2}) {
          SCOPED_TRACE(::testing::Message()
                       << "T " << s.tokens << " E " << s.experts << " capacity " << capacity << " "
                       << dtype_name(dtype) << " flavour " << static_cast<int>(flavour));
          const std::int64_t pairs = s.experts * std::min(capacity, s.tokens);
          Guarded logits(dtype, s.tokens * s.experts);
          fill_logits(&logits, s.experts, flavour, &random);
          Lists want(pairs, s.experts), got(pairs, s.experts);
          DeviceArray x(bytes_of(logits)), token(pairs * 4), expert(pairs * 4), weight(pairs * 4);
          DeviceArray offsets(bytes_of(got.offsets));
          DeviceArray scratch(expert_choice_scratch_bytes(s.tokens, s.experts, exec_));
          copy(logits, x);
          expert_choice(logits.matrix(s.tokens, s.experts), capacity, want.pairs());
          const Tensor on_device = tensor2(x.data(), dtype, s.tokens, s.experts);
          const Pairs lists{tensor1(token.data(), DType::kI32, pairs),
                            tensor1(expert.data(), DType::kI32, pairs),
                            tensor1(weight.data(), DType::kF32, pairs),
                            tensor1(offsets.data(), DType::kI64, s.experts + 1)};
          expert_choice(on_device, capacity, lists, scratch.buffer(), exec_);
          copy(token, got.token);
          copy(expert, got.expert);
          copy(weight, got.weight);
          copy(offsets, got.offsets);
          expect_same(want.offsets, got.offsets, "offsets");
          expect_same(want.token, got.token, "token");
          expect_same(want.expert, got.expert, "expert");
          expect_same(want.weight, got.weight, "weight");

          Guarded dweight(DType::kF32, pairs), want_grad(dtype, logits.count());
          Guarded got_grad(dtype, logits.count());
          fill_logits(&dweight, 1, Flavour::kNormal, &random);
          DeviceArray d_dweight(pairs * 4), grad(bytes_of(logits));
          copy(dweight, d_dweight);
          scratch.fill(0xff);
          expert_choice_backward(logits.matrix(s.tokens, s.experts), want.pairs(), dweight.vector(),
                                 want_grad.matrix(s.tokens, s.experts));
          expert_choice_backward(on_device, lists, tensor1(d_dweight.data(), DType::kF32, pairs),
                                 tensor2(grad.data(), dtype, s.tokens, s.experts), scratch.buffer(),
                                 exec_);
          copy(grad, got_grad);
          expect_close(want_grad, got_grad, ulp(dtype));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

struct ScoreAtHeight {
  ScoreMode score;
  double height;  // added to all logits
};
constexpr ScoreAtHeight kScoresAtHeights[] = {{ScoreMode::kSoftmaxAfterTopK, 0.0},
                                              {ScoreMode::kSigmoid, 0.0},
                                              {ScoreMode::kSigmoid, -30.0},
                                              {ScoreMode::kSqrtSoftplus, 0.0},
                                              {ScoreMode::kSqrtSoftplus, -100.0}};

TEST_F(CudaRouter, LossesEqualTheCpu) {
  std::mt19937_64 random(22);
  for (const Shape& s : kShapes) {
    for (const DType dtype : kDTypes) {
      for (const Flavour flavour : testing::kFlavours) {
        for (const auto [score, height] : kScoresAtHeights) {
          SCOPED_TRACE(::testing::Message()
                       << "T " << s.tokens << " E " << s.experts << " K " << s.top_k << " "
                       << dtype_name(dtype) << " flavour " << static_cast<int>(flavour) << " "
                       << score_mode_name(score) << " at height " << height);
          RouteOptions options;
          options.top_k = s.top_k;
          options.score = score;
          Guarded logits(dtype, s.tokens * s.experts);
          fill_logits(&logits, s.experts, flavour, &random);
          for (std::int64_t i = 0; height < 0.0 && i < logits.count(); ++i) {
            logits.set(i, logits.value(i) + height);
          }
          std::vector<std::int64_t> ids(static_cast<std::size_t>(s.tokens * s.top_k));
          for (std::int64_t& id : ids) {
            id = static_cast<std::int64_t>(random() % (s.experts + 2)) - 1;
            if (random() % 16 == 0) id += std::int64_t{1} << 32;
          }
          Guarded values(DType::kF32, 2), counts(DType::kI64, s.experts);
          Guarded values2(DType::kF32, 2), counts2(DType::kI64, s.experts);
          DeviceArray x(bytes_of(logits)), d_ids(static_cast<std::int64_t>(ids.size()) * 8);
          DeviceArray d_values(8), d_counts(s.experts * 8);
          DeviceArray scratch(router_losses_scratch_bytes(s.tokens, s.experts, exec_));
          copy(logits, x);
          d_ids.set(ids);
          const Tensor on_device = tensor2(x.data(), dtype, s.tokens, s.experts);
          router_losses(options, logits.matrix(s.tokens, s.experts),
                        tensor2(ids.data(), DType::kI64, s.tokens, s.top_k),
                        {values.vector(), counts.vector()});
          router_losses(options, on_device, tensor2(d_ids.data(), DType::kI64, s.tokens, s.top_k),
                        {tensor1(d_values.data(), DType::kF32, 2),
                         tensor1(d_counts.data(), DType::kI64, s.experts)},
                        scratch.buffer(), exec_);
          copy(d_values, values2);
          copy(d_counts, counts2);
          expect_same(counts, counts2, "tokens_per_expert");
          for (int i = 0; i < 2; ++i) {
            if (values.value(i) == values2.value(i)) continue;  // infinities too
            ASSERT_NEAR(values.value(i), values2.value(i), 1e-6 * std::abs(values.value(i)));
          }

          Guarded dvalues(DType::kF32, 2), grad(dtype, logits.count()), grad2(dtype, grad.count());
          dvalues.set(0, 0.7 * static_cast<double>(s.tokens));  // far from underflow
          dvalues.set(1, -1.3 * static_cast<double>(s.tokens));
          DeviceArray d_dvalues(8), d_grad(bytes_of(grad));
          copy(dvalues, d_dvalues);
          router_losses_backward(options, logits.matrix(s.tokens, s.experts), counts.vector(),
                                 dvalues.vector(), grad.matrix(s.tokens, s.experts));
          router_losses_backward(options, on_device,
                                 tensor1(d_counts.data(), DType::kI64, s.experts),
                                 tensor1(d_dvalues.data(), DType::kF32, 2),
                                 tensor2(d_grad.data(), dtype, s.tokens, s.experts), exec_);
          copy(d_grad, grad2);
          expect_close(grad, grad2, ulp(dtype));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// A kernel of one sequence must not write the scratch that the one before still reads.
TEST_F(CudaRouter, LossesOfSequencesEqualTheCpu) {
  constexpr std::int64_t kSequences = 3, kTokens = 3 * 70, kExperts = 12;
  std::mt19937_64 random(24);
  RouteOptions options;
  options.top_k = 2;
  options.score = ScoreMode::kSqrtSoftplus;
  Guarded logits(DType::kF32, kTokens * kExperts), ids(DType::kI64, kTokens * 2);
  fill_logits(&logits, kExperts, Flavour::kNormal, &random);
  for (std::int64_t i = 0; i < ids.count(); ++i) ids.set(i, static_cast<double>(random() % 12));
  Guarded values(DType::kF32, 6), values2(DType::kF32, 6), dvalues(DType::kF32, 6);
  Guarded counts(DType::kI64, kSequences * kExperts), counts2(DType::kI64, counts.count());
  Guarded grad(DType::kF32, logits.count()), grad2(DType::kF32, logits.count());
  for (int i = 0; i < 6; ++i) dvalues.set(i, 10.0 * i - 25.0);
  DeviceArray x(bytes_of(logits)), d_ids(bytes_of(ids)), d_values(24), d_dvalues(24);
  DeviceArray d_counts(bytes_of(counts)), d_grad(bytes_of(grad));
  DeviceArray scratch(router_losses_scratch_bytes(kTokens, kExperts, exec_));
  copy(logits, x);
  copy(ids, d_ids);
  copy(dvalues, d_dvalues);
  const Tensor on_device = tensor2(x.data(), DType::kF32, kTokens, kExperts);
  const Tensor count = tensor2(d_counts.data(), DType::kI64, kSequences, kExperts);
  router_losses(options, logits.matrix(kTokens, kExperts), ids.matrix(kTokens, 2),
                {values.matrix(kSequences, 2), counts.matrix(kSequences, kExperts)});
  router_losses(options, on_device, tensor2(d_ids.data(), DType::kI64, kTokens, 2),
                {tensor2(d_values.data(), DType::kF32, kSequences, 2), count}, scratch.buffer(),
                exec_);
  copy(d_values, values2);
  copy(d_counts, counts2);
  expect_same(counts, counts2, "tokens_per_expert");
  for (int i = 0; i < 6; ++i)
    EXPECT_NEAR(values.value(i), values2.value(i), 1e-6 * values.value(i));
  router_losses_backward(options, logits.matrix(kTokens, kExperts),
                         counts.matrix(kSequences, kExperts), dvalues.matrix(kSequences, 2),
                         grad.matrix(kTokens, kExperts));
  router_losses_backward(options, on_device, count,
                         tensor2(d_dvalues.data(), DType::kF32, kSequences, 2),
                         tensor2(d_grad.data(), DType::kF32, kTokens, kExperts), exec_);
  copy(d_grad, grad2);
  expect_close(grad, grad2, ulp(DType::kF32));
}

TEST_F(CudaRouter, ScratchIsAskedFor) {
  DeviceArray x(8 * 4 * 4), list(4 * 8 * 4);
  const Tensor logits = tensor2(x.data(), DType::kF32, 8, 4);
  auto* words = static_cast<std::int32_t*>(list.data());
  const Pairs pairs{tensor1(words, DType::kI32, 8), tensor1(words + 8, DType::kI32, 8),
                    tensor1(words + 16, DType::kF32, 8), tensor1(words + 24, DType::kI64, 5)};
  EXPECT_THROW(expert_choice(logits, 2, pairs, exec_), Error);
}

// The caller has not yet read an error of its own.
TEST_F(CudaRouter, AnErrorOfTheCallerStaysTheCallers) {
  constexpr std::int64_t kTokens = 8, kExperts = 4;
  RoundOptions options;
  options.route.top_k = 1;
  options.tile = 4;
  const std::int64_t capacity = round_capacity(options, kTokens, kExperts);
  DeviceArray x(kTokens * kExperts * 4, 0), grad(kTokens * kExperts * 4);
  DeviceArray list(capacity * 4), weight(capacity * 4, 0), offsets((kExperts + 1) * 8, 0);
  DeviceArray scratch(round_scratch_bytes(options, kTokens, kExperts, exec_));
  const Tensor logits = tensor2(x.data(), DType::kF32, kTokens, kExperts);
  const Tensor numbers = tensor1(list.data(), DType::kI32, capacity);  // -1: no pairs
  const Tensor weights = tensor1(weight.data(), DType::kF32, capacity);
  const Pairs pairs{numbers, numbers, weights, tensor1(offsets.data(), DType::kI64, kExperts + 1)};
  EXPECT_NE(cudaSetDevice(-1), cudaSuccess);
  EXPECT_NO_THROW(token_round_backward(options, logits, pairs, weights,
                                       tensor2(grad.data(), DType::kF32, kTokens, kExperts),
                                       scratch.buffer(), exec_));
  EXPECT_NE(cudaGetLastError(), cudaSuccess);
  testing::must(cudaDeviceSynchronize());
  EXPECT_EQ(grad.get<float>(), std::vector<float>(kTokens * kExperts, 0.0f));
}

}  // namespace
}  // namespace sonicmoe
