// Compares routing on CUDA with the CPU backend: ids, pairs, order and weights bit for bit,
// gradients within rounding. tests/routing_* compare the CPU backend with a naive implementation.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "../routing_support.h"
#include "cpu/backend.h"
#include "cuda/device/launch.h"
#include "cuda/routing/routing.h"
#include "test_device.h"

namespace sonicmoe {
namespace {

using testing::Flavour;
using testing::Guarded;

/// A device copy of a guarded buffer, poison and guards included.
class OnDevice {
 public:
  explicit OnDevice(Guarded* host) : host_(host) {
    EXPECT_EQ(cudaMalloc(&base_, host->all().size()), cudaSuccess);
    upload();
  }
  ~OnDevice() { cudaFree(base_); }
  OnDevice(const OnDevice&) = delete;

  void upload() { copy(base_, host_->all().data(), cudaMemcpyHostToDevice); }
  void download() { copy(host_->all().data(), base_, cudaMemcpyDeviceToHost); }
  Tensor vector() { return on_device(host_->vector()); }
  Tensor matrix(std::int64_t rows, std::int64_t columns) {
    return on_device(host_->matrix(rows, columns));
  }
  Buffer buffer() { return {on_device(host_->vector()).data, host_->buffer().bytes}; }

 private:
  void copy(void* to, const void* from, cudaMemcpyKind kind) {
    ASSERT_EQ(cudaMemcpy(to, from, host_->all().size(), kind), cudaSuccess);
  }
  Tensor on_device(Tensor t) {
    t.data = static_cast<unsigned char*>(base_) +
             (static_cast<unsigned char*>(t.data) - host_->all().data());
    return t;
  }

