// Every refusal of expert parallelism, word for word.
#include "checks_fixture.h"
#include "sonicmoe/c_api.h"

namespace sonicmoe::test {
namespace {

struct Open {
  Memory memory;
  void* buffers[2] = {memory.buffer(kFakeExchangeBytes).data,
                      memory.buffer(kFakeExchangeBytes).data};
  ExchangeOptions options{
      .shape = kFakeShape, .rank = 1, .buffers = buffers, .buffer_bytes = kFakeExchangeBytes};
  Exec exec;
  void run() { exchange_open(options, exec); }
};

TEST(ChecksExchange, OpenRefusals) {
  expect_refusals<Open>({
      {[](Open& o) { o.options.shape.ranks = 0; }, "shape.ranks is 0, must be at least 1"},
      {[](Open& o) { o.options.shape.ranks = 65; },
       "shape.ranks is 65, must be at most 64, the most that an exchange has"},
      {[](Open& o) { o.options.shape.max_tokens = 0; },
       "shape.max_tokens is 0, must be at least 1"},
      {[](Open& o) { o.options.shape.max_slots = 0; }, "shape.max_slots is 0, must be at least 1"},
      {[](Open& o) { o.options.shape.hidden = 0; }, "shape.hidden is 0, must be at least 1"},
      {[](Open& o) { o.options.shape.dtype = DType::kF32; },
       "shape.dtype is f32, must be bf16 or f16", Status::kUnsupported},
      {[](Open& o) { o.options.shape.max_tokens = 1LL << 30; },
       "shape.ranks * shape.max_tokens is 2147483648, must be below 2^31", Status::kOutOfRange},
      {[](Open& o) { o.options.rank = -1; }, "rank is -1, must be at least 0"},
      {[](Open& o) { o.options.rank = 2; }, "rank is 2, must be at most 1, the last rank"},
      {[](Open& o) { o.options.transport = static_cast<ExchangeTransport>(3); },
       "transport is 3, must be in 0 to 2"},
      {[](Open& o) { o.options.time_limit_ms = -1; }, "time_limit_ms is -1, must be at least 0"},
      {[](Open& o) { o.options.time_limit_ms = (1LL << 32) + 1; },
       "time_limit_ms is 4294967297, must be at most 4294967296, 49 days"},
      {[](Open& o) { o.options.multiprocessors = 1025; },
       "multiprocessors is 1025, must be at most 1024, more than a GPU has"},
      {[](Open& o) { o.options.multiprocessors = -1; },
       "multiprocessors is -1, must be at least 0"},
      {[](Open& o) { o.options.buffers = nullptr; },
       "buffers is null, must be an address for each rank"},
      {[](Open& o) { o.buffers[0] = nullptr; },
       "buffers[0] is null, must be the symmetric buffer of that rank"},
      {[](Open& o) { o.buffers[1] = static_cast<char*>(o.buffers[1]) + 16; },
       "buffers[1] is not 256-byte aligned, must be the symmetric buffer of that rank"},
      {[](Open& o) { o.options.buffer_bytes = 100; }, "buffer_bytes is 100, must be at least 4096",
       Status::kWorkspaceTooSmall},
  });
}

TEST(ChecksExchange, ClosingNullIsAllowed) {
  Exec no_device;
  no_device.backend = Backend::kCuda;
  EXPECT_NO_THROW(exchange_close(nullptr, no_device));
  EXPECT_EQ(smoe_exchange_close(nullptr, nullptr), SMOE_OK);
}

constexpr std::int64_t T = 4, d = 8, n = 8, E = 4, K = 2;

/// Rank 1 of two: weights of E/2 experts.
struct Forward {
  Memory memory;
  Problem problem{
      .tokens = T, .hidden = d, .width = n, .experts = E, .top_k = K, .dtype = DType::kBF16};
  std::int64_t rows = 16;
  ForwardArgs args;
  ExchangePart part = ExchangePart::kAll;
  Exec exec;
  char exchange = 0;  // the fake backend does not look at it

