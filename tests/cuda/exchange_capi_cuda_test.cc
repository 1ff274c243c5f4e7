// Steps over two pretended ranks through the C interface: the bits of the C++ interface.
#include <algorithm>
#include <string>

#include "cuda/rank_group.h"
#include "sonicmoe/c_api.h"

namespace sonicmoe {
namespace {

using testing::Bits;
using testing::DeviceArray;
using testing::Group;
using testing::must;
using testing::options_of;
using testing::RankLayer;
using testing::RankShape;

constexpr std::int32_t kRanks = 2;
const RankShape kShape{.tokens = 100, .hidden = 72, .width = 40, .experts = 4, .top_k = 2};
constexpr int kParts[] = {SMOE_PART_BEGIN, SMOE_PART_COMPUTE, SMOE_PART_FINISH};

void expect_ok(smoe_status status) { EXPECT_EQ(status, SMOE_OK) << smoe_last_error(); }

/// A struct of the C interface with its size, all else zero.
template <class T>
T sized() {
  T c{};
  c.size = sizeof(T);
  return c;
}

smoe_tensor tensor_of(const Tensor& t) {
  auto c = sized<smoe_tensor>();
  c.dtype = static_cast<std::int32_t>(t.dtype);
  c.rank = t.rank;
  c.data = t.data;
  std::copy_n(t.shape, 3, c.shape);
  std::copy_n(t.stride, 3, c.stride);
  return c;
}

/// The weights of a layer without biases, or their gradients.
struct CWeights {
  explicit CWeights(const Weights& w)
      : gate(tensor_of(w.gate)), up(tensor_of(w.up)), down(tensor_of(w.down)) {
    c.gate = &gate;
    c.up = &up;
    c.down = &down;
  }
  CWeights(const CWeights&) = delete;

  smoe_tensor gate, up, down;
  smoe_weights c = sized<smoe_weights>();
};

/// The arguments of a RankLayer as structs of the C interface.
struct CArgs {
  explicit CArgs(const RankLayer& layer)
      : x(tensor_of(layer.forward_args().x)),
        ids(tensor_of(layer.forward_args().routing.ids)),
        routing_weights(tensor_of(layer.forward_args().routing.weights)),
        out(tensor_of(layer.forward_args().out)),
        dout(tensor_of(layer.backward_args().dout)),
        dx(tensor_of(layer.backward_args().dx)),
        dweights(tensor_of(layer.backward_args().dweights)),
        weights(layer.forward_args().weights),
        grads(layer.backward_args().grads) {
    routing.ids = &ids;
    routing.weights = &routing_weights;
    const Problem& p = layer.problem();
    problem.form = static_cast<std::int32_t>(p.form);
    problem.dtype = static_cast<std::int32_t>(p.dtype);
    problem.activation = static_cast<std::int32_t>(p.activation.kind);
    problem.tokens = p.tokens;
    problem.hidden = p.hidden;
    problem.width = p.width;
    problem.experts = p.experts;
    problem.top_k = p.top_k;
    const ForwardArgs& f = layer.forward_args();
    forward.x = &x;
    forward.routing = &routing;
    forward.weights = &weights.c;
    forward.out = &out;
    forward.h = f.h.data;
    forward.h_bytes = f.h.bytes;
    forward.saved = f.saved.data;
    forward.saved_bytes = f.saved.bytes;
    forward.scratch = f.scratch.data;
    forward.scratch_bytes = f.scratch.bytes;
    backward.grad_mode = SMOE_GRAD_WRITE;
    backward.x = &x;
    backward.routing = &routing;
    backward.weights = &weights.c;
    backward.dout = &dout;
    backward.h = f.h.data;
    backward.h_bytes = f.h.bytes;
    backward.saved = f.saved.data;
    backward.saved_bytes = f.saved.bytes;
    backward.scratch = f.scratch.data;
    backward.scratch_bytes = f.scratch.bytes;
    backward.dx = &dx;
    backward.dweights = &dweights;
    backward.grads = &grads.c;
  }
  CArgs(const CArgs&) = delete;

