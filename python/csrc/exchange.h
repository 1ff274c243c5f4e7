// Expert parallelism over peer memory as operators. An operator takes no objects, so an exchange is
// passed by its number. All ranks open exchanges in the same order, so an exchange has the same
// number on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "device_scope.h"
#include "layer.h"
#include "lora.h"
#include "sonicmoe/exchange.h"
#include "views.h"

namespace sonicmoe_torch {

struct OpenedExchange {
  sonicmoe::Exchange* exchange = nullptr;
  std::int32_t ranks = 0;
};

/// A step that runs as several operators, between which torch allocates and enqueues other work.
struct RunningStep {
  sonicmoe::Problem problem;
  sonicmoe::Pass pass = sonicmoe::Pass::kForward;
  void* stream = nullptr;  ///< on which it began
  /// The memory that the step uses and its caller does not have: copies of arguments, scratch.
  std::vector<std::shared_ptr<const void>> memory;

  template <class T>
  void hold(T held) {
    memory.push_back(std::make_shared<const T>(std::move(held)));
  }
};

/// The exchanges of this process. No exchange is ever closed, because a later backward or a CUDA
/// graph may use it until the process ends.
class Exchanges {
 public:
  /// Never freed: a step may hold tensors, and torch may be gone when this library is unloaded.
  static Exchanges& of_process() {
    static Exchanges& exchanges = *new Exchanges;
    return exchanges;
  }
  std::int64_t add(const OpenedExchange& opened) {
    const std::lock_guard lock(mutex_);
    opened_.push_back(opened);
    running_.push_back(std::make_unique<RunningStep>());
    return static_cast<std::int64_t>(opened_.size()) - 1;
  }
  /// The step that an exchange runs. As all of an exchange, for one thread at a time.
  RunningStep& running(std::int64_t number) {
    at(number);
    const std::lock_guard lock(mutex_);
    return *running_[static_cast<std::size_t>(number)];
  }
  OpenedExchange at(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number < 0 || number >= static_cast<std::int64_t>(opened_.size())) {
      throw std::invalid_argument("exchange is " + std::to_string(number) +
                                  ", must be the number of an exchange that this process opened");
    }
    return opened_[static_cast<std::size_t>(number)];
  }

 private:
  std::mutex mutex_;
  std::vector<OpenedExchange> opened_;
  std::vector<std::unique_ptr<RunningStep>> running_;
};

#define SONICMOE_EXCHANGE_SHAPE(ARGUMENT)                              \
  ARGUMENT(Array, like) /* gives the GPU, and the dtype of the rows */ \
  ARGUMENT(std::int64_t, ranks)                                        \
  ARGUMENT(std::int64_t, max_tokens)                                   \
  ARGUMENT(std::int64_t, max_slots)                                    \
  ARGUMENT(std::int64_t, hidden)
struct ShapeCall {
  SONICMOE_ARGUMENTS(SONICMOE_EXCHANGE_SHAPE)
};

inline sonicmoe::ExchangeShape shape_of(const ShapeCall& a) {
  sonicmoe::ExchangeShape shape;
  shape.ranks = int32("ranks", a.ranks);
  shape.max_tokens = a.max_tokens;
  shape.max_slots = a.max_slots;
  shape.hidden = a.hidden;
  shape.dtype = dtype_of(a.like, "x");
  return shape;
}

/// Bytes of the symmetric buffer of each rank.
inline std::int64_t exchange_bytes(ShapeCall& a) {
  const DeviceScope device(a.like);
  return sonicmoe::exchange_bytes(shape_of(a), device.exec());
}

#define SONICMOE_EXCHANGE_PLACE(ARGUMENT)                                       \
  ARGUMENT(Array, addresses) /* (ranks) int64 on the CPU: the ranks' buffers */ \
  ARGUMENT(std::int64_t, buffer_bytes)                                          \
  ARGUMENT(std::int64_t, rank)                                                  \
  ARGUMENT(std::int64_t, time_limit_ms)                                         \
  ARGUMENT(std::int64_t, rows_by) /* ExchangeTransport */
struct PlaceOptions {
  SONICMOE_ARGUMENTS(SONICMOE_EXCHANGE_PLACE)
};
using OpenCall = Joined<ShapeCall, PlaceOptions>;