  Guarded* host_;
  void* base_ = nullptr;
};

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

struct Shape {
  std::int64_t tokens, experts, top_k, n_group, topk_group;
};
constexpr Shape kShapes[] = {{0, 8, 2, 0, 0},      {1, 1, 1, 0, 0},      {5, 3, 3, 0, 0},
                             {67, 8, 2, 4, 2},     {300, 64, 8, 0, 0},   {129, 64, 8, 8, 3},
                             {77, 65, 5, 0, 0},    {257, 128, 8, 4, 2},  {33, 100, 32, 10, 8},
                             {513, 256, 8, 0, 0},  {40, 256, 8, 8, 4},   {31, 384, 8, 0, 0},
                             {65, 512, 10, 64, 8}, {18, 1000, 17, 0, 0}, {35, 1024, 32, 256, 200}};

/// Enumerates score modes, renormalisation, scale, bias and groups.
RouteOptions options_of(const Shape& s, unsigned variant, const Tensor& bias) {
  RouteOptions o;
  o.top_k = s.top_k;
  o.score = static_cast<ScoreMode>(variant % 4);
  o.renormalize = static_cast<std::int32_t>(variant / 4 % 2);
  o.scale = variant / 8 % 2 == 0 ? 1.0 : 2.5;
  if (o.score >= ScoreMode::kSigmoid && variant / 8 % 2 == 1) o.bias = bias;
  if (variant / 16 % 2 == 1) {
    o.n_group = s.n_group;
    o.topk_group = s.topk_group;
  }
  return o;
}

void expect_same(Guarded* want, Guarded* got, const char* what) {
  for (std::int64_t i = 0; i < want->count(); ++i) {
    ASSERT_EQ(want->value(i), got->value(i)) << what << " at " << i;
  }
}

void expect_close(Guarded* want, Guarded* got, DType dtype) {
  const double relative = dtype == DType::kF32 ? 2e-6 : dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
  for (std::int64_t i = 0; i < want->count(); ++i) {
    const double w = want->value(i);
    ASSERT_NEAR(w, got->value(i), 2e-6 + relative * std::abs(w)) << "gradient at " << i;
  }
}

template <class Body>
void for_cases(unsigned step, const Body& body) {
  std::mt19937_64 random(101);
  for (const Shape& s : kShapes) {
    for (const DType dtype : kDTypes) {
      for (const Flavour flavour : testing::kFlavours) {
        for (unsigned variant = 0; variant < 32; variant += 1 + random() % step) {
          Guarded logits(dtype, s.tokens * s.experts), bias(DType::kF32, s.experts);
          fill_logits(&logits, s.experts, flavour, &random);
          fill_logits(&bias, s.experts, variant > 24 ? Flavour::kSpecials : Flavour::kNormal,
                      &random);
          SCOPED_TRACE(::testing::Message() << "T " << s.tokens << " E " << s.experts << " K "
                                            << s.top_k << " " << dtype_name(dtype) << " flavour "
                                            << static_cast<int>(flavour) << " variant " << variant);
          body(s, dtype, variant, &logits, &bias, &random);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(CudaRouting, TopKEqualsTheCpu) {
  for_cases(5, [](const Shape& s, DType dtype, unsigned variant, Guarded* logits, Guarded* bias,
                  std::mt19937_64* random) {
    const std::int64_t slots = s.tokens * s.top_k;
    const DType index = variant % 2 == 0 ? DType::kI64 : DType::kI32;
    Guarded ids(index, slots), weights(DType::kF32, slots), dweights(DType::kF32, slots);
    Guarded ids2(index, slots), weights2(DType::kF32, slots);
    Guarded grad(dtype, logits->count()), grad2(dtype, logits->count());
    OnDevice d_logits(logits), d_bias(bias), d_ids(&ids2), d_weights(&weights2), d_grad(&grad2);
    const RouteOptions o = options_of(s, variant, bias->vector());
    const RouteOptions o2 = options_of(s, variant, d_bias.vector());
    const auto x = logits->matrix(s.tokens, s.experts);
    const auto x2 = d_logits.matrix(s.tokens, s.experts);
    cpu::route(o, x, ids.matrix(s.tokens, s.top_k), weights.matrix(s.tokens, s.top_k), {});
    cuda::route(o2, x2, d_ids.matrix(s.tokens, s.top_k), d_weights.matrix(s.tokens, s.top_k),
                testing::test_exec());
    d_ids.download();
    d_weights.download();
    expect_same(&ids, &ids2, "ids");
    expect_same(&weights, &weights2, "weights");

    fill_logits(&dweights, s.top_k, Flavour::kNormal, random);
    for (std::int64_t i = 0; i < slots; ++i) {
      if (ids.value(i) < 0) dweights.set(i, std::nan(""));
    }
    OnDevice d_dweights(&dweights);
    cpu::route_backward(o, x, ids.matrix(s.tokens, s.top_k), dweights.matrix(s.tokens, s.top_k),
                        grad.matrix(s.tokens, s.experts), {});
    cuda::route_backward(o2, x2, d_ids.matrix(s.tokens, s.top_k),
                         d_dweights.matrix(s.tokens, s.top_k), d_grad.matrix(s.tokens, s.experts),
                         testing::test_exec());
    d_grad.download();
    expect_close(&grad, &grad2, dtype);
  });
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

/// The lists of one call.
struct Lists {
  Guarded token, expert, weight, offsets;
  Lists(std::int64_t capacity, std::int64_t experts)
      : token(DType::kI32, capacity),
        expert(DType::kI32, capacity),
        weight(DType::kF32, capacity),
        offsets(DType::kI64, experts + 1) {}
  Pairs pairs() { return {token.vector(), expert.vector(), weight.vector(), offsets.vector()}; }
};

void check_rounding(const RoundOptions& o, const RoundOptions& o2, const Shape& s, DType dtype,
                    Guarded* logits, std::mt19937_64* random,
                    const Exec& exec = testing::test_exec()) {
  const std::int64_t capacity = round_capacity(o, s.tokens, s.experts);
  Lists lists(capacity, s.experts), lists2(capacity, s.experts);
  Guarded scratch(DType::kI64, cpu::round_scratch_bytes(o, s.tokens, s.experts, {}) / 8);
  Guarded scratch2(DType::kI64, cuda::round_scratch_bytes(o, s.tokens, s.experts, exec) / 8);
  Guarded grad(dtype, logits->count()), grad2(dtype, logits->count());
  Guarded dweight(DType::kF32, capacity);
  OnDevice token(&lists2.token), expert(&lists2.expert), weight(&lists2.weight);
  OnDevice offsets(&lists2.offsets), d_scratch(&scratch2), d_logits(logits), d_grad(&grad2);
  const Pairs on_device = {token.vector(), expert.vector(), weight.vector(), offsets.vector()};
  const auto x = logits->matrix(s.tokens, s.experts);
  const auto x2 = d_logits.matrix(s.tokens, s.experts);
  cpu::token_round(o, x, lists.pairs(), scratch.buffer(), {});
  cuda::token_round(o2, x2, on_device, d_scratch.buffer(), exec);
  for (OnDevice* d : {&token, &expert, &weight, &offsets, &d_scratch}) d->download();
  expect_same(&lists.offsets, &lists2.offsets, "offsets");
  expect_same(&lists.token, &lists2.token, "token");
  expect_same(&lists.expert, &lists2.expert, "expert");
  expect_same(&lists.weight, &lists2.weight, "weight");

  fill_logits(&dweight, 1, Flavour::kNormal, random);
  for (auto i = static_cast<std::int64_t>(lists.offsets.value(s.experts)); i < capacity; ++i) {
    dweight.set(i, std::nan(""));
  }
  OnDevice d_dweight(&dweight);
  cpu::token_round_backward(o, x, lists.pairs(), dweight.vector(), grad.matrix(s.tokens, s.experts),
                            scratch.buffer(), {});
  cuda::token_round_backward(o2, x2, on_device, d_dweight.vector(),
                             d_grad.matrix(s.tokens, s.experts), d_scratch.buffer(), exec);
  d_grad.download();
  expect_close(&grad, &grad2, dtype);
}

TEST(CudaRouting, TokenRoundingEqualsTheCpu) {
  for_cases(19, [](const Shape& s, DType dtype, unsigned variant, Guarded* logits, Guarded* bias,
                   std::mt19937_64* random) {
    OnDevice d_bias(bias);
    RoundOptions o;
    constexpr std::int64_t kTiles[] = {1, 2, 3, 16, 64, 128, 1000};
    o.tile = kTiles[(*random)() % 7];
    o.seed = (*random)();
    for (int mode = 0; mode < 6; ++mode) {
      SCOPED_TRACE(::testing::Message() << "mode " << mode << " tile " << o.tile);
      o.mode = static_cast<RoundingMode>(mode);
      o.route = options_of(s, variant, bias->vector());
      RoundOptions o2 = o;
      o2.route = options_of(s, variant, d_bias.vector());
      check_rounding(o, o2, s, dtype, logits, random);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

// Lists of several ranges with many equal probabilities, some that differ in their last bits only,
// and chosen pairs. The larger tiles add more tokens than the search keeps in its list; the longest
// list has ranges of several parts.
TEST(CudaRouting, LongListsEqualTheCpu) {
  constexpr Shape kLong[] = {{20001, 48, 4, 0, 0}, {83001, 9, 4, 0, 0}, {2200003, 2, 1, 0, 0}};
  std::mt19937_64 random(7);
  for (const Flavour flavour : testing::kFlavours) {
    for (const Shape& s : kLong) {
      const DType dtype = s.experts == 9 ? DType::kF32 : DType::kBF16;
      if (s.experts == 2 && flavour != testing::kFlavours[0]) continue;
      Guarded logits(dtype, s.tokens * s.experts);
      fill_logits(&logits, s.experts, flavour, &random);
      for (int mode = 0; mode < 6; ++mode) {
        RoundOptions o;
        o.tile = mode % 2 == static_cast<int>(flavour) % 2 ? 128 : 3000;
        o.mode = static_cast<RoundingMode>(mode);
        o.route.top_k = s.top_k;
        SCOPED_TRACE(::testing::Message() << "T " << s.tokens << " mode " << mode << " tile "
                                          << o.tile << " flavour " << static_cast<int>(flavour));
        check_rounding(o, o, s, dtype, &logits, &random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// On a GPU with 99 KB for a block, rows of so many experts are ranked by smaller blocks.
TEST(CudaRouting, ManyExpertsInLittleSharedMemory) {
  constexpr Shape kMany[] = {{300, 1024, 8, 0, 0}, {70, 1000, 17, 0, 0}, {257, 1024, 32, 256, 200}};
  cuda::Device small = testing::test_device();
  small.block_shared = cuda::kLeastShared;
  Exec exec = testing::test_exec();
  exec.device = &small;
  std::mt19937_64 random(11);
  for (const Shape& s : kMany) {
    Guarded logits(DType::kF32, s.tokens * s.experts);
    fill_logits(&logits, s.experts, testing::kFlavours[0], &random);
    for (int mode = 0; mode < 6; ++mode) {
      SCOPED_TRACE(::testing::Message() << "E " << s.experts << " mode " << mode);
      RoundOptions o;
      o.tile = 16;
      o.mode = static_cast<RoundingMode>(mode);
      o.route.top_k = s.top_k;
      o.route.n_group = s.n_group;
      o.route.topk_group = s.topk_group;
      check_rounding(o, o, s, DType::kF32, &logits, &random, exec);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaRouting, StridedLogitsGiveTheSame) {
  constexpr std::int64_t kTokens = 33, kExperts = 40, kTop = 4;
  std::mt19937_64 random(9);
  Guarded logits(DType::kBF16, kTokens * kExperts);
  fill_logits(&logits, kExperts, Flavour::kSpecials, &random);
  Guarded ids(DType::kI64, kTokens * kTop), weights(DType::kF32, kTokens * kTop);
  Guarded ids2(DType::kI64, kTokens * kTop), weights2(DType::kF32, kTokens * kTop);
  OnDevice d_logits(&logits), d_ids(&ids2), d_weights(&weights2);
  RouteOptions o;
  o.top_k = kTop;
  const auto expert_major = [](Tensor t) {  // (kExperts, kTokens) in memory
    t.stride[0] = 1;
    t.stride[1] = kTokens;
    return t;
  };
  cpu::route(o, expert_major(logits.matrix(kTokens, kExperts)), ids.matrix(kTokens, kTop),
             weights.matrix(kTokens, kTop), {});
  cuda::route(o, expert_major(d_logits.matrix(kTokens, kExperts)), d_ids.matrix(kTokens, kTop),
              d_weights.matrix(kTokens, kTop), testing::test_exec());
  d_ids.download();
  d_weights.download();
  expect_same(&ids, &ids2, "ids");
  expect_same(&weights, &weights2, "weights");
}

Status status_of_route(const RouteOptions& options, const Tensor& logits) {
  try {
    cuda::route(options, logits, {}, {}, testing::test_exec());
  } catch (const Error& error) {
    return error.status();
  }
  return Status::kOk;
}

TEST(CudaRouting, RefusesWhatItCannotServe) {
  Tensor logits = tensor2(nullptr, DType::kF64, 4, 8);
  RouteOptions o;
  o.top_k = 2;
  EXPECT_EQ(status_of_route(o, logits), Status::kUnsupported);
  logits.dtype = DType::kF32;
  logits.shape[1] = 2000;
  EXPECT_EQ(status_of_route(o, logits), Status::kUnsupported);
  logits.shape[1] = 64;
  o.top_k = 33;
  EXPECT_EQ(status_of_route(o, logits), Status::kUnsupported);
}

}  // namespace
}  // namespace sonicmoe
