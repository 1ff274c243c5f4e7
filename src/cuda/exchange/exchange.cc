// Opens, checks and resets an exchange.
#include "cuda/exchange/exchange.h"

#include <atomic>
#include <memory>
#include <new>
#include <string>

#include "cuda/device/carver.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kDefaultLimitMs = 60'000;
constexpr int kDefaultMultiprocessors = 8;
/// kAuto takes kCopy for at most so many ranks. Four H200, four layers, forward and backward over
/// the layer alone: kCopy 1.12 to 1.97, kPush 1.19 to 2.17.
constexpr std::int32_t kMostCopyRanks = 4;
/// Tiles wait for their rows in groups of at most so many ranks. Two H200: 2 to 4 % less time in
/// three of four layers. Four H200, T = 8192: 2 % less in qwen3-30b and 30B-n256, 1 % more in
/// qwen3-235b; T = 16384: equal.
constexpr std::int32_t kMostAwaitingRanks = 4;

/// What the missing rank did not do in time, for the fault's sentence.
const char* phase_text(std::uint32_t phase) {
  switch (phase) {
    case kPhaseRouting:
      return "send its routing";
    case kPhaseReady:
    case kPhaseStarted:
    case kPhaseRows:
      return "send its rows";
    case kPhaseAgain:
      return "send its rows of x in backward";
    case kPhasePartials:
    case kPhaseMorePartials:
      return "send its partial sums";
    case kPhaseScores:
      return "send its gradients of routing weights";
    default:
      return "finish its layer";
  }
}

std::string fault_sentence(const Exchange& exchange, const FaultRecord& record) {
  const FaultCode code = FaultCode::unpack(record.code);
  const std::string blamed = "rank " + std::to_string(code.rank);
  const auto own = static_cast<std::uint32_t>(exchange.peers.rank);
  std::string sentence;
  if (code.kind == kFaultOverflow) {
    sentence = blamed + " got more rows for its experts than its capacity";
    if (code.rank == own) sentence += " (" + std::to_string(record.rows) + " rows came)";
  } else {
    sentence = blamed + " did not " + phase_text(code.phase) + " within the time limit of " +
               std::to_string(exchange.limits.nanoseconds / 1'000'000) + " ms";
  }
  if (record.reporter != own) {
    sentence += ", says rank " + std::to_string(record.reporter);
  }
  return sentence +
         ". The outputs of this step are not valid; exchange_reset on all ranks makes the exchange "
         "usable again.";
}

template <class T>
T* device_address(T* pinned) {
  void* address = nullptr;
  check_cuda(cudaHostGetDevicePointer(&address, pinned, 0), "mapping pinned memory");
  return static_cast<T*>(address);
}

template <class T>
T* pinned() {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable),
             "allocating pinned memory");
  return new (memory) T{};
}

void clear_control(const Exchange& exchange) {
  check_cuda(cudaDeviceSynchronize(), "waiting for the device");
  check_cuda(cudaMemset(exchange.peers.own<Control>(exchange.layout.control), 0, sizeof(Control)),
             "clearing the flags");
  check_cuda(cudaDeviceSynchronize(), "clearing the flags");
  *exchange.record = FaultRecord{};
}

/// Frees an exchange, also after exchange_open() has thrown in the middle.
struct Closer {
  void operator()(Exchange* exchange) const {
    if (exchange->sending != nullptr) cudaStreamDestroy(exchange->sending);
    if (exchange->aside != nullptr) cudaStreamDestroy(exchange->aside);
    if (exchange->reached != nullptr) cudaEventDestroy(exchange->reached);
    cudaFreeHost(exchange->record);
    cudaFreeHost(exchange->row_count);
    delete exchange;
  }
};

void create_streams(Exchange& exchange) {
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading stream priorities");
  check_cuda(cudaStreamCreateWithPriority(&exchange.sending, cudaStreamNonBlocking, greatest),
             "creating a stream");
  check_cuda(cudaStreamCreateWithPriority(&exchange.aside, cudaStreamNonBlocking, least),
             "creating a stream");
  check_cuda(cudaEventCreateWithFlags(&exchange.reached, cudaEventDisableTiming),
             "creating an event");
}

std::string handle_text(const Device& device) {
  return "GPU " + std::to_string(device.ordinal) + " with the engine " + device.engine->name;
}