/// Opens an exchange and returns its number. The buffers must stay mapped as long as the process
/// runs.
inline std::int64_t exchange_open(OpenCall& a) {
  const DeviceScope device(a.like);
  if (a.addresses.is_cuda() || a.addresses.scalar_type() != ScalarType::Long ||
      a.addresses.numel() != a.ranks || !a.addresses.is_contiguous()) {
    throw std::invalid_argument("addresses must be " + std::to_string(a.ranks) +
                                " contiguous int64 numbers in host memory");
  }
  const auto* addresses = static_cast<const std::int64_t*>(a.addresses.data_ptr());
  std::vector<void*> buffers;
  for (std::int64_t r = 0; r < a.ranks; ++r) {
    buffers.push_back(reinterpret_cast<void*>(static_cast<std::uintptr_t>(addresses[r])));
  }
  sonicmoe::ExchangeOptions options;
  options.shape = shape_of(a);
  options.rank = int32("rank", a.rank);
  options.buffers = buffers.data();
  options.buffer_bytes = a.buffer_bytes;
  options.time_limit_ms = a.time_limit_ms;
  options.transport = enumerator("rows_by", a.rows_by, sonicmoe::ExchangeTransport::kCopy);
  return Exchanges::of_process().add(
      {sonicmoe::exchange_open(options, device.exec()), options.shape.ranks});
}

#define SONICMOE_EXCHANGE_NUMBER(ARGUMENT) ARGUMENT(std::int64_t, exchange)
struct ExchangeNumber {
  SONICMOE_ARGUMENTS(SONICMOE_EXCHANGE_NUMBER)
};
#define SONICMOE_EXCHANGE_DEVICE(ARGUMENT) ARGUMENT(Array, like)
struct ExchangeDevice {
  SONICMOE_ARGUMENTS(SONICMOE_EXCHANGE_DEVICE)
};
using StateCall = Joined<ExchangeDevice, ExchangeNumber>;

/// Throws if an earlier step has failed; does not wait for the device.
inline std::tuple<> exchange_check(StateCall& a) {
  const DeviceScope device(a.like);
  sonicmoe::exchange_check(*Exchanges::of_process().at(a.exchange).exchange, device.exec());
  return {};
}

/// Makes an exchange usable again after a failed step; the host waits for the device. All ranks
/// must call it, with a barrier before and after it.
inline std::tuple<> exchange_reset(StateCall& a) {
  const DeviceScope device(a.like);
  sonicmoe::exchange_reset(*Exchanges::of_process().at(a.exchange).exchange, device.exec());
  Exchanges::of_process().running(a.exchange) = {};
  return {};
}

/// The row capacity of this rank's experts. -1: the number of rows that are routed to them, for
/// which the host waits.
#define SONICMOE_EXCHANGE_ROWS(ARGUMENT) ARGUMENT(std::int64_t, rows)
struct ExchangeRows {
  SONICMOE_ARGUMENTS(SONICMOE_EXCHANGE_ROWS)
};
inline constexpr std::int64_t kRoutedRows = -1;

/// A call of the layer over all ranks: problem.experts counts the experts of all ranks.
struct ExchangeCall : LoraCall {
  OpenedExchange opened;
  QuantisedWeights fp8;  ///< of this rank's experts

  ExchangeCall(Layer& a, const Factors& f, std::int64_t number, const MaybeArray& fp8_weights,
               const sonicmoe::Exec& exec)
      : LoraCall(lora_call_of(a, f)),
        opened(Exchanges::of_process().at(number)),
        fp8(layer, fp8_weights, a.x, exec) {
    layer.problem.experts *= opened.ranks;
  }
  sonicmoe::Exchange& exchange() const { return *opened.exchange; }
};

/// A step of a forward that has begun.
struct BegunStep {
  sonicmoe::Exchange& exchange;
  const sonicmoe::Problem& problem;
  const sonicmoe::Exec& exec;