  Forward() {
    args.x = memory.tensor(DType::kBF16, {T, d});
    args.routing.ids = memory.tensor(DType::kI32, {T, K});
    args.routing.weights = memory.tensor(DType::kF32, {T, K});
    args.weights.gate = memory.tensor(DType::kBF16, {E / 2, n, d});
    args.weights.up = memory.tensor(DType::kBF16, {E / 2, n, d});
    args.weights.down = memory.tensor(DType::kBF16, {E / 2, d, n});
    args.h = memory.buffer(kFakeSizes.h_bytes);
    args.saved = memory.buffer(kFakeSizes.saved_bytes);
    args.scratch = memory.buffer(kFakeSizes.scratch_bytes);
    args.out = memory.tensor(DType::kBF16, {T, d});
  }
  void run() {
    exchange_forward(reinterpret_cast<Exchange&>(exchange), problem, rows, args, part, exec);
  }
};

TEST(ChecksExchange, ForwardRefusals) {
  expect_refusals<Forward>({
      {[](Forward& f) { f.problem.form = RoutingForm::kGrouped, f.problem.top_k = 0; },
       "form is grouped, must be ids or pairs: an exchange needs to know each token's experts",
       Status::kUnsupported},
      {[](Forward& f) { f.problem.dtype = DType::kF16; },
       "dtype is f16, must be bf16 as in the exchange's shape"},
      {[](Forward& f) { f.problem.tokens = 5; },
       "tokens is 5, must be at most 4, the exchange's max_tokens"},
      {[](Forward& f) { f.problem.hidden = 16; },
       "hidden is 16, must be at most 8, the exchange's hidden"},
      {[](Forward& f) { f.problem.top_k = 3; },
       "slots is 12, must be at most 8, the exchange's max_slots"},
      {[](Forward& f) { f.problem.experts = 5; },
       "experts is 5, must be a multiple of the 2 ranks"},
      {[](Forward& f) { f.rows = -1; }, "rows is -1, must be at least 0"},
      {[](Forward& f) { f.rows = 1LL << 31; }, "rows is 2147483648, must be below 2^31",
       Status::kOutOfRange},
      {[](Forward& f) { f.part = static_cast<ExchangePart>(4); }, "part is 4, must be in 0 to 3"},
      {[](Forward& f) { f.args.weights.down.shape[0] = E; },
       "weights.down has shape (4, 8, 8), must be (E, d, n) = (2, 8, 8)"},
      {[](Forward& f) { f.args.fp8_weights = f.memory.buffer(256); },
       "fp8_weights is given, must be empty: precision is not fp8"},
      {[](Forward& f) { f.args.scratch.bytes = 1; },
       "scratch has 1 bytes, must have at least 768 bytes", Status::kWorkspaceTooSmall},
      {[](Forward& f) { f.args.out.data = f.args.x.data; },
       "out overlaps x, must be memory of its own"},
  });
}

struct Backward : Forward {
  BackwardArgs grads;

