// The exchange's functions of the CUDA backend, and its state.
#pragma once

#include <limits>

#include "core/exchange_step.h"
#include "cuda/device/device.h"
#include "cuda/exchange/kernels.h"

namespace sonicmoe {

/// One rank's exchange. exchange_open() sets all fields. Later only the step and `next` change.
struct Exchange : ExchangeState {
  static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  /// Below this work_per_row() rows of other ranks take longer to come than A takes, at 700 TFLOP/s
  /// and 370 GB/s.
  static constexpr std::int64_t kLinkBound = 1000;
  const cuda::Device* device = nullptr;
  cuda::ExchangeLayout layout{};
  cuda::Peers peers{};
  ExchangeTransport transport = ExchangeTransport::kPush;
  int multiprocessors = 0;
  cuda::WaitLimits limits{};
  cuda::FaultRecord* record = nullptr;  ///< pinned; limits.record is its device address
  std::int64_t* row_count = nullptr;    ///< pinned; the result of BegunForward::rows()
  cudaStream_t sending = nullptr;       ///< sends rows and partial sums
  cudaStream_t aside = nullptr;         ///< copies own rows; runs sums beside weight gradients
  cudaEvent_t reached = nullptr;        ///< the event that follow() records
  /// From this work_per_row() of layer.cc on, tiles of A and dH wait for rows of other ranks
  /// (RowArrivals). kNever if ranks share a GPU: one rank's waiting tiles would keep the other
  /// rank's kernels from running.
  std::int64_t awaits_from = kNever;
  int groups = 0;  ///< launches for rows of other ranks; 0: by the layer's sizes
};

namespace cuda {

std::int64_t exchange_bytes(const ExchangeShape& shape, const Exec& exec);
Exchange* exchange_open(const ExchangeOptions& options, const Exec& exec);
void exchange_close(Exchange* exchange, const Exec& exec);
void exchange_check(Exchange& exchange, const Exec& exec);
void exchange_reset(Exchange& exchange, const Exec& exec);
Sizes exchange_sizes(const Exchange& exchange, const Problem& problem, std::int64_t rows, Pass pass,
                     const Exec& exec);
void exchange_begin(Exchange& exchange, const ExchangeStep& step);
std::int64_t exchange_rows(Exchange& exchange);
void exchange_compute(Exchange& exchange, const ExchangeStep& step);
void exchange_finish(Exchange& exchange);

/// Refuses exec.device if its GPU or engine is not that of the exchange.
void check_handle(const Exchange& exchange, const Exec& exec);
/// Makes work that is enqueued on `stream` from now on wait for all work that is now on `earlier`.
void follow(const Exchange& exchange, cudaStream_t stream, cudaStream_t earlier);
/// Announces the phase's epoch (begin_phases()) to the other ranks: writes it to this rank's flag
/// in their buffers, after all earlier work in `stream`. A rank that has waited for the flag sees
/// the results of this earlier work. A rank that has a fault announces nothing. With kCopy the copy
/// engines write the flags: a kernel could not start before running products leave a multiprocessor
/// free.
void announce(const Exchange& exchange, Phase phase, cudaStream_t stream);
/// Sends rows (T, d) of this rank's tokens to the other ranks and announces their phase, on the
/// sending stream.
void send_rows(const Exchange& exchange, const Tensor& rows, const RowTarget& target);
/// Sends partial sums to one rank and announces the part's phase to it, on the sending stream.
void send_partials(const Exchange& exchange, const PartialSource& source);

}  // namespace cuda
}  // namespace sonicmoe