  /// The row capacity of the step: as asked, or if kRoutedRows was asked the number of routed rows,
  /// but at least 1. (An H without elements would have a null address, and to the library a null H
  /// means inference.)
  std::int64_t rows(std::int64_t asked) const {
    if (asked != kRoutedRows) return asked;
    return std::max<std::int64_t>(1, sonicmoe::exchange_rows(exchange, exec));
  }
  sonicmoe::Sizes sizes(std::int64_t rows, sonicmoe::Pass pass) const {
    return sonicmoe::exchange_sizes(exchange, problem, rows, pass, exec);
  }
  /// Computes this rank's experts and sends partial sums.
  void compute(std::int64_t rows, const sonicmoe::ExchangeBuffers& b) const {
    sonicmoe::ForwardArgs args;
    args.h = b.h;
    args.saved = b.saved;
    args.scratch = b.scratch;
    sonicmoe::exchange_forward(exchange, problem, rows, args, sonicmoe::ExchangePart::kCompute,
                               exec, b.kept_x);
  }
};

/// Waits for the partial sums of all ranks and adds them.
inline void finish(sonicmoe::Exchange& exchange, sonicmoe::Pass pass, const sonicmoe::Exec& exec) {
  sonicmoe::ComputedStep{&exchange, pass, exec}.finish();
}

/// Sends routing and rows of x. Returns the output, which finish() writes.
inline Array begin_forward(const ExchangeCall& c, const Array& x, const sonicmoe::Exec& exec) {
  Array out = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  const Call& l = c.layer;
  sonicmoe::BegunForward(
      c.exchange(), l.problem,
      {l.x, l.routing, l.weights, view(out, "out"), {}, {}, {}, c.fp8.buffer(), c.lora}, exec);
  return out;
}

/// Returns the scratch, which the step uses until it has finished.
inline Scratch compute_inference(const BegunStep& step, const Array& like, std::int64_t asked) {
  const std::int64_t rows = step.rows(asked);
  Scratch scratch(like, step.sizes(rows, sonicmoe::Pass::kInference).scratch_bytes);
  step.compute(rows, {{}, {}, scratch.buffer()});
  return scratch;
}

/// What a forward keeps, and its scratch. H.size(0) is the row capacity of the step, also if H is
/// kept as codes: then H (rows, bytes) has at least the bytes of the codes and scales.
struct ComputedForward {
  Array h;
  Array saved;
  Array kept_x;  ///< kept rows of x, or nothing
  Scratch scratch;
};

inline ComputedForward compute_forward(const BegunStep& step, const Array& like, std::int64_t asked,
                                       bool keep_rows) {
  const auto& problem = step.problem;
  const std::int64_t rows = step.rows(asked);
  const auto sizes = step.sizes(rows, sonicmoe::Pass::kForward);
  const std::int64_t width = sonicmoe::gate_factor(problem.activation.kind) * problem.width;
  Array h = keeps_codes(problem)
                ? empty(like, {rows, (sizes.h_bytes + rows - 1) / rows}, ScalarType::Byte)
                : empty(like, {rows, width}, like.scalar_type());
  Array saved = new_bytes(like, sizes.saved_bytes);
  Scratch scratch(like, sizes.scratch_bytes);
  const std::int64_t kept_bytes =
      keep_rows ? sonicmoe::exchange_kept_bytes(step.exchange, problem, step.exec) : 0;
  Array kept_x = kept_bytes == 0 ? nothing(like) : new_bytes(like, kept_bytes);
  step.compute(rows, {lend(h), lend(saved), scratch.buffer(),
                      kept_bytes == 0 ? sonicmoe::Buffer{} : lend(kept_x)});
  return {h, saved, kept_x, std::move(scratch)};
}

using ExchangeInferenceCall = Joined<Layer, Factors, ExchangeNumber, ExchangeRows, Fp8Argument>;

inline Array exchange_inference(ExchangeInferenceCall& a) {
  const DeviceScope device(a.x);
  const ExchangeCall c(a, a, a.exchange, a.fp8_weights, device.exec());
  Array out = begin_forward(c, a.x, device.exec());
  const auto scratch =
      compute_inference({c.exchange(), c.layer.problem, device.exec()}, a.x, a.rows);
  finish(c.exchange(), sonicmoe::Pass::kForward, device.exec());
  return out;
}