/// Exchange::awaits_from of an engine whose tiles can wait. In a layer of more than two ranks that
/// the links limit, launches after waits can send partial sums earlier.
std::int64_t awaits_from(std::int32_t ranks) {
  if (ranks > kMostAwaitingRanks) return Exchange::kNever;
  return ranks > 2 ? Exchange::kLinkBound : 0;
}

/// Whether another rank's buffer is on this rank's GPU.
bool shares_gpu(const Exchange& exchange) {
  for (std::int32_t r = 0; r < exchange.peers.ranks; ++r) {
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, exchange.peers.base[r]),
               "looking up a symmetric buffer");
    if (r != exchange.peers.rank && attributes.device == exchange.device->ordinal) return true;
  }
  return false;
}

}  // namespace

void check_handle(const Exchange& exchange, const Exec& exec) {
  const Device& given = device_of(exec);
  const Device& own = *exchange.device;
  if (given.ordinal == own.ordinal && given.engine == own.engine) return;
  throw Error(Status::kInvalidArgument, "exec.device is " + handle_text(given) +
                                            " but the exchange was opened on " + handle_text(own) +
                                            ".");
}

ExchangeLayout exchange_layout(const ExchangeShape& s) {
  const std::int64_t rows = s.ranks * s.max_tokens * s.hidden;
  const std::int64_t slots = s.ranks * s.max_slots;
  Carver<256> carver(nullptr);
  const auto place = [&](std::int64_t bytes) {
    const std::int64_t offset = carver.used();
    carver.take<std::uint8_t>(bytes);
    return offset;
  };
  ExchangeLayout layout{};
  layout.control = place(sizeof(Control));
  layout.slot_token = place(slots * 4);
  layout.slot_expert = place(slots * 4);
  layout.slot_weight = place(slots * 4);
  layout.x = place(rows * dtype_bytes(s.dtype));
  layout.dout = place(rows * dtype_bytes(s.dtype));
  layout.partials = place(rows * dtype_bytes(s.dtype));
  layout.score_grads = place(s.max_slots * 4);
  layout.pair_counts = place(s.ranks * chunks_of(s) * 4);
  layout.rank_masks = place(s.max_tokens * 8);
  layout.bytes = carver.used();
  return layout;
}

std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec&) {
  return exchange_layout(shape).bytes;
}

Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec) {
  const CurrentDevice current(device_of(exec));
  std::unique_ptr<Exchange, Closer> exchange(new Exchange);
  exchange->device = &device_of(exec);
  exchange->shape = options.shape;
  exchange->layout = exchange_layout(options.shape);
  exchange->peers.ranks = options.shape.ranks;
  exchange->peers.rank = options.rank;
  for (std::int32_t r = 0; r < options.shape.ranks; ++r) {
    exchange->peers.base[r] = static_cast<std::uint8_t*>(options.buffers[r]);
  }
  exchange->transport = options.transport != ExchangeTransport::kAuto ? options.transport
                        : options.shape.ranks <= kMostCopyRanks       ? ExchangeTransport::kCopy
                                                                      : ExchangeTransport::kPush;
  exchange->multiprocessors =
      options.multiprocessors != 0 ? options.multiprocessors : kDefaultMultiprocessors;
  const std::int64_t limit = options.time_limit_ms != 0 ? options.time_limit_ms : kDefaultLimitMs;
  if (exchange->device->engine->awaits_rows && !shares_gpu(*exchange)) {
    exchange->awaits_from = awaits_from(options.shape.ranks);
  }
  exchange->record = pinned<FaultRecord>();
  exchange->row_count = pinned<std::int64_t>();
  exchange->limits = {limit * 1'000'000, device_address(exchange->record)};
  create_streams(*exchange);
  load_signal_kernels();
  load_slot_kernels();
  load_row_kernels();
  clear_control(*exchange);
  return exchange.release();
}

void exchange_close(Exchange* exchange, const Exec&) {
  const CurrentDevice current(*exchange->device);
  cudaDeviceSynchronize();
  Closer()(exchange);
}

void exchange_check(Exchange& exchange, const Exec& exec) {
  check_handle(exchange, exec);
  // The device writes the code last. If the code is visible, so is the rest of the record.
  if (std::atomic_ref(exchange.record->code).load(std::memory_order_acquire) == 0) return;
  throw Error(Status::kCuda, fault_sentence(exchange, *exchange.record));
}

void exchange_reset(Exchange& exchange, const Exec& exec) {
  check_handle(exchange, exec);
  clear_control(exchange);
  exchange.next = ExchangePart::kBegin;
}

}  // namespace sonicmoe::cuda