  Backward() {
    part = ExchangePart::kBegin;  // checks the buffers, unlike kBegin of a forward
    grads.x = args.x;
    grads.routing = args.routing;
    grads.weights = args.weights;
    grads.dout = memory.tensor(DType::kBF16, {T, d});
    grads.h = args.h;
    grads.saved = args.saved;
    grads.scratch = args.scratch;
    grads.dx = memory.tensor(DType::kBF16, {T, d});
    grads.dweights = memory.tensor(DType::kF32, {T, K});
    grads.grads.down = memory.tensor(DType::kBF16, {E / 2, d, n});
  }
  void run() {
    exchange_backward(reinterpret_cast<Exchange&>(exchange), problem, rows, grads, part, exec);
  }
};

TEST(ChecksExchange, BackwardRefusals) {
  expect_refusals<Backward>({
      {[](Backward& b) { b.problem.experts = 5; },
       "experts is 5, must be a multiple of the 2 ranks"},
      {[](Backward& b) { b.rows = 1LL << 31; }, "rows is 2147483648, must be below 2^31",
       Status::kOutOfRange},
      {[](Backward& b) { b.part = static_cast<ExchangePart>(-1); },
       "part is -1, must be in 0 to 3"},
      {[](Backward& b) { b.grads.dout.shape[0] = 3; },
       "dout has shape (3, 8), must be (T, d) = (4, 8)"},
      {[](Backward& b) { b.grads.fp8_weights = b.memory.buffer(256); },
       "fp8_weights is given, must be empty: precision is not fp8"},
      {[](Backward& b) { b.grads.grads.down.shape[0] = E; },
       "grads.down has shape (4, 8, 8), must be (E, d, n) = (2, 8, 8)"},
      {[](Backward& b) { b.grads.saved.bytes = 1; },
       "saved has 1 bytes, must have at least 512 bytes", Status::kWorkspaceTooSmall},
      {[](Backward& b) { b.grads.dx.data = b.grads.dout.data; },
       "dx overlaps dout, must be memory of its own"},
  });
}

TEST(ChecksExchange, BeginNeedsNoBuffers) {
  Forward f;
  f.args.h = f.args.saved = f.args.scratch = {};
  f.rows = 0;
  f.part = ExchangePart::kBegin;
  backend_calls = 0;
  EXPECT_NO_THROW(f.run());
  EXPECT_EQ(backend_calls, 1);
}

TEST(ChecksExchange, OrderRefusals) {
  Backward b;
  b.part = ExchangePart::kCompute;
  try {
    b.run();
    ADD_FAILURE() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "part is kCompute of exchange_backward but the next part must be "
                 "kBegin; exchange_reset on all ranks gives a step up.");
  }
}

/// Rank 0 of two has rows of x from both.
TEST(ChecksExchange, KeptRowsRefusals) {
  Backward b;
  const auto run = [&](const Buffer& kept) {
    BegunBackward(reinterpret_cast<Exchange&>(b.exchange), b.problem, b.rows, b.grads, b.exec,
                  kept);
  };
  const auto by_number = [&](const Buffer& kept) {
    exchange_backward(reinterpret_cast<Exchange&>(b.exchange), b.problem, b.rows, b.grads,
                      ExchangePart::kBegin, b.exec, kept);
  };
  Forward f;
  const auto forward = [&](const Buffer& kept) {
    exchange_forward(reinterpret_cast<Exchange&>(f.exchange), f.problem, f.rows, f.args,
                     ExchangePart::kAll, f.exec, kept);
  };
  constexpr std::int64_t kBytes = 2 * T * d * 2;
  EXPECT_EQ(exchange_kept_bytes(reinterpret_cast<Exchange&>(b.exchange), b.problem, b.exec),
            kBytes);
  const Buffer kept = b.memory.buffer(kBytes);
  EXPECT_NO_THROW(run(kept));
  for (const auto& [wrong, sentence] :
       {std::pair{Buffer{kept.data, kBytes - 1},
                  "kept_x has 127 bytes, must have at least 128 bytes"},
        {Buffer{b.grads.dx.data, kBytes}, "kept_x overlaps dx, must be memory of its own"}}) {
    for (const std::function<void(const Buffer&)>& call : {std::function(run), {by_number}}) {
      try {
        call(wrong);
        ADD_FAILURE() << "accepted: " << sentence;
      } catch (const Error& e) {
        EXPECT_STREQ(e.what(), sentence);
      }
    }
  }
  try {
    forward({f.args.out.data, kBytes});
    ADD_FAILURE() << "accepted kept rows in the output";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "kept_x overlaps out, must be memory of its own");
  }
}

}  // namespace
}  // namespace sonicmoe::test