/// Whether forward keeps the rows of x that have come, for backward.
#define SONICMOE_KEEP_ROWS(ARGUMENT) ARGUMENT(bool, keep_rows)
struct KeepRows {
  SONICMOE_ARGUMENTS(SONICMOE_KEEP_ROWS)
};
using ExchangeForwardCall =
    Joined<Layer, MainGradients, Factors, ExchangeNumber, ExchangeRows, KeepRows, Fp8Argument>;

/// (out, H, metadata, kept rows of x or nothing)
inline std::tuple<Array, Array, Array, Array> exchange_forward(ExchangeForwardCall& a) {
  const DeviceScope device(a.x);
  const ExchangeCall c(a, a, a.exchange, a.fp8_weights, device.exec());
  Array out = begin_forward(c, a.x, device.exec());
  const ComputedForward computed =
      compute_forward({c.exchange(), c.layer.problem, device.exec()}, a.x, a.rows, a.keep_rows);
  finish(c.exchange(), sonicmoe::Pass::kForward, device.exec());
  return {out, computed.h, computed.saved, computed.kept_x};
}

/// Computes a backward together with the other ranks. Either all ranks ask for dx, or no rank does;
/// the same holds for dweights. `end` gets the step when it has begun, and what it uses.
template <class End>
struct RunTogether {
  std::int64_t exchange;
  const MaybeArray& kept_x;
  const Factors& factors;
  const Factors& factor_grads;
  const MaybeArray& fp8_weights;
  End end;

  void operator()(BackwardCall& a, const sonicmoe::Weights& grads, const MaybeArray& dx,
                  const MaybeArray& dweights, sonicmoe::GradMode mode) const {
    const DeviceScope device(a.x);
    const ExchangeCall c(a, factors, exchange, fp8_weights, device.exec());
    const std::int64_t rows = a.h.size(0);
    auto args = backward_args(a, c.layer, grads, dx, dweights, mode);
    args.lora = c.lora;
    args.lora_grads = lora_of(a, factor_grads);
    MaybeArray kept = kept_x;
    if (kept) kept = owned_bytes(*kept, "kept_x", ScalarType::Byte);
    const auto sizes = sonicmoe::exchange_sizes(c.exchange(), c.layer.problem, rows,
                                                sonicmoe::Pass::kBackward, device.exec());
    const Scratch scratch(a.x, sizes.scratch_bytes);
    args.scratch = scratch.buffer();
    args.fp8_weights = c.fp8.buffer();
    sonicmoe::BegunBackward begun(c.exchange(), c.layer.problem, rows, args, device.exec(),
                                  kept ? lend(*kept) : sonicmoe::Buffer{});
    end(std::move(begun), c.layer.problem, std::tuple(a, c, kept, scratch));
  }
};

/// Computes and finishes a backward that has begun.
struct EndAtOnce {
  template <class Memory>
  void operator()(sonicmoe::BegunBackward begun, const sonicmoe::Problem&, Memory) const {
    std::move(begun).compute().finish();
  }
};

/// Leaves the rest to exchange_compute_backward and exchange_finish.
struct EndLater {
  std::int64_t number;

  template <class Memory>
  void operator()(sonicmoe::BegunBackward begun, const sonicmoe::Problem& problem,
                  Memory memory) const {
    RunningStep& step = Exchanges::of_process().running(number);
    step = {problem, sonicmoe::Pass::kBackward, begun.exec.stream, {}};
    step.hold(std::move(memory));
  }
};

#define SONICMOE_KEPT_X(ARGUMENT) ARGUMENT(MaybeArray, kept_x)
struct KeptX {
  SONICMOE_ARGUMENTS(SONICMOE_KEPT_X)
};
using ExchangeBackwardCall = Joined<BackwardCall, Factors, ExchangeNumber, KeptX, Fp8Argument>;
using ExchangeAccumulateCall = Joined<AccumulateCall, ExchangeNumber, KeptX, Fp8Argument>;

/// The gradients of the layer, then those of the factors.
template <class End>
auto gradients_together(ExchangeBackwardCall& a, End end) {
  const Factors grads = gradients_of(a.needs, a);
  const auto layer =
      written_gradients(a, RunTogether<End>{a.exchange, a.kept_x, a, grads, a.fp8_weights, end});
  return std::tuple_cat(layer, all_or_nothing(grads, a.x));
}