  smoe_tensor x, ids, routing_weights, out, dout, dx, dweights;
  CWeights weights, grads;
  smoe_routing routing = sized<smoe_routing>();
  smoe_problem problem = sized<smoe_problem>();
  smoe_forward_args forward = sized<smoe_forward_args>();
  smoe_backward_args backward = sized<smoe_backward_args>();
};

/// Two ranks of one GPU. Everything but their tensors is opened and called through the C interface.
class ExchangeInC : public ::testing::Test {
 protected:
  struct Rank {
    smoe_device* device = nullptr;
    cudaStream_t stream = nullptr;
    smoe_exec exec = sized<smoe_exec>();
    std::unique_ptr<DeviceArray> buffer;
    smoe_exchange* exchange = nullptr;
    std::unique_ptr<RankLayer> layer;
    std::unique_ptr<CArgs> args;
    std::int64_t rows = kRanks * kShape.tokens * kShape.top_k;
  };

  void SetUp() override {
    auto options = sized<smoe_exchange_options>();
    options.dtype = SMOE_BF16;
    options.ranks = kRanks;
    options.max_tokens = kShape.tokens;
    options.max_slots = kShape.tokens * kShape.top_k;
    options.hidden = kShape.hidden;
    options.time_limit_ms = 20'000;
    options.transport = SMOE_TRANSPORT_PUSH;
    void* buffers[kRanks] = {};
    for (std::int32_t r = 0; r < kRanks; ++r) {
      Rank& rank = ranks_[r];
      expect_ok(smoe_device_open(0, &rank.device));
      must(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      rank.exec.backend = SMOE_CUDA_BACKEND;
      rank.exec.device = rank.device;
      rank.exec.stream = rank.stream;
      expect_ok(smoe_exchange_bytes(&options, &rank.exec, &options.buffer_bytes));
      rank.buffer = std::make_unique<DeviceArray>(options.buffer_bytes);
      buffers[r] = rank.buffer->data();
    }
    options.buffers = buffers;
    for (std::int32_t r = 0; r < kRanks; ++r) {
      Rank& rank = ranks_[r];
      options.rank = r;
      expect_ok(smoe_exchange_open(&options, &rank.exec, &rank.exchange));
      ASSERT_NE(rank.exchange, nullptr);
      const Exec exec{.backend = Backend::kCuda, .device = rank.device, .stream = rank.stream};
      auto* exchange = reinterpret_cast<Exchange*>(rank.exchange);
      rank.layer = std::make_unique<RankLayer>(testing::RankHandle{exchange, exec, 0, r, kRanks},
                                               kShape, rank.rows);
      rank.layer->route(1, static_cast<int>(kShape.experts));
      rank.args = std::make_unique<CArgs>(*rank.layer);
    }
  }
  void TearDown() override {
    must(cudaDeviceSynchronize());
    for (Rank& rank : ranks_) {
      expect_ok(smoe_exchange_close(rank.exchange, &rank.exec));
      must(cudaStreamDestroy(rank.stream));
      expect_ok(smoe_device_close(rank.device));
    }
  }

  void poison() {
    for (Rank& rank : ranks_) rank.layer->poison();
  }
  void forward(int part) {
    for (Rank& r : ranks_) {
      expect_ok(smoe_exchange_forward(r.exchange, &r.args->problem, r.rows, &r.args->forward, part,
                                      &r.exec));
    }
  }
  void backward(int part) {
    for (Rank& r : ranks_) {
      expect_ok(smoe_exchange_backward(r.exchange, &r.args->problem, r.rows, &r.args->backward,
                                       part, &r.exec));
    }
  }
  /// Calls a part of backward, which rank 0 has just called, once more.
  smoe_status again(int part) {
    Rank& r = ranks_[0];
    return smoe_exchange_backward(r.exchange, &r.args->problem, r.rows, &r.args->backward, part,
                                  &r.exec);
  }
  Bits bits() {
    must(cudaDeviceSynchronize());
    Bits all;
    for (Rank& rank : ranks_) {
      expect_ok(smoe_exchange_check(rank.exchange, &rank.exec));
      rank.layer->append(all);
    }
    return all;
  }

  Rank ranks_[kRanks];
};

Bits bits_of_cpp() {
  Group group(kShape, options_of(kShape, kRanks, ExchangeTransport::kPush));
  group.route(1, static_cast<int>(kShape.experts));
  return group.run();
}

TEST_F(ExchangeInC, StepsHaveTheBitsOfCpp) {
  const Bits want = bits_of_cpp();
  poison();
  forward(SMOE_PART_ALL);
  backward(SMOE_PART_ALL);
  EXPECT_TRUE(bits() == want) << "each pass as one call";

  for (Rank& r : ranks_) expect_ok(smoe_exchange_reset(r.exchange, &r.exec));
  poison();
  forward(SMOE_PART_BEGIN);
  for (Rank& r : ranks_) {
    const std::int64_t capacity = r.rows;
    expect_ok(smoe_exchange_rows(r.exchange, &r.args->problem, &r.exec, &r.rows));
    EXPECT_EQ(r.rows, r.layer->rows_asked());
    EXPECT_GT(r.rows, 0);
    EXPECT_LT(r.rows, capacity);
  }
  forward(SMOE_PART_COMPUTE);
  forward(SMOE_PART_FINISH);
  for (const int part : kParts) {
    backward(part);
    EXPECT_EQ(again(part), SMOE_INVALID_ARGUMENT) << "part " << part << " of backward is over";
  }
  EXPECT_TRUE(bits() == want) << "each pass in parts, with as many rows as were routed";
}

TEST_F(ExchangeInC, KeptRowsAreNotSentAgain) {
  const Bits want = bits_of_cpp();
  std::unique_ptr<DeviceArray> kept[kRanks];
  for (std::int32_t r = 0; r < kRanks; ++r) {
    std::int64_t bytes = 0;
    CArgs& args = *ranks_[r].args;
    expect_ok(smoe_exchange_kept_bytes(ranks_[r].exchange, &args.problem, &ranks_[r].exec, &bytes));
    EXPECT_EQ(bytes, kRanks * kShape.tokens * kShape.hidden * 2);
    kept[r] = std::make_unique<DeviceArray>(bytes);
    args.forward.kept_x = kept[r]->data();
    args.backward.kept_x = kept[r]->data();
    args.forward.kept_x_bytes = args.backward.kept_x_bytes = bytes;
  }
  const auto forward_and_spoil = [&] {
    poison();
    for (const int part : kParts) forward(part);
    must(cudaDeviceSynchronize());
    for (Rank& rank : ranks_) {  // as another layer's step writes other rows
      const auto& layout = reinterpret_cast<Exchange*>(rank.exchange)->layout;
      must(cudaMemset(static_cast<char*>(rank.buffer->data()) + layout.x, 0xff,
                      kRanks * kShape.tokens * kShape.hidden * 2));
    }
    DeviceArray::wait();
  };
  forward_and_spoil();
  for (const int part : kParts) backward(part);
  EXPECT_TRUE(bits() == want) << "in parts";
  forward_and_spoil();
  backward(SMOE_PART_ALL);
  EXPECT_TRUE(bits() == want) << "backward as one call";
  forward_and_spoil();
  for (auto& rows : kept) rows->fill(0);
  backward(SMOE_PART_ALL);
  EXPECT_FALSE(bits() == want) << "backward does not read the rows that were kept";
}

TEST_F(ExchangeInC, SizesAreThoseOfCpp) {
  const Rank& r = ranks_[1];
  for (const Pass pass : {Pass::kInference, Pass::kForward, Pass::kBackward}) {
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{130}, r.rows}) {
      auto sizes = sized<smoe_sizes>();
      expect_ok(smoe_exchange_sizes(r.exchange, &r.args->problem, rows,
                                    static_cast<std::int32_t>(pass), &r.exec, &sizes));
      const Sizes want = exchange_sizes(*reinterpret_cast<Exchange*>(r.exchange),
                                        r.layer->problem(), rows, pass, r.layer->exec());
      EXPECT_EQ(sizes.h_bytes, want.h_bytes);
      EXPECT_EQ(sizes.saved_bytes, want.saved_bytes);
      EXPECT_EQ(sizes.scratch_bytes, want.scratch_bytes);
    }
  }
}

TEST_F(ExchangeInC, APartOutOfOrderIsRefused) {
  Rank& r = ranks_[0];
  EXPECT_EQ(smoe_exchange_backward(r.exchange, &r.args->problem, r.rows, &r.args->backward,
                                   SMOE_PART_FINISH, &r.exec),
            SMOE_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(smoe_last_error()),
            "part is kFinish of exchange_backward but the next part must be kBegin; exchange_reset "
            "on all ranks gives a step up.");
}

}  // namespace
}  // namespace sonicmoe
