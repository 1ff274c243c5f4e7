// Expert parallelism over peer memory as operators. An operator takes no objects, so an exchange is
// passed by its number. All ranks open exchanges in the same order, so an exchange has the same
// number on all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
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

/// The exchanges of this process. No exchange is ever closed, because a later backward or a CUDA
/// graph may use it until the process ends.
class Exchanges {
 public:
  static Exchanges& of_process() {
    static Exchanges exchanges;
    return exchanges;
  }
  std::int64_t add(const OpenedExchange& opened) {
    const std::lock_guard lock(mutex_);
    opened_.push_back(opened);
    return static_cast<std::int64_t>(opened_.size()) - 1;
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

/// A forward that has sent routing and rows.
struct Begun {
  sonicmoe::BegunForward forward;
  /// The row capacity of the step: as asked, or if kRoutedRows was asked the number of routed rows,
  /// but at least 1. (An H without elements would have a null address, and to the library a null H
  /// means inference.)
  std::int64_t rows;

  Begun(const ExchangeCall& c, std::int64_t asked, const Array& out, const sonicmoe::Exec& exec)
      : forward(c.exchange(), c.layer.problem,
                {c.layer.x,
                 c.layer.routing,
                 c.layer.weights,
                 view(out, "out"),
                 {},
                 {},
                 {},
                 c.fp8.buffer(),
                 c.lora},
                exec),
        rows(asked == kRoutedRows ? std::max<std::int64_t>(1, forward.rows()) : asked) {}

  /// Computes this rank's experts and adds the partial sums of all ranks to the output.
  void end(const sonicmoe::ExchangeBuffers& buffers) && {
    std::move(forward).compute(rows, buffers).finish();
  }
};

using ExchangeInferenceCall = Joined<Layer, Factors, ExchangeNumber, ExchangeRows, Fp8Argument>;

inline Array exchange_inference(ExchangeInferenceCall& a) {
  const DeviceScope device(a.x);
  const ExchangeCall c(a, a, a.exchange, a.fp8_weights, device.exec());
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  Begun begun(c, a.rows, out, device.exec());
  const auto sizes = sonicmoe::exchange_sizes(c.exchange(), c.layer.problem, begun.rows,
                                              sonicmoe::Pass::kInference, device.exec());
  const Scratch scratch(a.x, sizes.scratch_bytes);
  std::move(begun).end({{}, {}, scratch.buffer()});
  return out;
}

/// Whether forward keeps the rows of x that have come, for backward.
#define SONICMOE_KEEP_ROWS(ARGUMENT) ARGUMENT(bool, keep_rows)
struct KeepRows {
  SONICMOE_ARGUMENTS(SONICMOE_KEEP_ROWS)
};
using ExchangeForwardCall =
    Joined<Layer, MainGradients, Factors, ExchangeNumber, ExchangeRows, KeepRows, Fp8Argument>;

/// (out, H, metadata, kept rows of x or nothing). H.size(0) is the row capacity of the step, also
/// if H is kept as codes: then H (rows, bytes) has at least the bytes of the codes and scales.
inline std::tuple<Array, Array, Array, Array> exchange_forward(ExchangeForwardCall& a) {
  const DeviceScope device(a.x);
  const ExchangeCall c(a, a, a.exchange, a.fp8_weights, device.exec());
  const auto& problem = c.layer.problem;
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  Begun begun(c, a.rows, out, device.exec());
  const auto sizes = sonicmoe::exchange_sizes(c.exchange(), problem, begun.rows,
                                              sonicmoe::Pass::kForward, device.exec());
  const bool coded = keeps_codes(problem);
  const std::int64_t width = sonicmoe::gate_factor(problem.activation.kind) * problem.width;
  Array h = coded ? empty(a.x, {begun.rows, (sizes.h_bytes + begun.rows - 1) / begun.rows},
                          ScalarType::Byte)
                  : empty(a.x, {begun.rows, width}, a.x.scalar_type());
  Array saved = new_bytes(a.x, sizes.saved_bytes);
  const Scratch scratch(a.x, sizes.scratch_bytes);
  const std::int64_t kept_bytes =
      a.keep_rows ? sonicmoe::exchange_kept_bytes(c.exchange(), problem, device.exec()) : 0;
  Array kept_x = kept_bytes == 0 ? nothing(a.x) : new_bytes(a.x, kept_bytes);
  std::move(begun).end({lend(h), lend(saved), scratch.buffer(),
                        kept_bytes == 0 ? sonicmoe::Buffer{} : lend(kept_x)});
  return {out, h, saved, kept_x};
}

/// Computes a backward together with the other ranks. Either all ranks ask for dx, or no rank does;
/// the same holds for dweights.
struct RunTogether {
  std::int64_t exchange;
  const MaybeArray& kept_x;
  const Factors& factors;
  const Factors& factor_grads;
  const MaybeArray& fp8_weights;

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
    sonicmoe::BegunBackward(c.exchange(), c.layer.problem, rows, args, device.exec(),
                            kept ? lend(*kept) : sonicmoe::Buffer{})
        .compute()
        .finish();
  }
};

#define SONICMOE_KEPT_X(ARGUMENT) ARGUMENT(MaybeArray, kept_x)
struct KeptX {
  SONICMOE_ARGUMENTS(SONICMOE_KEPT_X)
};
using ExchangeBackwardCall = Joined<BackwardCall, Factors, ExchangeNumber, KeptX, Fp8Argument>;
using ExchangeAccumulateCall = Joined<AccumulateCall, ExchangeNumber, KeptX, Fp8Argument>;

/// The gradients of the layer, then those of the factors.
inline auto exchange_backward(ExchangeBackwardCall& a) {
  const Factors grads = gradients_of(a.needs, a);
  const auto layer =
      written_gradients(a, RunTogether{a.exchange, a.kept_x, a, grads, a.fp8_weights});
  return std::tuple_cat(layer, all_or_nothing(grads, a.x));
}

inline FreshGradients exchange_backward_accumulate(ExchangeAccumulateCall& a) {
  const Factors none;
  return accumulated_gradients(a, RunTogether{a.exchange, a.kept_x, none, none, a.fp8_weights});
}

}  // namespace sonicmoe_torch