template <class End>
FreshGradients sums_together(ExchangeAccumulateCall& a, End end) {
  const Factors none;
  return accumulated_gradients(
      a, RunTogether<End>{a.exchange, a.kept_x, none, none, a.fp8_weights, end});
}

inline auto exchange_backward(ExchangeBackwardCall& a) {
  return gradients_together(a, EndAtOnce{});
}
inline FreshGradients exchange_backward_accumulate(ExchangeAccumulateCall& a) {
  return sums_together(a, EndAtOnce{});
}

// ---- steps in parts ----------------------------------------------------------------------------
// begin, compute and finish as operators of their own, on one CUDA stream. What the caller enqueues
// between them runs while rows and partial sums travel. The caller keeps the tensors that it has
// passed, and those that it gets, until finish; these hold results only after it.

using ExchangeBeginCall = Joined<Layer, Factors, ExchangeNumber, Fp8Argument>;

/// Returns the output.
inline Array exchange_begin_forward(ExchangeBeginCall& a) {
  const DeviceScope device(a.x);
  const ExchangeCall c(a, a, a.exchange, a.fp8_weights, device.exec());
  Array out = begin_forward(c, a.x, device.exec());
  RunningStep& step = Exchanges::of_process().running(a.exchange);
  step = {c.layer.problem, sonicmoe::Pass::kForward, device.exec().stream, {}};
  step.hold(std::tuple(a, c));
  return out;
}

/// The step that an exchange runs, which must have begun on this stream.
inline RunningStep& running_step(std::int64_t number, const sonicmoe::Exec& exec) {
  RunningStep& step = Exchanges::of_process().running(number);
  if (step.memory.empty()) {
    throw std::invalid_argument("exchange " + std::to_string(number) +
                                " runs no step in parts, must have begun one");
  }
  if (step.stream != exec.stream) {
    throw std::invalid_argument(
        "a part of a step is called on another CUDA stream than its begin, must be called on the "
        "same");
  }
  return step;
}

using ExchangeComputeCall = Joined<ExchangeDevice, ExchangeNumber, ExchangeRows>;
using ExchangeRecordCall = Joined<ExchangeComputeCall, KeepRows>;

inline std::tuple<> exchange_compute_inference(ExchangeComputeCall& a) {
  const DeviceScope device(a.like);
  RunningStep& step = running_step(a.exchange, device.exec());
  sonicmoe::Exchange& exchange = *Exchanges::of_process().at(a.exchange).exchange;
  step.hold(compute_inference({exchange, step.problem, device.exec()}, a.like, a.rows));
  return {};
}

/// (H, metadata, kept rows of x or nothing)
inline std::tuple<Array, Array, Array> exchange_compute_forward(ExchangeRecordCall& a) {
  const DeviceScope device(a.like);
  RunningStep& step = running_step(a.exchange, device.exec());
  sonicmoe::Exchange& exchange = *Exchanges::of_process().at(a.exchange).exchange;
  const ComputedForward computed =
      compute_forward({exchange, step.problem, device.exec()}, a.like, a.rows, a.keep_rows);
  step.hold(computed.scratch);
  return {computed.h, computed.saved, computed.kept_x};
}

inline auto exchange_begin_backward(ExchangeBackwardCall& a) {
  return gradients_together(a, EndLater{a.exchange});
}
inline FreshGradients exchange_begin_backward_accumulate(ExchangeAccumulateCall& a) {
  return sums_together(a, EndLater{a.exchange});
}

inline std::tuple<> exchange_compute_backward(StateCall& a) {
  const DeviceScope device(a.like);
  running_step(a.exchange, device.exec());
  sonicmoe::exchange_backward(*Exchanges::of_process().at(a.exchange).exchange, {}, 0, {},
                              sonicmoe::ExchangePart::kCompute, device.exec());
  return {};
}

/// Of forward or backward.
inline std::tuple<> exchange_finish(StateCall& a) {
  const DeviceScope device(a.like);
  RunningStep& step = running_step(a.exchange, device.exec());
  finish(*Exchanges::of_process().at(a.exchange).exchange, step.pass, device.exec());
  step = {};
  return {};
}

}  // namespace sonicmoe_torch
